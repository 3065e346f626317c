"""Hostile grammars while others generate: each is refused, and the others never stand still for one."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from builders import NullModel
from openai_server import MODEL, RunningServer, arithmetic_server, byte_level_tokenizer, save_tokenizer, wait_until

from kvwatch_engine.contracts.step import StepInput, StepResult

VOCAB_SIZE = 400
DOUBLING = (
    "start: A\nA: B B\n" + "".join(f"{chr(66 + i)}: {chr(67 + i)} {chr(67 + i)}\n" for i in range(22)) + 'X: "x"\n'
)
CHAIN = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(4000)) + 'r4000: "a"\n'
HOSTILE: dict[str, dict[str, object]] = {
    "thousands of names": {
        "guided_json": {"allOf": [{"properties": {f"{i + j:x}": {} for i in range(600)}} for j in range(0, 6000, 600)]}
    },
    "alternatives of alternatives": {
        "guided_json": {
            "allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}, "required": [f"p{i}{j}"]} for j in range(8)]}
                      for i in range(8)]
        }
    },
    "a chain that takes the stack": {"guided_grammar": CHAIN},
    "a terminal of astronomic size": {"guided_grammar": DOUBLING},
    "parentheses": {"guided_grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000 + "\n"},
    "a deep expression": {"guided_regex": "(" * 2_000 + "a" + ")" * 2_000},
    "a huge expression": {"guided_regex": "a" * 100_000},
    "an exponential expression": {"guided_regex": "(?:" * 300 + "a" + "){1,99}" * 300},
    "a deep schema": {"guided_json": json.loads('{"items":' * 300 + "{}" + "}" * 300)},
    "a huge schema": {"guided_json": {"enum": list(range(100_000))}},
}  # fmt: skip


class CountingModel(NullModel):
    """Counts what the free request gets."""

    num_tokens = 0

    def execute(self, step: StepInput) -> StepResult:
        result = super().execute(step)
        self.num_tokens += len(step.sample_rows)
        return result


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, CountingModel]]:
    folder: Path = save_tokenizer(tmp_path_factory.mktemp("model"), byte_level_tokenizer(VOCAB_SIZE))
    model = CountingModel(VOCAB_SIZE)
    with arithmetic_server(folder, model, num_blocks=4097, max_model_len=16_000) as running:
        yield running, model


class FreeStream:
    """A client that reads one long stream after the other on its own thread, and counts its events."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._is_over = threading.Event()
        self.num_events = 0
        self._thread = threading.Thread(target=self._read, name="free-stream")
        self._thread.start()

    def _read(self) -> None:
        body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 15_000, "ignore_eos": True, "stream": True}
        while not self._is_over.is_set():
            # A starved reader is hung up on, as slow clients are; it comes again.
            with (
                contextlib.suppress(httpx.RemoteProtocolError),
                httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=60) as answer,
            ):
                for line in answer.iter_lines():
                    self.num_events += line.startswith("data: {")
                    if self._is_over.is_set():
                        return

    def close(self) -> None:
        self._is_over.set()
        self._thread.join(60)


@pytest.fixture
def stream(stage: tuple[RunningServer, CountingModel]) -> Iterator[FreeStream]:
    reader = FreeStream(stage[0].url)
    try:
        wait_until(lambda: reader.num_events > 10)
        yield reader
    finally:
        reader.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_and_a_stream_goes_on(
    stage: tuple[RunningServer, CountingModel], stream: FreeStream, name: str
) -> None:
    server, _ = stage

    answer = server.post("/v1/completions", prompt="x", **HOSTILE[name])

    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("guided_")
    before = stream.num_events
    wait_until(lambda: stream.num_events > before + 10)


def test_while_a_grammar_takes_all_of_its_time_others_get_their_tokens(
    stage: tuple[RunningServer, CountingModel], stream: FreeStream
) -> None:
    server, model = stage
    before = model.num_tokens

    answer = server.post("/v1/completions", prompt="x", **HOSTILE["thousands of names"])
    meanwhile = model.num_tokens - before

    assert answer.status_code == 400
    assert meanwhile >= 5, "compiling it takes its second, or nearly; a step takes a thousandth"
    assert stream.num_events > 0


def test_many_hostile_grammars_at_once_leave_honest_ones_and_free_requests_their_way(
    stage: tuple[RunningServer, CountingModel], stream: FreeStream
) -> None:
    server, _ = stage
    honest: dict[str, object] = {"prompt": "x", "guided_regex": "[ab]{3}", "max_tokens": 8}
    assert server.post("/v1/completions", **honest).status_code == 200
    answers: list[int] = []

    def send(body: dict[str, object]) -> Callable[[], None]:
        return lambda: answers.append(server.post("/v1/completions", prompt="x", **body).status_code)

    threads = [threading.Thread(target=send(body)) for body in HOSTILE.values()]
    for thread in threads:
        thread.start()
    before = stream.num_events
    text = server.post("/v1/completions", **honest).json()["choices"][0]["text"]
    for thread in threads:
        thread.join()

    assert len(text) == 3
    assert set(text) <= {"a", "b"}
    assert answers == [400] * len(HOSTILE)
    wait_until(lambda: stream.num_events > before + 10)
    assert server.post("/v1/completions", prompt="x", guided_regex="[cd]{2}", max_tokens=8).status_code == 200
