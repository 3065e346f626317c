"""A server as a process group of its own: started, waited for, frozen while another one is measured, ended.

A frozen server does nothing at all, so that all sides stay loaded and only one of them runs. Knows no side.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import httpx
import psutil

START_SECONDS = 900.0
"""A compiled start on a slow machine takes minutes."""
_END_SECONDS = 30.0
_OURS = frozenset({"PYTHONPATH", "VIRTUAL_ENV"})
"""Variables that would bring this environment's packages into another one."""


class ServerFailed(RuntimeError):
    """A server did not start, ended, or did not do what it was asked."""


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class Server:
    """One running server. It is frozen except between `thaw` and `freeze`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, *, is_ours: bool) -> None:
        """Start it; it is not ready yet.

        Args:
            command: Command line.
            environment: Variables beside this process's own.
            log: File for what it says.
            is_ours: Whether it runs in this process's Python environment.
        """
        kept = {name: value for name, value in os.environ.items() if is_ours or name not in _OURS}
        self._log = log
        with log.open("wb") as out:
            # A group of its own: a server has children, which must be frozen and end with it.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                env=kept | dict(environment), start_new_session=True,
            )  # fmt: skip
        self._guard = subprocess.Popen(
            ["sh", "-c", f"read -r _ || kill -s KILL -- -{self._process.pid}"], stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        """Ends the server if this process dies without doing so: its end of the pipe then closes."""

    def wait_ready(self, url: str) -> float:
        """Wait until `url` answers with 200; return after how many seconds.

        Raises:
            ServerFailed: it ended or took too long; with the end of its log.
        """
        started = time.monotonic()
        while not _answers(url):
            if self._process.poll() is not None:
                raise ServerFailed(f"the server ended with status {self._process.returncode}: {self.tail()}")
            if time.monotonic() - started > START_SECONDS:
                raise ServerFailed(f"the server was not ready after {START_SECONDS:.0f} s: {self.tail()}")
            time.sleep(0.2)
        return time.monotonic() - started

    def freeze(self) -> None:
        """Stop all its processes where they are."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let them go on."""
        os.killpg(self._process.pid, signal.SIGCONT)

    def end(self) -> None:
        """End it: politely, and if that takes too long, not. Ending it again does nothing."""
        with suppress(ProcessLookupError):
            self.thaw()
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(_END_SECONDS)
        if self._guard.poll() is None:
            self._guard.communicate(b"ended\n", _END_SECONDS)

    def cpu_seconds(self) -> float:
        """Return the processor time that its processes have taken."""
        spent = 0.0
        for process in psutil.process_iter():
            with suppress(psutil.Error, ProcessLookupError):
                if os.getpgid(process.pid) == self._process.pid:
                    times = process.cpu_times()
                    spent += times.user + times.system
        return spent

    def tail(self) -> str:
        """Return the end of its log."""
        return self._log.read_text(errors="replace")[-3000:]


def _answers(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    return False
