"""How long no step will run while a pool changes: assumed at first, then as such changes have really taken. Pure."""

from typing import Final

MANY_BYTES: Final = 64 << 20
"""From so many bytes on their copying says how fast that goes; less says what a change takes beside it."""


class PauseEstimate:
    """Changes of one kind. Each takes a time of its own, and more for what it copies."""

    def __init__(self, base_seconds: float, bytes_per_second: float) -> None:
        """Assume a time for every change, and a speed of copying."""
        self._base_seconds = base_seconds
        self._bytes_per_second = bytes_per_second

    def seconds(self, num_bytes: int) -> float:
        """Return how long a change probably takes that copies so many bytes."""
        return self._base_seconds + num_bytes / self._bytes_per_second

    def learn(self, num_bytes: int, seconds: float) -> None:
        """Note what one has taken."""
        if num_bytes < MANY_BYTES:
            self._base_seconds = max(0.0, seconds - num_bytes / self._bytes_per_second)
            return
        self._base_seconds = min(self._base_seconds, seconds / 2)  # to copy so much was half of it at least
        self._bytes_per_second = num_bytes / max(seconds - self._base_seconds, 1e-9)
