"""The clocks of telemetry: durations come from the monotonic one, wall time is only for people.

Monotonic times are comparable within one process only; that is why exporters publish wall-clock timestamps.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """Source of time. Implementations must be callable from any thread."""

    def monotonic_ns(self) -> int:
        """Return a time in ns that never goes back; its zero is arbitrary."""
        ...

    def wall_ns(self) -> int:
        """Return the Unix time in ns."""
        ...


class SystemClock:
    """The operating system's clocks."""

    __slots__ = ()

    def monotonic_ns(self) -> int:
        """Return `time.monotonic_ns()`."""
        return time.monotonic_ns()

    def wall_ns(self) -> int:
        """Return `time.time_ns()`."""
        return time.time_ns()
