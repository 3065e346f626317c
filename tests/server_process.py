"""`kvwatch serve` as its users run it: a process of its own, found through the addresses that it announces."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, Queue

import httpx
from openai import OpenAI

NO_FURTHER_PORTS = ("--metrics-listen", "off", "--grpc-listen", "off", "--admin-listen", "off")
"""Flags for processes that are to be refused for another reason than a port that somebody else holds."""


class ServerProcess:
    """A running server."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.lines: list[dict[str, object]] = []
        """Its log so far, one dictionary for each line."""
        self._queue: Queue[str] = Queue()
        self.api = ""
        self.metrics_url = ""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._queue.put(line)

    def wait_for(self, event: str, seconds: float = 60.0) -> dict[str, object]:
        """Wait until the server logs `event`; return the line."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self._queue.get(timeout=max(0.01, deadline - time.monotonic()))
            except Empty:
                raise AssertionError(f"no {event!r} within {seconds} s; the log so far: {self.lines}") from None
            with contextlib.suppress(json.JSONDecodeError):
                self.lines.append(json.loads(line))
                if self.lines[-1].get("event") == event:
                    return self.lines[-1]
                continue
            self.lines.append({"raw": line})

    def drain_log(self) -> list[dict[str, object]]:
        """Return all log lines of a server that has ended."""
        while True:
            try:
                line = self._queue.get(timeout=0.2)
            except Empty:
                return self.lines
            with contextlib.suppress(json.JSONDecodeError):
                self.lines.append(json.loads(line))

    def openai(self) -> OpenAI:
        """Return the official client, which does not retry."""
        return OpenAI(base_url=self.api, api_key="none", max_retries=0, timeout=180)

    def metrics(self) -> dict[str, float]:
        """Scrape, when what happened is on the page; return series (without the common labels) and their values."""
        time.sleep(1.7)
        text = httpx.get(self.metrics_url, timeout=60).text
        series: dict[str, float] = {}
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                name = re.sub(r'(engine|dp_rank|model_name)="[^"]*",?', "", name).replace(",}", "}").replace("{}", "")
                series[name] = float(value)
        return series

    def terminate(self, seconds: float = 20.0) -> int:
        """Send SIGTERM and wait; return the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)


@contextlib.contextmanager
def serve_process(
    model: Path | str, *flags: str, cwd: Path | None = None, ready_seconds: float = 120
) -> Iterator[ServerProcess]:
    """Start a server on free ports and wait until it is ready."""
    command = [
        sys.executable, "-m", "kvwatch", "serve", "--model", str(model), "--port", "0",
        "--metrics-listen", "127.0.0.1:0", "--grpc-listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0",
        "--flight-dir", "off", "--log-format", "json", *flags,
    ]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, cwd=cwd)
    server = ServerProcess(process)
    try:
        ready = server.wait_for("ready", ready_seconds)
        server.api, server.metrics_url = str(ready["api"]), str(ready["metrics"])
        yield server
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(10)
        if process.stderr is not None:
            process.stderr.close()
