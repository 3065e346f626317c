"""Spans at a receiver that nobody here wrote (oteltap): what it was sent agrees with what the client measured."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from builders import NullModel
from openai_server import MODEL, byte_level_tokenizer, save_tokenizer, wait_until
from otlp_engine import ObservedServer, observed_server
from prometheus_client.openmetrics.parser import text_string_to_metric_families

PARENT = "b7ad6b7169203331"
NUM_REQUESTS = 30
# A bucket keeps its latest exemplar. A request of ten times the steps shares no bucket with the fastest of the shorter
# ones, whatever the machine does.
LENGTHS = (2, 20, 200)


class Receiver:
    """An oteltap in a process of its own. It prints each span as a line."""

    def __init__(self, port: int, output: Path) -> None:
        self.endpoint = f"http://127.0.0.1:{port}"
        self._output = output

    @property
    def spans(self) -> list[dict[str, Any]]:
        """All spans so far; what is no whole line is still on its way."""
        lines = self._output.read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.startswith('{"traceId"') and line.endswith("\n")]

    @property
    def roots(self) -> dict[str, dict[str, Any]]:
        """The server's span of each trace."""
        return {span["traceId"]: span for span in self.spans if span["kind"] == 2}

    def phases(self, root: dict[str, Any]) -> dict[str, float]:
        """Return the seconds of each kind of phase of a request."""
        found: dict[str, float] = {}
        for span in self.spans:
            if span["parentSpanId"] == root["spanId"]:
                found[span["name"]] = found.get(span["name"], 0.0) + seconds(span)
        return found


def seconds(span: dict[str, Any]) -> float:
    return (int(span["endTimeUnixNano"]) - int(span["startTimeUnixNano"])) / 1e9


@contextmanager
def receiver(folder: Path) -> Iterator[Receiver]:
    pytest.importorskip("oteltap", reason="oteltap is not installed; pip install 'kvwatch[dev]' brings it")
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    output = folder / "spans.ndjson"
    with output.open("w", encoding="utf-8") as file:
        command = [sys.executable, "-u", "-m", "oteltap", "--port", str(port)]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: "Listening" in output.read_text(encoding="utf-8"), 60)
        yield Receiver(port, output)
    finally:
        process.kill()
        process.wait(10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"), byte_level_tokenizer())


def model() -> NullModel:
    made = NullModel(401)
    made.on_step = lambda _: time.sleep(0.002)
    return made


def ask(observed: ObservedServer, client: httpx.Client, trace: str, num_tokens: int = 20) -> float:
    """Send a request of this trace; return the seconds that its client waited."""
    body = {"model": MODEL, "prompt": "hello", "ignore_eos": True, "max_tokens": num_tokens}
    headers = {"traceparent": f"00-{trace}-{PARENT}-01"}
    begin = time.monotonic()
    answer = client.post(f"{observed.server.url}/v1/completions", json=body, headers=headers, timeout=60)
    elapsed = time.monotonic() - begin
    assert answer.status_code == 200, answer.text
    return elapsed


def test_phases_at_a_receiver_from_a_package_agree_with_the_client_and_exemplars_are_found_there(
    folder: Path, tmp_path: Path
) -> None:
    with (
        receiver(tmp_path) as collected,
        observed_server(folder, model(), collected.endpoint) as observed,
        httpx.Client() as client,
    ):
        ask(observed, client, f"{NUM_REQUESTS + 1:032x}")  # connects, and warms the tokenizer
        measured, controls = {}, []
        for number in range(1, NUM_REQUESTS + 1):
            begin = time.monotonic()
            client.get(f"{observed.server.url}/health")
            controls.append(time.monotonic() - begin)
            trace = f"{number:032x}"
            measured[trace] = ask(observed, client, trace, LENGTHS[number % len(LENGTHS)])
        wait_until(lambda: len(collected.roots) > NUM_REQUESTS, 60)
        # The page is up to a second old, and a trace is offered to it once the receiver has answered.
        wait_until(lambda: len(exemplars(page_of(observed, client))) >= len(LENGTHS), 60)
        found = exemplars(page_of(observed, client))

        roots = collected.roots
        exceeding = []
        for trace, elapsed in measured.items():
            phases = collected.phases(roots[trace])
            assert phases.keys() == {"queue", "prefill", "decode"}
            assert sum(phases.values()) == pytest.approx(seconds(roots[trace]), abs=1e-6)
            exceeding.append(elapsed - sum(phases.values()))

    assert min(exceeding) >= 0
    # Whatever else runs on the machine only adds, as it does to requests that reach no engine: the least disturbed
    # request shows that nothing is missing.
    assert min(exceeding) < 0.005 + min(controls)
    assert found <= roots.keys()


def page_of(observed: ObservedServer, client: httpx.Client) -> str:
    return client.get(f"{observed.server.url}/metrics", headers={"accept": "application/openmetrics-text"}).text


def exemplars(page: str) -> set[str]:
    """Return the traces of all exemplars."""
    return {
        sample.exemplar.labels["trace_id"]
        for family in text_string_to_metric_families(page)  # type: ignore[no-untyped-call]
        for sample in family.samples
        if sample.exemplar is not None
    }
