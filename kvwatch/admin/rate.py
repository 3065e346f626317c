"""How often somebody may do something. Knows nothing of what it is."""

from collections import OrderedDict

from kvwatch.telemetry.clock import Clock

MAX_KEYS = 1024
"""Whoever was not seen for longest is forgotten beyond this many."""


class RateLimit:
    """A bucket of permits for each key, which fills up again over time. One thread.

    Args:
        per_minute: Permits that come back in a minute.
        at_once: Permits of a full bucket.
        clock: Tells the time.
    """

    def __init__(self, per_minute: float, at_once: int, clock: Clock) -> None:
        self._per_second = per_minute / 60
        self._at_once = at_once
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def take(self, key: str) -> float:
        """Take one permit; return 0, or the seconds until the next one if there is none."""
        now = self._clock.monotonic_ns()
        permits, then = self._buckets.pop(key, (float(self._at_once), now))
        permits = min(self._at_once, permits + (now - then) / 1e9 * self._per_second)
        wait = 0.0 if permits >= 1 else (1 - permits) / self._per_second
        self._buckets[key] = (permits - 1 if permits >= 1 else permits, now)
        if len(self._buckets) > MAX_KEYS:
            self._buckets.popitem(last=False)
        return wait
