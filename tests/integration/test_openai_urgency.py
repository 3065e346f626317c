"""Priority and deadline over HTTP."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from builders import NullModel, Recorder
from openai_server import MODEL, RunningServer, arithmetic_server, byte_level_tokenizer, save_tokenizer, wait_until

from kvwatch.telemetry.events import RequestAdmitted, RequestFinished, RequestQueued
from kvwatch_engine.contracts.step import StepInput

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"), byte_level_tokenizer())


def slow_model(seconds: float = 0.02) -> NullModel:
    model = NullModel(401)
    model.on_step = lambda _step: time.sleep(seconds)
    return model


def gated_model(gate: threading.Event) -> NullModel:
    model = NullModel(401)

    def wait(_step: StepInput) -> None:
        assert gate.wait(20)

    model.on_step = wait
    return model


def num_live(server: RunningServer) -> int:
    return server.engine.num_live_requests


def test_the_body_says_who_goes_first(folder: Path) -> None:
    gate = threading.Event()
    with arithmetic_server(folder, gated_model(gate), max_num_seqs=1) as server, ThreadPoolExecutor(4) as pool:
        recorder = Recorder(server.log)
        answers = []
        for number, priority in enumerate([None, 7, 0, 3]):
            body = {"messages": HI, "max_tokens": 2} | ({} if priority is None else {"priority": priority})
            answers.append(pool.submit(server.post, "/v1/chat/completions", **body))
            wait_until(lambda number=number: num_live(server) == number + 1)  # type: ignore[misc]
        gate.set()
        assert [answer.result().status_code for answer in answers] == [200] * 4

        queued = {e.request: e.priority for e in recorder.drain() if isinstance(e, RequestQueued)}
        admitted = [queued[e.request] for e in recorder.drain() if isinstance(e, RequestAdmitted)]
        assert list(queued.values()) == [0, 7, 0, 3]
        assert admitted == [0, 0, 3, 7]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_request_that_takes_too_long_is_answered_with_504(folder: Path, path: str) -> None:
    prompt = {"messages": HI} if "chat" in path else {"prompt": "hi"}
    with arithmetic_server(folder, slow_model()) as server:
        recorder = Recorder(server.log)
        begin = time.monotonic()
        answer = server.post(path, **prompt, max_tokens=400, ignore_eos=True, deadline_seconds=0.2)

        assert time.monotonic() - begin < 6
        assert answer.status_code == 504
        error = answer.json()["error"]
        assert error["code"] == "deadline_exceeded"
        assert "0.2 seconds" in error["message"]
        assert "deadline_seconds" in error["message"]
        server.wait_idle()
        assert [e.reason for e in recorder.drain() if isinstance(e, RequestFinished)] == ["deadline"]


def test_a_stream_that_takes_too_long_ends_with_an_error_and_a_waiting_one_too(folder: Path) -> None:
    with arithmetic_server(folder, slow_model(), max_num_seqs=1, deadline_seconds=0.4) as server:
        with ThreadPoolExecutor(1) as pool, server.openai() as client:
            stream = client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "hi"}],
                max_tokens=400,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            waiting = pool.submit(server.post, "/v1/chat/completions", messages=HI, deadline_seconds=0.2)
            with pytest.raises(openai.APIError, match=r"0.4 seconds"):
                for _ in stream:
                    pass
            assert waiting.result().status_code == 504
        server.wait_idle()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("priority", -1), ("priority", 101), ("priority", 10**30), ("deadline_seconds", 0), ("deadline_seconds", -3.5),
        ("deadline_seconds", 1e300), ("priority", "high"), ("deadline_seconds", [1]), ("priority", 1.5),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_name(folder: Path, field: str, value: object) -> None:
    with arithmetic_server(folder, NullModel(401)) as server:
        answer = httpx.post(
            f"{server.url}/v1/chat/completions",
            content=json.dumps({"model": MODEL, "messages": HI, field: value}),
            headers={"content-type": "application/json"},
        )
        assert answer.status_code == 400
        assert field in answer.json()["error"]["message"]
