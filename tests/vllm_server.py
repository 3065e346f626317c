"""A real vLLM on the CPU, in an environment of its own, for tests of the sidecar.

The environment variable KVWATCH_VLLM_PYTHON names its interpreter; `make test-vllm` makes both.
"""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

PYTHON = "KVWATCH_VLLM_PYTHON"
BLOCK_SIZE = 32
NUM_BLOCKS = 56
MODEL = "smollm2"
TOPIC = "kv@pod-a@smollm2"
START_SECONDS = 900.0


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class VLLM:
    """The server of one model. `start`, `kill` and `start` again as often as wanted; ports stay."""

    def __init__(
        self, model: Path, log: Path, endpoints: tuple[str, str] | None = None, port: int | None = None
    ) -> None:
        self._model = model
        self._endpoints = endpoints
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self.port = port or free_port()
        self.events_port, self.replay_port = free_port(), free_port()
        self.events_host = "*"
        """With a wildcard vLLM binds the address of its events, with any other host it connects to it."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it and return when it answers."""
        own = (f"tcp://{self.events_host}:{self.events_port}", f"tcp://*:{self.replay_port}")
        live, replay = self._endpoints or own
        events = json.dumps(
            {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": live,
                "replay_endpoint": replay,
                "topic": TOPIC,
            }
        )
        command = [
            os.environ[PYTHON], "-m", "vllm.entrypoints.openai.api_server", "--model", str(self._model),
            "--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager", "--block-size", str(BLOCK_SIZE),
            "--num-gpu-blocks-override", str(NUM_BLOCKS), "--max-model-len", "1536", "--max-num-seqs", "16",
            "--served-model-name", MODEL, "--kv-cache-metrics", "--kv-cache-metrics-sample", "1.0",
            "--kv-events-config", events,
        ]  # fmt: skip
        clean = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
        environment = clean | {
            "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
        }  # fmt: skip
        with self._log.open("ab") as log:
            # A session of its own: the server has children, and all must end with it.
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            assert self._process.poll() is None, f"vLLM ended: {self._log.read_text()[-3000:]}"
            assert time.monotonic() < deadline, f"vLLM did not start: {self._log.read_text()[-3000:]}"
            time.sleep(0.2)

    def kill(self) -> None:
        """End it at once, as a crash does."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)

    def complete(self, token_ids: Sequence[int], max_tokens: int = 8, timeout: float = 60) -> None:
        """Have a prompt continued."""
        body = {
            "model": MODEL,
            "prompt": list(token_ids),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        httpx.post(f"{self.url}/v1/completions", json=body, timeout=timeout).raise_for_status()

    def counter(self, name: str) -> float:
        """Return the sum of a counter of its own metrics."""
        page = httpx.get(f"{self.url}/metrics", timeout=30).text
        return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(name + "{"))

    def _answers(self) -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/health", timeout=2).status_code == 200
        return False


@contextmanager
def running_vllm(
    model: Path, log: Path, endpoints: tuple[str, str] | None = None, port: int | None = None
) -> Iterator[VLLM]:
    """Run a server for as long as the block lasts; `endpoints` are those of live events and of replays."""
    server = VLLM(model, log, endpoints, port)
    try:
        server.start()
        yield server
    finally:
        server.kill()
