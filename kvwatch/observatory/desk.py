"""Looks at an engine now and then, so that whoever asks what is the matter has an answer at once.

Owns the earlier looks. Does not know who asks: the composition root gives `DiagnosisDesk.report` to the admin API.
"""

import asyncio
import threading
from collections.abc import Callable, Iterable

from kvwatch.exporters.identity import EngineIdentity
from kvwatch.insight.diagnosis import DiagnosisReport, EngineDiagnosis, Lookback, Reading
from kvwatch.insight.diagnosis.lookback import LOOK_SECONDS
from kvwatch.ledger.pace import pause
from kvwatch.ledger.view import HistogramSample, Sample
from kvwatch.telemetry.clock import Clock

UNKNOWN_SECONDS = 0.2
"""Until it is asked again whether the engine is known."""


class DiagnosisDesk:
    """A part of the observatory. `report` and `diagnosis` may be called from any thread.

    Args:
        samples: Everything that the metrics page shows of the engine, as it is now.
        identity: Labels of the engine, as they are now.
        clock: The clock of its log.
        lookback: Keeps the looks.
        is_known: Whether the engine has been read yet. No look is taken before: a metric that is absent from the first
            one could not be compared for a minute.
    """

    name = "diagnosis"

    def __init__(
        self,
        samples: Callable[[], Iterable[Sample | HistogramSample]],
        identity: Callable[[], EngineIdentity],
        clock: Clock,
        lookback: Lookback | None = None,
        is_known: Callable[[], bool] = lambda: True,
    ) -> None:
        self._samples = samples
        self._identity = identity
        self._clock = clock
        self._lookback = lookback or Lookback()
        self._is_known = is_known
        self._lock = threading.Lock()  # guards the looks: they are added on one thread and compared on another

    def open(self) -> None:
        """Take nothing: there is nothing that could be refused."""

    def samples(self) -> Iterable[Sample]:
        """Return nothing: it has no metrics of its own."""
        return ()

    def look(self) -> None:
        """Take a look and keep it if it is time for one."""
        reading = self._read()
        with self._lock:
            if self._lookback.is_due(reading.seconds):
                self._lookback.add(reading)

    def diagnosis(self) -> EngineDiagnosis:
        """Return what is to be said of the engine now."""
        reading = self._read()
        with self._lock:
            found = self._lookback.diagnose(reading)
        engine, dp_rank, model_name = self._identity().labels
        return EngineDiagnosis(engine, int(dp_rank), model_name, found)

    def report(self) -> DiagnosisReport:
        """Return the same as the report of one engine."""
        return DiagnosisReport((self.diagnosis(),))

    async def run(self, stop: asyncio.Event) -> None:
        """Look again and again until `stop` is set."""
        while not stop.is_set():
            seconds = UNKNOWN_SECONDS
            if self._is_known():
                self.look()
                seconds = LOOK_SECONDS
            await pause(stop, seconds)

    def close(self) -> None:
        """Give nothing back."""

    def _read(self) -> Reading:
        return Reading(self._clock.monotonic_ns() / 1e9, tuple(self._samples()))
