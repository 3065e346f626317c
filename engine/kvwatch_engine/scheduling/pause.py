"""A pause of admission, which always has an end. Engine thread only."""

from kvwatch.telemetry.events import AdmissionPaused, AdmissionResumed
from kvwatch.telemetry.log import EventLog


class AdmissionPause:
    """Whether waiting requests are held back, since when and until when."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._begun_ns = 0
        self._until_ns: int | None = None

    @property
    def is_active(self) -> bool:
        """Whether nobody is admitted for now; who runs goes on."""
        return self._until_ns is not None

    @property
    def seconds_left(self) -> float | None:
        """Time until admission goes on by itself; none while it is not paused."""
        if self._until_ns is None:
            return None
        return max(0.0, (self._until_ns - self._log.clock.monotonic_ns()) / 1e9)

    def begin(self, seconds: float, actor: str, reason: str) -> None:
        """Pause for so many seconds from now on; a pause that is on gets a new end."""
        now, duration_ns = self._log.clock.monotonic_ns(), round(seconds * 1e9)
        if self._until_ns is None:
            self._begun_ns = now
        self._until_ns = now + duration_ns
        if self._log.active:
            self._log.append(AdmissionPaused(actor, reason, duration_ns))

    def end(self, actor: str, reason: str) -> None:
        """End a pause that is on."""
        if self._until_ns is None:
            return
        self._until_ns = None
        if self._log.active:
            self._log.append(AdmissionResumed(actor, reason, self._log.clock.monotonic_ns() - self._begun_ns))

    def end_if_over(self) -> None:
        """End a pause whose time is over."""
        if self._until_ns is not None and self._log.clock.monotonic_ns() >= self._until_ns:
            self.end("", "its time is over")
