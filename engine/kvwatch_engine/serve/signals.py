"""Signals of `kvwatch serve` beside those that end it: SIGUSR2 has the flight recorder written out.

The signal is taken also while a model is loaded and while the server stops: by default it would end the process.
"""

import contextlib
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import structlog

from kvwatch.recorder.part import RecorderPart

SIGNAL = signal.SIGUSR2

LOG_SECONDS = 1.0
"""At most one line about signals that came to nothing in this time, however many come."""

logger = structlog.get_logger(__name__)


class DumpSignal:
    """What SIGUSR2 asks for; the recorder becomes known when the server has one."""

    def __init__(self) -> None:
        self._recorder: RecorderPart | None = None
        self._remedy = "the server is still starting; send it again later"
        self._logged: float | None = None

    def attach(self, recorder: RecorderPart | None) -> None:
        """Let the signal ask this recorder from now on."""
        self._recorder = recorder
        self._remedy = "there is no flight recorder; set --flight-dir"

    def take(self) -> None:
        """Do what the signal asks for. Main thread."""
        if self._recorder is None:
            self._complain(self._remedy)
        else:
            self._recorder.trigger("signal").add_done_callback(self._report)

    def _report(self, answer: "Future[Path]") -> None:
        error = answer.exception()
        if error is not None:
            self._complain(str(error))

    def _complain(self, error: str) -> None:
        now = time.monotonic()
        if self._logged is None or now - self._logged >= LOG_SECONDS:
            self._logged = now
            logger.warning("SIGUSR2 could not write the flight recorder out", error=error)


@contextlib.contextmanager
def dump_on_signal() -> Iterator[DumpSignal]:
    """Take SIGUSR2 while the block lasts, and ignore it afterwards if it would end the process. Main thread only."""
    dumps = DumpSignal()
    before = signal.signal(SIGNAL, lambda _signum, _frame: dumps.take())
    try:
        yield dumps
    finally:
        signal.signal(SIGNAL, signal.SIG_IGN if before is signal.SIG_DFL else before)
