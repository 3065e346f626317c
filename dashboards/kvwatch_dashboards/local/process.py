"""A process that is waited for and ended by its own id. Its output goes to a file; knows nothing of what it runs."""

import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Self

from kvwatch.errors import ConfigError, KVWatchError
from kvwatch.sockets import bind

_LOOK_SECONDS = 0.1
_LAST_LINES = 15


class ProcessError(KVWatchError):
    """A process ended, or did not become ready."""


class ManagedProcess:
    """A running process. A Ctrl-C of the terminal does not reach it: whoever started it ends it.

    Args:
        name: What messages call it.
        command: Program and arguments.
        log: File that its output goes to.

    Raises:
        ConfigError: there is no such program.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name = name
        self.log = log
        self._output: IO[bytes] = log.open("wb")
        try:
            self._process = subprocess.Popen(  # noqa: S603 - a program and arguments, no shell
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            self._output.close()
            raise ConfigError(f"cannot start {name} ({error.strerror}): {command[0]}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def exit_status(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.poll()

    def text(self) -> str:
        """Return what it has written so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def check(self) -> None:
        """Do nothing while it runs.

        Raises:
            ProcessError: it has ended.
        """
        if self.exit_status is not None:
            last = "\n".join(self.text().splitlines()[-_LAST_LINES:])
            raise ProcessError(f"{self.name} ended with status {self.exit_status}; the end of its output:\n{last}")

    def wait_until(self, is_ready: Callable[[], bool], seconds: float) -> None:
        """Wait until something is true of it.

        Raises:
            ProcessError: it ended before, or it takes longer than `seconds`.
        """
        deadline = time.monotonic() + seconds
        while not is_ready():
            self.check()
            if time.monotonic() > deadline:
                raise ProcessError(f"{self.name} is not ready after {seconds:g} s; its output is in {self.log}")
            time.sleep(_LOOK_SECONDS)

    def end(self, seconds: float = 20.0) -> None:
        """End it with SIGTERM, after `seconds` with SIGKILL; a second call does nothing."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._output.close()


def free_address(preferred: int = 0) -> str:
    """Return `127.0.0.1:PORT` on which nobody listens now: the preferred port if that is free."""
    for port in (preferred, 0):
        try:
            bound = bind(f"127.0.0.1:{port}", "port")
        except KVWatchError:
            continue
        with bound:
            return f"127.0.0.1:{bound.getsockname()[1]}"
    raise ProcessError("no free port on 127.0.0.1")
