"""`kvwatch serve` with a collector that nobody here wrote (oteltap, in a process of its own)."""

import base64
import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import httpx
import pytest
from otlp_receiver import dead_endpoint
from server_process import serve_process
from tiny_models import make_tiny_model

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("model"))


class Tap:
    """The other side's collector; it ends when it has seen a span of a given name, and prints it."""

    def __init__(self, process: "subprocess.Popen[str]", port: int) -> None:
        self.process = process
        self.endpoint = f"http://127.0.0.1:{port}"
        self._lines: Queue[str | None] = Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def wait_for(self, pattern: str, seconds: float = 60) -> None:
        while True:
            line = self._next(seconds)
            assert line is not None, f"the collector ended without a line like {pattern!r}"
            if re.search(pattern, line):
                return

    def match(self, seconds: float = 60) -> dict[str, Any]:
        """Return the span that it waited for."""
        self.wait_for("Received a match", seconds)
        text = ""
        while (line := self._next(seconds)) is not None:
            text += line
        # What else it receives meanwhile it prints from other threads, each message on a line of its own.
        found, _ = json.JSONDecoder().raw_decode(text[text.index("{\n") :])
        assert isinstance(found, dict)
        return found

    def _next(self, seconds: float) -> str | None:
        try:
            return self._lines.get(timeout=seconds)
        except Empty:
            raise AssertionError(f"the collector said nothing for {seconds} s") from None


@contextmanager
def tap(span_name: str) -> Iterator[Tap]:
    pytest.importorskip("oteltap", reason="oteltap is not installed; pip install 'kvwatch[dev]' brings it")
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    command = [sys.executable, "-u", "-m", "oteltap", "--port", str(port), "--await-span", span_name]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        running = Tap(process, port)
        running.wait_for("Awaiting a span")
        yield running
    finally:
        process.kill()
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()


def test_a_collector_from_a_package_receives_the_spans_of_kvwatch_serve(folder: Path) -> None:
    with (
        tap("^text_completion tiny$") as collector,
        serve_process(folder, "--served-model-name", "tiny", "--otlp-endpoint", collector.endpoint) as server,
    ):
        answer = httpx.post(
            f"{server.api}/completions",
            json={"model": "tiny", "prompt": "go on", "max_tokens": 3, "ignore_eos": True},
            headers={"traceparent": f"00-{TRACE}-{SPAN}-01"},
            timeout=60,
        )
        assert answer.status_code == 200
        line = server.wait_for("request")
        span = collector.match()
        assert server.terminate() == 0

    found = {pair["key"]: next(iter(pair["value"].values())) for pair in span["attributes"]}
    assert span["kind"] == "SPAN_KIND_SERVER"
    assert found["gen_ai.response.id"] == answer.json()["id"] == line["answer_id"]
    assert found["gen_ai.usage.output_tokens"] == "3"
    assert base64.b64decode(span["traceId"]).hex() == line["trace_id"] == TRACE


def test_serve_starts_answers_and_ends_in_time_when_there_is_no_collector(folder: Path) -> None:
    endpoint = dead_endpoint("grpc")
    with serve_process(folder, "--served-model-name", "tiny", "--otlp-endpoint", endpoint, "--otlp-logs") as server:
        body = {"model": "tiny", "prompt": "go on", "max_tokens": 3, "ignore_eos": True}
        assert httpx.post(f"{server.api}/completions", json=body, timeout=60).status_code == 200
        line = server.wait_for("the collector does not take telemetry; serving is not affected", 60)
        assert "UNAVAILABLE" in str(line["reason"])
        assert server.terminate(15) == 0


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--otlp-endpoint", "collector:4317"], "--otlp-endpoint"),
        (["--otlp-endpoint", "grpc://collector", "--otlp-headers", "hunter2"], "--otlp-headers"),
        (["--otlp-endpoint", "grpc://collector", "--trace-ratio", "2"], "--trace-ratio"),
    ],
)
def test_a_wrong_setting_is_refused_before_the_model_is_loaded(flags: list[str], complaint: str) -> None:
    command = [sys.executable, "-m", "kvwatch", "serve", "--model", "no-such-folder", "--port", "0"]
    command += ["--metrics-listen", "off", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert complaint in done.stderr
    assert "hunter2" not in done.stderr
