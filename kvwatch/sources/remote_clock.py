"""The clock of an engine on another machine, as well as it can be told from here."""

from kvwatch.telemetry.clock import Clock, SystemClock


class RemoteClock:
    """Runs with this machine's clock and shows what the engine's would. Any thread.

    Times in events are the engine's monotonic ones. With this clock they can be used as they came, and become the same
    Unix times as in the engine. How far the two machines' wall clocks are apart cannot be told from here: the present
    moment may be wrong by that, times of events are not.
    """

    __slots__ = ("_local", "_offsets")

    def __init__(self, local: Clock | None = None) -> None:
        self._local = local or SystemClock()
        self._offsets = (0, self._local.wall_ns() - self._local.monotonic_ns())

    def synchronise(self, wall_offset_ns: int) -> None:
        """Follow an engine whose Unix time minus its monotonic time is `wall_offset_ns`."""
        monotonic = self._local.wall_ns() - wall_offset_ns - self._local.monotonic_ns()
        self._offsets = (monotonic, wall_offset_ns)  # as a whole: readers are on other threads

    def monotonic_ns(self) -> int:
        """Return the engine's monotonic time."""
        return self._local.monotonic_ns() + self._offsets[0]

    def wall_ns(self) -> int:
        """Return the engine's Unix time."""
        monotonic, wall = self._offsets
        return self._local.monotonic_ns() + monotonic + wall
