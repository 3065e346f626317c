"""Signals of `kvwatch serve` beside those that end it: SIGUSR2 has the flight recorder written out."""

import contextlib
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import structlog

from kvwatch.recorder.part import RecorderPart

SIGNAL = signal.SIGUSR2

logger = structlog.get_logger(__name__)


@contextlib.contextmanager
def dump_on_signal(recorder: RecorderPart | None) -> Iterator[None]:
    """Write the flight recorder out on SIGUSR2 while the block lasts. Main thread only."""

    def on_signal(_signum: int, _frame: object) -> None:
        if recorder is None:  # without a handler the signal would end the process
            logger.warning("SIGUSR2 writes the flight recorder out, but there is none; set --flight-dir")
        else:
            recorder.trigger("signal").add_done_callback(_report)

    before = signal.signal(SIGNAL, on_signal)
    try:
        yield
    finally:
        signal.signal(SIGNAL, before)


def _report(answer: "Future[Path]") -> None:
    error = answer.exception()
    if error is not None:
        logger.warning("SIGUSR2 could not write the flight recorder out", error=str(error))
