"""`kvwatch serve` as a child process: on free ports of the loopback, found by what it announces, never left behind."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

START_SECONDS = 900.0
"""A model may have to be downloaded and converted first."""

TIED = Path(__file__).with_name("tied.py")
"""Run by its path: a replica may have found this package by something that a child does not inherit."""

OWN_FLAGS = (
    "--host", "127.0.0.1", "--port", "0", "--metrics-listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0",
    "--grpc-listen", "127.0.0.1:0", "--log-format", "json",
)  # fmt: skip


class EngineNotStarted(Exception):
    """The engine ended, or was not ready in time; says what it printed last."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a child listens, each as it announced it."""

    api: str
    """Such as `http://127.0.0.1:40123`."""
    metrics: str
    admin: str
    grpc: str


class EngineProcess:
    """One running engine.

    Args:
        command: What starts kvwatch, such as `["python", "-m", "kvwatch"]`.
        flags: Further flags of `serve`.
        name: The engine's name in all metrics.
        on_end: Called from a thread when the process ends without having been stopped.

    Raises:
        EngineNotStarted: it ended, or did not become ready.
    """

    def __init__(self, command: Sequence[str], flags: Sequence[str], name: str, on_end: Callable[[], None]) -> None:
        self._is_stopping = False
        self._on_end = on_end
        self._last_lines: list[str] = []
        self._ready = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self.addresses: Addresses | None = None
        words = [*command, "serve", *OWN_FLAGS, "--engine-name", name, *flags]
        # The kernel ends the child with the thread that started it: one that lives as long as this process.
        threading.Thread(target=self._run, args=(words,), name="engine-process", daemon=True).start()
        if not self._ready.wait(START_SECONDS) or self.addresses is None:
            self.stop()
            raise EngineNotStarted(f"{' '.join(command)} serve was not ready: {' '.join(self._last_lines)}")

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process is not None
        return self._process.pid

    def stop(self, seconds: float = 45.0) -> None:
        """Let requests finish, then end it."""
        self._is_stopping = True
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _run(self, words: Sequence[str]) -> None:
        try:
            self._process = subprocess.Popen(  # noqa: S603 - the operator's own command
                [sys.executable, str(TIED), *words],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | {"KVWATCH_RAY_PARENT": str(os.getpid())},
            )
        except OSError as error:
            self._last_lines = [str(error)]
            self._ready.set()
            return
        assert self._process.stderr is not None
        with self._process.stderr as log:
            for line in log:
                self._last_lines = [*self._last_lines[-4:], line.strip()]
                if self.addresses is None:
                    self.addresses = _announced(line)
                    if self.addresses is not None:
                        self._ready.set()
        self._process.wait()
        self._ready.set()
        if not self._is_stopping and self.addresses is not None:
            self._on_end()


def _announced(line: str) -> Addresses | None:
    try:
        said = json.loads(line)
    except ValueError:
        return None
    if not isinstance(said, dict) or said.get("event") != "ready":
        return None
    return Addresses(str(said["api"]).removesuffix("/v1"), str(said["metrics"]), str(said["admin"]), str(said["grpc"]))
