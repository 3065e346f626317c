"""The admin API over gRPC: the same answers to the same people, and a token always."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import pytest
from admin_access import ODD, PATHS, SENT, expected, filled
from admin_stage import TOKENS, AdminStage, admin_stage

from kvwatch.wire.control import METHOD_PATH, CallReply, CallRequest, decode_reply, decode_request, encode_request

CODES = {
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
}


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminStage]:
    folder = tmp_path_factory.mktemp("admin")
    (folder / "stream").write_text("a-token-of-the-stream\n", encoding="utf-8")
    with admin_stage(folder, stream_token_file=str(folder / "stream")) as running:
        yield running


def call(stage: AdminStage, request: CallRequest, sent: str | None) -> CallReply:
    """Call once; a refusal by status is a reply with the HTTP status that it stands for."""
    metadata: Sequence[tuple[str, str]] = () if sent is None else (("authorization", sent),)
    with grpc.insecure_channel(stage.grpc) as channel:
        try:
            reply: CallReply = channel.unary_unary(METHOD_PATH, encode_request, decode_reply)(
                request, timeout=60, metadata=metadata
            )
        except grpc.RpcError as error:
            return CallReply(status=CODES[error.code()])
    return reply


@pytest.mark.parametrize("who", SENT)
def test_every_operation_demands_what_it_does_over_http(stage: AdminStage, who: str) -> None:
    for path in PATHS:
        for method in ("GET", "POST", "PATCH", "DELETE"):
            status = call(stage, CallRequest(method=method, path=filled(path)), SENT[who]).status
            wanted = expected(path, method, who, is_reading_open=False)
            if path.endswith("/events") and who != "nobody":
                wanted = {501}
            assert status in wanted | ({409} if "{" in path and 200 in wanted else set()), (method, path, who)


def test_who_sends_no_token_is_counted_and_told_to_wait(tmp_path: Path) -> None:
    with admin_stage(tmp_path, options={"failures_per_minute": 1, "failures_at_once": 3}) as stage:
        asked = CallRequest(path="/admin/v1/pool")

        found = [call(stage, asked, None).status for _ in range(5)]

        assert found == [401, 401, 401, 429, 429]
        assert stage.value("admin_auth_failures", reason="missing") == 5
        assert call(stage, asked, SENT["read"]).status == 200


@pytest.mark.parametrize("path", ODD)
def test_what_is_not_listed_is_not_there(stage: AdminStage, path: str) -> None:
    for who, status in (("nobody", 401), ("unknown", 401), ("read", 404), ("operate", 404)):
        assert call(stage, CallRequest(path=path or "/"), SENT[who]).status == status


def test_a_token_of_the_event_stream_changes_nothing(stage: AdminStage) -> None:
    assert call(stage, CallRequest(path="/admin/v1/pool"), "Bearer a-token-of-the-stream").status == 401


@pytest.mark.parametrize("method", ["Snapshot", "Subscribe"])
@pytest.mark.parametrize("who", [*SENT, "the stream's own"])
def test_a_token_of_the_admin_api_reads_no_event_stream(stage: AdminStage, method: str, who: str) -> None:
    sent = "Bearer a-token-of-the-stream" if who == "the stream's own" else SENT[who]
    metadata: Sequence[tuple[str, str]] = () if sent is None else (("authorization", sent),)
    with grpc.insecure_channel(stage.grpc) as channel:
        answer = channel.unary_stream(f"/kvwatch.v1.Telemetry/{method}")(b"", timeout=60, metadata=metadata)
        if who == "the stream's own":
            assert next(answer)
            return
        with pytest.raises(grpc.RpcError) as caught:
            next(answer)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_change_is_made_and_recorded_with_who_wanted_it(stage: AdminStage) -> None:
    sent = f"Bearer {TOKENS['operate']}"
    config = call(stage, CallRequest(path="/admin/v1/config"), sent)
    body = json.dumps({"changes": {"watermark": "5"}, "reason": "over gRPC"}).encode()
    asked = CallRequest(
        method="PATCH", path="/admin/v1/config", if_match=config.etag, body=body, on_behalf_of="alice at 10.0.0.1"
    )

    done, again = call(stage, asked, sent), call(stage, asked, sent)

    assert (done.status, again.status) == (200, 412)
    assert json.loads(done.body)["audit"]["address"] == "127.0.0.1 for alice at 10.0.0.1"
    assert again.content_type == "application/problem+json"


def test_what_is_no_request_is_refused(stage: AdminStage) -> None:
    with grpc.insecure_channel(stage.grpc) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(METHOD_PATH)(b"\xff\xff", timeout=60)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_requests_go_over_the_wire_unharmed() -> None:
    request = CallRequest(method="PATCH", path="/ä?x=1", if_match='"a"', body=b"\x00\xff", on_behalf_of="b")
    assert decode_request(encode_request(request)) == request


def test_the_service_has_no_other_name_here(tmp_path: Path) -> None:
    """Telemetry on the same address still wants its own token."""
    (tmp_path / "stream").write_text("a-token-of-the-stream\n", encoding="utf-8")
    with admin_stage(tmp_path, stream_token_file=str(tmp_path / "stream")) as stage:
        with grpc.insecure_channel(stage.grpc) as channel, pytest.raises(grpc.RpcError) as caught:
            list(channel.unary_stream("/kvwatch.v1.Telemetry/Snapshot")(b"", timeout=60))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
