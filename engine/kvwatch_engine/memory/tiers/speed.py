"""How fast blocks move between the device and the host, as measured. Pure arithmetic."""

from typing import Final, Literal

Direction = Literal["out", "in"]

_WEIGHT: Final = 0.2
"""What the newest transfer counts for in the average."""


class TransferSpeed:
    """Seconds a block in each direction: exponential averages over transfers, weighted alike whatever their size."""

    def __init__(self) -> None:
        self._seconds: dict[Direction, float] = {}

    def note(self, direction: Direction, num_blocks: int, duration_ns: int) -> None:
        """Take in one transfer of at least one block."""
        seconds = duration_ns / 1e9 / num_blocks
        before = self._seconds.get(direction)
        self._seconds[direction] = seconds if before is None else before + _WEIGHT * (seconds - before)

    def round_trip_seconds(self, num_blocks: int) -> float | None:
        """Return the time out and in again of so many blocks; a direction never seen is taken to be like the other.

        None before any transfer was measured.
        """
        if not self._seconds:
            return None
        return num_blocks * sum(self._seconds.get(each, max(self._seconds.values())) for each in ("out", "in"))

    def one_way_seconds(self, num_blocks: int) -> float:
        """Return the time that so many blocks keep the link busy; 0 before any transfer was measured."""
        return num_blocks * max(self._seconds.values(), default=0.0)
