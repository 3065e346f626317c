"""What the API tells the engine about a request beside its prompt reaches the events, whatever a client sends."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from builders import NullModel, Recorder
from openai_server import MODEL, RunningServer, arithmetic_server, byte_level_tokenizer, save_tokenizer, wait_until

from kvwatch.telemetry.events import RequestFinished, RequestQueued, RequestRejected

HI = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder: Path = save_tokenizer(tmp_path_factory.mktemp("tokenizer"), byte_level_tokenizer())
    with arithmetic_server(folder, NullModel(401)) as running:
        yield running


@pytest.mark.parametrize(("length", "told"), [(505, 512), (506, 0), (40_000, 0)])
@pytest.mark.parametrize(("limit", "status"), [(3, 200), (10**9, 400)])
def test_no_event_holds_a_tracestate_of_any_length(
    server: RunningServer, length: int, told: int, limit: int, status: int
) -> None:
    recorder = Recorder(server.log)
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    answer = httpx.post(
        f"{server.url}/v1/completions",
        json={"model": MODEL, "prompt": "hi", "max_tokens": limit},
        headers={"traceparent": trace, "tracestate": "vendor=" + "x" * length},
        timeout=60,
    )
    assert answer.status_code == status
    server.wait_idle()

    kind = RequestQueued if status == 200 else RequestRejected
    wait_until(lambda: any(isinstance(event, kind) for event in recorder.drain()), 60)
    assert [len(event.trace_state) for event in recorder.events if isinstance(event, kind)] == [told]


@pytest.mark.parametrize(
    ("path", "body", "tenant", "operation", "is_stream", "told"),
    [
        ("/v1/chat/completions", HI, "blue", "chat", False, "blue"),
        ("/v1/chat/completions", {**HI, "stream": True}, "", "chat", True, ""),
        ("/v1/completions", {"prompt": "hi"}, "x" * 500, "text_completion", False, "x" * 128),
        ("/v1/completions", {"prompt": "hi"}, "Zürich".encode(), "text_completion", False, "Zürich"),
        ("/v1/completions", {"prompt": "hi"}, "Zürich".encode("latin-1"), "text_completion", False, "Zürich"),
    ],
)
def test_operation_stream_and_tenant_are_in_the_events_and_a_tenants_name_is_bounded(
    server: RunningServer,
    path: str,
    body: dict[str, object],
    tenant: str | bytes,
    operation: str,
    is_stream: bool,
    told: str,
) -> None:
    recorder = Recorder(server.log)
    answer = httpx.post(
        f"{server.url}{path}",
        json={"model": MODEL, "max_tokens": 3, "temperature": 0.25, "seed": 9, **body},
        headers=[(b"x-kvwatch-tenant", tenant.encode() if isinstance(tenant, str) else tenant)] if tenant else [],
        timeout=60,
    )
    assert answer.status_code == 200
    server.wait_idle()

    (queued,) = [event for event in recorder.drain() if isinstance(event, RequestQueued)]
    assert (queued.operation, queued.is_stream, queued.tenant) == (operation, is_stream, told)
    assert (queued.max_tokens, queued.temperature, queued.seed) == (3, 0.25, 9)
    (finished,) = [event for event in recorder.drain() if isinstance(event, RequestFinished)]
    assert finished.tenant == told
