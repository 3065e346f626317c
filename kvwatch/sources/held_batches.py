"""Batches that wait for those before them: live ones while a replay runs, replayed ones after a hole.

Bounded in number and bytes. What does not fit is refused; it is missed again later, and asked for then.
"""

from collections import deque

MAX_BATCHES = 50_000
MAX_BYTES = 64 << 20

Numbered = tuple[int, bytes]
"""Sequence number and payload."""


class HeldBatches:
    """Live batches in the order of their arrival, and batches of the present life by number."""

    __slots__ = ("_live", "_max_batches", "_max_bytes", "_num_bytes", "_numbered", "num_refused")

    def __init__(self, max_batches: int = MAX_BATCHES, max_bytes: int = MAX_BYTES) -> None:
        self._live: deque[Numbered] = deque()
        self._numbered: dict[int, bytes] = {}
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self.num_refused = 0

    def __len__(self) -> int:
        return len(self._live) + len(self._numbered)

    @property
    def num_bytes(self) -> int:
        """Bytes of the payloads held."""
        return self._num_bytes

    def hold_live(self, seq: int, payload: bytes) -> None:
        """Keep a live batch."""
        if self._fits(payload):
            self._live.append((seq, payload))

    def hold_numbered(self, seq: int, payload: bytes) -> None:
        """Keep a batch of the present life, to be had by its number; one that is held already is not kept twice."""
        if seq not in self._numbered and self._fits(payload):
            self._numbered[seq] = payload

    def first_live(self) -> Numbered | None:
        """Return the live batch that came first."""
        return self._live[0] if self._live else None

    def drop_first_live(self) -> None:
        """Let go of the live batch that came first."""
        self._num_bytes -= len(self._live.popleft()[1])

    def put_aside_first_live(self) -> None:
        """Keep the live batch that came first by its number: it is of the present life, but others come before it."""
        seq, payload = self._live.popleft()
        if seq in self._numbered:
            self._num_bytes -= len(payload)
        else:
            self._numbered[seq] = payload

    def take_numbered(self, seq: int) -> bytes | None:
        """Return the batch of a number and let go of it."""
        payload = self._numbered.pop(seq, None)
        if payload is not None:
            self._num_bytes -= len(payload)
        return payload

    def lowest(self, at_least: int) -> int | None:
        """Return the lowest number held that is not below `at_least`."""
        numbers = [seq for seq in self._numbered if seq >= at_least]
        numbers += [seq for seq, _ in self._live if seq >= at_least]
        return min(numbers, default=None)

    def forget_below(self, seq: int) -> None:
        """Let go of batches that are of no use any more."""
        for each in [number for number in self._numbered if number < seq]:
            self.take_numbered(each)

    def forget_numbered(self) -> None:
        """Let go of all that is kept by number: that life is over."""
        for seq in list(self._numbered):
            self.take_numbered(seq)

    def _fits(self, payload: bytes) -> bool:
        if len(self) >= self._max_batches or self._num_bytes + len(payload) > self._max_bytes:
            self.num_refused += 1
            return False
        self._num_bytes += len(payload)
        return True
