"""Clients that hang up, servers that are full, stuck, failing or draining."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from builders import NullModel, Recorder
from openai_server import MODEL, RunningServer, arithmetic_server, byte_level_tokenizer, save_tokenizer, wait_until
from starlette.types import Message, Receive, Scope, Send

from kvwatch.telemetry.events import RequestRejected
from kvwatch_engine.contracts.step import StepInput
from kvwatch_engine.server import Drain, ServerSettings

HI = [{"role": "user", "content": "hi"}]
LONG: dict[str, object] = {"messages": HI, "max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"), byte_level_tokenizer())


def slow_model(seconds: float = 0.02) -> NullModel:
    model = NullModel(401)
    model.on_step = lambda _step: time.sleep(seconds)
    return model


def drain_of(server: RunningServer) -> Drain:
    drain = server.app.state.drain
    assert isinstance(drain, Drain)
    return drain


@contextmanager
def request_sent(
    server: RunningServer, body: dict[str, object], path: str = "/v1/chat/completions"
) -> Iterator[socket.socket]:
    """Send a request on a bare socket, whose answer nobody reads unless the test does."""
    content = json.dumps({"model": MODEL, **body}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(20)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(head.encode() + content)
        yield connection


@contextmanager
def in_background(server: RunningServer, **body: object) -> Iterator[Future[httpx.Response]]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(server.post, "/v1/chat/completions", **body)


# ---------------------------------------------------------------- clients that hang up


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("use_beam_search", [False, True])
def test_a_client_that_hangs_up_while_tokens_come_frees_its_blocks(
    folder: Path, is_stream: bool, use_beam_search: bool
) -> None:
    """vllm#24586, sglang#36552: the client was gone and generation went on."""
    with arithmetic_server(folder, slow_model()) as server:
        with request_sent(server, {**LONG, "stream": is_stream, "n": 2, "use_beam_search": use_beam_search}):
            wait_until(lambda: server.num_used_blocks > 8)

        assert server.wait_idle() < 4, "all 400 steps take 8 s"
        wait_until(lambda: drain_of(server).num_running == 0)
        assert server.dispatcher.num_open == 0


def test_a_client_that_hangs_up_in_mid_stream_after_reading_frees_its_blocks(folder: Path) -> None:
    with arithmetic_server(folder, slow_model()) as server, server.openai() as client:
        stream = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=400, stream=True
        )
        for _chunk, _ in zip(stream, range(3), strict=False):
            pass
        stream.close()

        assert server.wait_idle() < 4, "all 400 steps take 8 s"


def test_a_client_that_hangs_up_while_queued_leaves_the_queue(folder: Path) -> None:
    short = {**LONG, "max_tokens": 100}
    with arithmetic_server(folder, slow_model(), max_num_seqs=1) as server, in_background(server, **short) as first:
        wait_until(lambda: server.engine.num_live_requests == 1)
        with request_sent(server, LONG):
            wait_until(lambda: server.engine.num_live_requests == 2)

        wait_until(lambda: server.engine.num_live_requests == 1)
        assert not first.done()
        assert first.result(30).status_code == 200


def test_a_client_that_hangs_up_in_prefill_frees_its_blocks(folder: Path) -> None:
    steps: list[StepInput] = []

    def note(step: StepInput) -> None:
        steps.append(step)
        time.sleep(0.05)

    model = NullModel(401)
    model.on_step = note
    with arithmetic_server(folder, model, max_batch_tokens=8) as server:
        with request_sent(server, {"prompt": [7] * 400}, "/v1/completions"):
            wait_until(lambda: len(steps) > 3)

        server.wait_idle()
        assert 3 < len(steps) < 40, "the whole prompt takes 50"
        assert not any(step.sample_rows for step in steps)


def test_a_client_that_hangs_up_while_sending_its_body_leaves_nothing(folder: Path) -> None:
    with arithmetic_server(folder, NullModel(401)) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
            wait_until(lambda: drain_of(server).num_arriving == 1)

        assert wait_until(lambda: drain_of(server).num_arriving == 0) < 10, "a body may take longer to arrive"


def test_many_clients_that_hang_up_at_any_moment_leave_nothing(folder: Path) -> None:
    with arithmetic_server(folder, slow_model(0.002), max_num_seqs=4, max_batch_tokens=16) as server:

        def come_and_go(number: int) -> None:
            with request_sent(server, {**LONG, "stream": number % 2 == 0, "n": 1 + number % 3}):
                time.sleep(number % 7 * 0.02)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(come_and_go, range(60)))

        server.wait_idle()
        wait_until(lambda: drain_of(server).num_running == 0)
        assert server.dispatcher.num_open == 0
        server.engine.check_integrity()


def test_a_stop_string_ends_the_work_in_the_engine_too(folder: Path) -> None:
    with arithmetic_server(folder, slow_model(0.03)) as server:
        whole = server.post("/v1/completions", prompt="a", max_tokens=30, seed=1, ignore_eos=True).json()
        text = whole["choices"][0]["text"]
        begin = time.monotonic()
        server.post("/v1/completions", prompt="a", max_tokens=400, seed=1, ignore_eos=True, stop=text[10:14])

        server.wait_idle()
        assert time.monotonic() - begin < 6, "all 400 steps take 12 s"


# ---------------------------------------------------------------- clients that do not read


def test_a_client_that_does_not_read_is_dropped_before_its_tokens_fill_memory(folder: Path) -> None:
    limits = ServerSettings(max_unread_tokens=200)
    with arithmetic_server(
        folder, slow_model(0.001), limits, send_buffer_bytes=8192, num_blocks=4001, max_model_len=8192
    ) as server, request_sent(server, {**LONG, "stream": True, "max_tokens": 8000}):  # fmt: skip
        wait_until(lambda: server.engine.num_live_requests == 1)

        assert server.wait_idle(20) < 8  # all 8,000 steps take longer than that
        assert server.get("/health").status_code == 200


def test_a_client_that_takes_nothing_in_time_is_dropped(folder: Path) -> None:
    limits = ServerSettings(write_seconds=0.5)
    with arithmetic_server(
        folder, NullModel(401), limits, send_buffer_bytes=8192, num_blocks=2001, max_model_len=8192
    ) as server, request_sent(server, {**LONG, "stream": True, "max_tokens": 3000}):  # fmt: skip
        wait_until(lambda: drain_of(server).num_running == 1)
        server.wait_idle(20)

        assert wait_until(lambda: drain_of(server).num_running == 0, 10) < 5


def test_a_stream_without_a_token_sends_comments_that_clients_ignore(folder: Path) -> None:
    limits = ServerSettings(keepalive_seconds=0.05)
    with arithmetic_server(folder, slow_model(0.3), limits) as server:
        raw = server.post("/v1/chat/completions", messages=HI, max_tokens=3, stream=True, seed=1).text
        with server.openai() as client:
            chunks = list(client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=3, stream=True, seed=1
            ))  # fmt: skip

    assert raw.count(": waiting\n\n") >= 3
    assert chunks[-1].choices[0].finish_reason == "length"


# ---------------------------------------------------------------- full, draining


def test_a_full_queue_is_a_429_that_says_when_to_come_back(folder: Path) -> None:
    """vllm#2901, #18826: the queue had no bound."""
    with (
        arithmetic_server(folder, slow_model(), max_num_seqs=1, max_queued_requests=1) as server,
        request_sent(server, LONG),
    ):
        wait_until(lambda: server.num_used_blocks > 0)
        with request_sent(server, LONG), server.openai() as client:
            wait_until(lambda: server.engine.num_live_requests == 2)
            with pytest.raises(openai.RateLimitError) as caught:
                client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])

        assert caught.value.code == "queue_full"
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert "limit 1 requests" in str(caught.value)


def test_too_many_prompts_before_the_tokeniser_are_a_429(folder: Path) -> None:
    with arithmetic_server(folder, NullModel(401), ServerSettings(max_pending_prompts=0)) as server:
        answer = server.post("/v1/completions", prompt="a")

    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")


def test_while_draining_running_requests_finish_and_new_ones_are_refused(folder: Path) -> None:
    with arithmetic_server(folder, slow_model(0.01)) as server, in_background(server, **LONG) as running:
        wait_until(lambda: server.num_used_blocks > 0)
        drain_of(server).begin_drain()

        refused = server.post("/v1/chat/completions", messages=HI)
        ready, health = server.get("/ready"), server.get("/health")

        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert int(refused.headers["retry-after"]) >= 1
        assert (ready.status_code, health.status_code) == (503, 200)
        assert not running.done()
        assert running.result(30).json()["usage"]["completion_tokens"] == 400
        wait_until(lambda: drain_of(server).num_running == 0)


def test_a_request_whose_body_came_just_before_the_drain_is_counted_as_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with arithmetic_server(folder, NullModel(401)) as server:
        drain, recorder = drain_of(server), Recorder(server.log)
        arrive = drain.unless_draining

        async def arrive_and_drain(arrival: Coroutine[Any, Any, bytes]) -> bytes:
            body = await arrive(arrival)
            drain.begin_drain()
            return body

        monkeypatch.setattr(drain, "unless_draining", arrive_and_drain)
        answer = server.post("/v1/chat/completions", messages=HI)

        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
        wait_until(lambda: any(isinstance(event, RequestRejected) for event in recorder.drain()))
        assert [event.reason for event in recorder.drain() if isinstance(event, RequestRejected)] == ["draining"]


def test_more_prompts_than_the_queue_takes_are_refused_for_good_even_when_idle(folder: Path) -> None:
    with arithmetic_server(folder, NullModel(401), max_queued_requests=2) as server:
        too_many = server.post("/v1/completions", prompt=["a", "b", "c"], max_tokens=1)
        enough = server.post("/v1/completions", prompt=["a", "b"], max_tokens=1)

        assert too_many.status_code == 400
        assert "3 prompts, but the queue takes 2" in too_many.json()["error"]["message"]
        assert len(enough.json()["choices"]) == 2


def test_a_drain_of_the_engine_is_a_503_too(folder: Path) -> None:
    with arithmetic_server(folder, NullModel(401)) as server:
        server.engine.begin_drain(1.0)

        answer = server.post("/v1/completions", prompt="a")

        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
        assert server.get("/ready").status_code == 503


# ---------------------------------------------------------------- stuck, failing


def test_health_fails_while_a_step_is_stuck_and_recovers(folder: Path) -> None:
    """vllm#45414: running 0, waiting N, and /health said 200."""
    go_on = threading.Event()
    model = NullModel(401)
    model.on_step = lambda _step: time.sleep(0) if go_on.wait(20) else None
    with arithmetic_server(folder, model, stall_seconds=0.2) as server, in_background(server, **LONG) as stuck:
        wait_until(lambda: server.get("/health").status_code == 503)
        assert server.get("/health").json()["error"]["code"] == "engine_stuck"
        assert server.get("/ready").status_code == 503

        go_on.set()

        wait_until(lambda: server.get("/health").status_code == 200)
        assert stuck.result(30).status_code == 200


def fail_at_step_three(step: StepInput) -> None:
    time.sleep(0.01)
    if step.step % 4 == 3:
        raise ValueError("secret path /srv/weights")


def test_a_failing_step_is_a_500_that_tells_no_secrets_and_the_server_goes_on(folder: Path) -> None:
    model = NullModel(401)
    model.on_step = fail_at_step_three
    with arithmetic_server(folder, model) as server:
        answer = server.post("/v1/chat/completions", **LONG)

        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        assert "secret" not in answer.text
        model.on_step = lambda _step: None
        assert server.post("/v1/chat/completions", messages=HI, max_tokens=2).status_code == 200
        server.wait_idle()


def test_a_failing_step_ends_a_stream_with_an_error_that_the_client_raises(folder: Path) -> None:
    model = NullModel(401)
    model.on_step = fail_at_step_three
    with arithmetic_server(folder, model) as server, server.openai() as client:
        stream = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=400, stream=True, seed=1
        )
        with pytest.raises(openai.APIError, match="the engine failed") as caught:
            list(stream)

        assert caught.value.code == "engine_error"
        server.wait_idle()


def test_an_engine_that_stops_ends_its_requests_with_a_503(folder: Path) -> None:
    with arithmetic_server(folder, slow_model()) as server, in_background(server, **LONG) as running:
        wait_until(lambda: server.num_used_blocks > 0)
        server.engine.stop()

        assert running.result(10).status_code == 503
        assert running.result().json()["error"]["code"] == "aborted"
        assert server.get("/health").status_code == 503


def test_a_defect_of_the_server_is_a_500_that_tells_no_secrets(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def broken(_scope: Scope, _receive: Receive, _send: Send) -> None:
        raise ValueError("secret path /srv/weights")

    with arithmetic_server(folder, NullModel(401), metrics_app=broken) as server:
        answer = server.get("/metrics")

        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
        assert "secret" not in answer.text
        assert "secret" in caplog.text
        assert answer.headers["x-request-id"].startswith("req_")
        assert server.get("/health").status_code == 200


def test_a_server_that_reports_the_hang_up_when_sending_ends_the_work_too(folder: Path) -> None:
    """Newer ASGI servers raise OSError from `send`; uvicorn tells it through `receive`."""
    body = json.dumps({"model": MODEL, **LONG, "stream": True}).encode()
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [], "query_string": b""}
    messages = [{"type": "http.request", "body": body}]
    sent: list[Message] = []

    async def receive() -> Message:
        if not messages:
            await asyncio.sleep(60)
        return messages.pop()

    async def send(message: Message) -> None:
        if len(sent) == 3:
            raise OSError("broken pipe")
        sent.append(message)

    with arithmetic_server(folder, slow_model(0.03)) as server:
        asyncio.run(server.app(scope, receive, send))

        assert server.wait_idle() < 6, "all 400 steps take 12 s"
        assert [message["type"] for message in sent] == ["http.response.start", *["http.response.body"] * 2]
