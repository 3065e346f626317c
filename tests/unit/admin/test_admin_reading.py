"""What the admin API shows of a running engine is what the engine says of itself."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from admin_stage import TOKEN_FILE, TOKENS, AdminStage, admin_stage
from openai_server import wait_until

from kvwatch.admin import event_stream
from kvwatch.admin.looking import PAUSE_SECONDS


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminStage]:
    with admin_stage(tmp_path_factory.mktemp("admin")) as running:
        yield running


def test_the_pool_obeys_the_law_and_agrees_with_the_engine(stage: AdminStage) -> None:
    stage.submit("a", max_tokens=50)
    wait_until(lambda: stage.engine.num_live_requests == 0, 60)
    state = stage.engine.snapshot().tiers[0]
    used = sum(1 for count in state.ref_counts[1:] if count)
    cached = sum(1 for n, h in zip(state.ref_counts[1:], state.hashes[1:], strict=True) if not n and h is not None)
    wait_until(lambda: stage.observatory.view.seq == stage.log.head - 1, 60)

    with stage.client() as client:
        pool = client.get("/pool").json()

    (tier,) = pool["tiers"]
    assert (tier["capacity"], tier["used"], tier["cached"]) == (400, used, cached)
    assert tier["empty"] == 400 - used - cached
    assert tier["is_lawful"]
    assert tier["equation"].startswith("capacity 400 = ")
    assert sum(int(word) for word in tier["equation"].split("=")[1].split() if word.isdigit()) == 400
    assert pool["block_size_tokens"] == 16
    assert cached > 0


def test_the_engine_is_listed(stage: AdminStage) -> None:
    with stage.client() as client:
        (engine,) = client.get("/engines").json()["engines"]

    assert engine["engine"] == "chat"
    assert engine["is_alive"]
    assert engine["is_ready"]
    assert engine["state"] == "reached"


@pytest.mark.parametrize(
    ("query", "status"), [("engine=chat", 200), ("engine=chat&dp_rank=0", 200), ("engine=b", 404), ("dp_rank=3", 404)]
)
def test_an_engine_may_be_named(stage: AdminStage, query: str, status: int) -> None:
    with stage.client() as client:
        assert client.get(f"/pool?{query}").status_code == status


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("dp_rank=x", 422),
        ("dp_rank=-1", 422),
        ("unknown=1", 422),
        ("engine=a&engine=b", 400),
        ("engine=" + 9000 * "a", 400),
    ],
)
def test_a_wrong_parameter_is_named(stage: AdminStage, query: str, status: int) -> None:
    with stage.client() as client:
        answer = client.get(f"/pool?{query}")

    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["status"] == status


def test_what_has_not_changed_is_not_sent_again(stage: AdminStage) -> None:
    with stage.client() as client:
        first = client.get("/engines")
        again = client.get("/engines", headers={"If-None-Match": first.headers["etag"]})
        other = client.get("/engines", headers={"If-None-Match": '"something else"'})

    assert (first.status_code, again.status_code, other.status_code) == (200, 304, 200)
    assert again.content == b""
    assert again.headers["etag"] == first.headers["etag"]


def test_head_answers_as_get_without_a_body(stage: AdminStage) -> None:
    with stage.client() as client:
        for path in ("/engines", "/pool", "/../openapi.json"):
            url = httpx.URL(stage.url + "/openapi.json") if "openapi" in path else path
            get, head = client.get(url), client.head(url)
            assert head.status_code == 200
            assert head.content == b""
            assert head.headers["content-type"] == get.headers["content-type"]


def test_the_document_is_open_api_and_lists_what_is_answered(stage: AdminStage) -> None:
    document = httpx.get(f"{stage.url}/openapi.json").json()

    assert document["openapi"].startswith("3.1")
    assert "/admin/v1/pool" in document["paths"]
    with stage.client() as client:
        for path, methods in document["paths"].items():
            if "get" in methods and "{" not in path and "events" not in path:
                assert client.get(stage.url + path).status_code in {200, 409}, path


def test_whoever_looks_all_the_time_leaves_the_engine_time_for_its_steps(stage: AdminStage) -> None:
    with stage.client() as client, ThreadPoolExecutor(8) as many:
        began = time.monotonic()
        found = list(many.map(lambda path: client.get(path).status_code, ["/blocks", "/prefixes", "/requests"] * 9))

        assert set(found) == {200}
        assert time.monotonic() - began >= (len(found) - 1) * PAUSE_SECONDS


# ---------------------------------------------------------------- events


def read_events(
    stage: AdminStage, number: int, last_id: str = "", token: str | None = None, **query: str
) -> list[dict[str, str]]:
    """Read so many messages of the event stream."""
    found: list[dict[str, str]] = []
    headers = {"Last-Event-ID": last_id} if last_id else {}
    with (
        stage.client(token) as client,
        client.stream("GET", "/events", params={"seconds": "60", **query}, headers=headers) as answer,
    ):
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        message: dict[str, str] = {}
        for line in answer.iter_lines():
            if line:
                name, _, value = line.partition(": ")
                message[name] = value
            elif "data" in message:
                found.append(message)
                message = {}
                if len(found) == number:
                    return found
            else:
                message = {}
                if not found and last_id == "":
                    stage.submit(f"r{stage.log.head}", max_tokens=20)  # it listens: now something may happen
    return found


def test_events_come_in_order_and_a_stream_resumes_where_it_was(stage: AdminStage) -> None:
    first = read_events(stage, 5)
    rest = read_events(stage, 5, last_id=first[1]["id"])

    numbers = [json.loads(message["data"])["seq"] for message in first]
    assert numbers == list(range(numbers[0], numbers[0] + 5))
    assert [message["id"] for message in rest][:3] == [message["id"] for message in first[2:]]
    assert [message["data"].split('"seq"')[1] for message in rest][:3] == [
        m["data"].split('"seq"')[1] for m in first[2:]
    ]


def test_events_are_filtered_by_family_name_and_request(stage: AdminStage) -> None:
    blocks = read_events(stage, 3, events="block")
    ends = read_events(stage, 1, events="request.finished,step")

    assert {message["event"].split(".")[0] for message in blocks} == {"block"}
    assert {message["event"].split(".")[0] for message in ends} <= {"request", "step"}


def test_an_id_of_an_earlier_run_is_answered_with_what_was_missed(stage: AdminStage) -> None:
    stage.submit(f"r{stage.log.head}", max_tokens=20)
    wait_until(lambda: stage.log.head > 0, 60)

    messages = read_events(stage, 2, last_id="0123456789abcdef-5")

    assert messages[0]["event"] == "gap"
    assert "of no event of this run" in messages[0]["data"]
    assert json.loads(messages[1]["data"])["seq"] == json.loads(messages[0]["data"])["next"]


@pytest.mark.parametrize(
    ("query", "header", "status"),
    [
        ("events=blocks", "", 422),
        ("seconds=-1", "", 422),
        ("seconds=0", "nonsense", 200),
        ("seconds=0", "-", 200),
        ("seconds=0", "a-99999999999999999999", 200),
    ],
)
def test_a_wrong_wish_is_refused_at_once_and_a_strange_id_is_one_of_another_run(
    stage: AdminStage, query: str, header: str, status: int
) -> None:
    with stage.client() as client:
        answer = client.get(f"/events?{query}", headers={"Last-Event-ID": header} if header else {})
    assert answer.status_code == status


def test_a_stream_ends_when_its_time_is_over(stage: AdminStage) -> None:
    with stage.client() as client:
        answer = client.get("/events?seconds=0.1")
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("now", "is_over"),
    [
        (TOKEN_FILE.replace(TOKENS["prompts"], "another-0123456789abcdef"), True),
        (TOKEN_FILE.replace("prompts   prompts", "prompts   read   "), True),
        (TOKEN_FILE.replace("2099-01-01T00:00:00Z", "2001-01-01"), True),
        (TOKEN_FILE.replace("prompts   prompts", "prompts   prompts,operate"), False),
    ],
    ids=["gone", "less allowed", "expired", "more allowed"],
)
def test_a_stream_ends_when_its_token_does(
    tmp_path: Path, now: str, is_over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "LOOK_SECONDS", 0.1)
    with admin_stage(tmp_path) as stage, stage.client("prompts") as client:
        seconds = 60 if is_over else 3
        began = time.monotonic()
        with client.stream("GET", "/events", params={"seconds": seconds}) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith(": ")
            (tmp_path / "tokens").write_text(now, encoding="utf-8")
            rest = "".join(lines)

        assert ("token" in rest) == is_over
        assert (time.monotonic() - began < seconds) == is_over


def test_streams_are_bounded_and_give_back_their_place(tmp_path: Path) -> None:
    with admin_stage(tmp_path, options={"max_streams": 2}) as stage, stage.client() as client:
        with client.stream("GET", "/events") as first, client.stream("GET", "/events") as second:
            assert (first.status_code, second.status_code) == (200, 200)
            assert client.get("/events").status_code == 429
        wait_until(lambda: client.get("/events?seconds=0").status_code == 200, 60)


@pytest.mark.parametrize(("token", "is_told"), [(None, False), ("read", False), ("operate", False), ("prompts", True)])
def test_token_ids_are_shown_to_those_who_may_see_prompts(tmp_path: Path, token: str | None, is_told: bool) -> None:
    with admin_stage(tmp_path, emit_token_ids=True) as stage:
        (message,) = read_events(stage, 1, token=token, events="block.stored")

    data = json.loads(message["data"])
    assert data["hashes"]
    assert bool(data.get("token_ids")) == is_told
