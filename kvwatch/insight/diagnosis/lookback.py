"""Keeps looks at one engine until one is old enough to compare the newest with."""

from collections import deque

from kvwatch.insight.diagnosis.finding import Diagnosis
from kvwatch.insight.diagnosis.judge import diagnose
from kvwatch.insight.diagnosis.reading import Observation, Reading

LOOK_SECONDS = 10.0
"""Between two looks that are kept."""

SPAN_SECONDS = 60.0
"""Between the two looks that are compared, once there are enough: a minute is steady, and still the present."""


class Lookback:
    """Looks at one engine. One thread at a time.

    Args:
        look_seconds: Least time between two looks that are kept.
        span_seconds: Time over which an engine is judged.
    """

    def __init__(self, look_seconds: float = LOOK_SECONDS, span_seconds: float = SPAN_SECONDS) -> None:
        self._look_seconds = look_seconds
        self._span_seconds = span_seconds
        self._readings: deque[Reading] = deque()

    def is_due(self, seconds: float) -> bool:
        """Return whether a look at this time would be kept."""
        return not self._readings or seconds - self._readings[-1].seconds >= self._look_seconds

    def add(self, reading: Reading) -> None:
        """Keep a look; forget those that are not needed any more."""
        readings = self._readings
        readings.append(reading)
        while len(readings) > 1 and reading.seconds - readings[1].seconds >= self._span_seconds:
            readings.popleft()

    def diagnose(self, now: Reading) -> Diagnosis | None:
        """Judge the time from the oldest look that is kept to `now`; None while there is no earlier look."""
        before = next(iter(self._readings), None)
        if before is None or before.seconds >= now.seconds:
            return None
        return diagnose(Observation(before, now))
