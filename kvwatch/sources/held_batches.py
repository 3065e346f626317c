"""Batches that wait for those before them: live ones while a replay runs, replayed ones after a hole.

Bounded in number and bytes. What does not fit is refused; it is missed again later, and asked for then.
"""

from collections import deque
from heapq import heappop, heappush

MAX_BATCHES = 50_000
MAX_BYTES = 64 << 20

Numbered = tuple[int, bytes]
"""Sequence number and payload."""


class HeldBatches:
    """Live batches in the order of their arrival, and batches of the present life by number."""

    __slots__ = ("_ascending", "_live", "_max_batches", "_max_bytes", "_num_bytes", "_numbered", "num_refused")

    def __init__(self, max_batches: int = MAX_BATCHES, max_bytes: int = MAX_BYTES) -> None:
        self._live: deque[Numbered] = deque()
        self._numbered: dict[int, bytes] = {}
        self._ascending: list[int] = []
        """A heap of the numbers held; also some that were taken since."""
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
            self._number(seq, payload)

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
            self._number(seq, payload)

    def take_numbered(self, seq: int) -> bytes | None:
        """Return the batch of a number and let go of it."""
        payload = self._numbered.pop(seq, None)
        if payload is not None:
            self._num_bytes -= len(payload)
        if not self._numbered:
            self._ascending.clear()
        return payload

    def lowest(self, at_least: int) -> int | None:
        """Return the lowest number held that is not below `at_least`; let go of numbered ones below it."""
        self.forget_below(at_least)
        while self._ascending and self._ascending[0] not in self._numbered:
            heappop(self._ascending)
        numbers = self._ascending[:1] + [seq for seq, _ in self._live if seq >= at_least]
        return min(numbers, default=None)

    def forget_below(self, seq: int) -> None:
        """Let go of numbered batches that are of no use any more."""
        while self._ascending and self._ascending[0] < seq:
            self.take_numbered(heappop(self._ascending))

    def forget_numbered(self) -> None:
        """Let go of all that is kept by number: that life is over."""
        for seq in list(self._numbered):
            self.take_numbered(seq)

    def _number(self, seq: int, payload: bytes) -> None:
        self._numbered[seq] = payload
        heappush(self._ascending, seq)

    def _fits(self, payload: bytes) -> bool:
        if len(self) >= self._max_batches or self._num_bytes + len(payload) > self._max_bytes:
            self.num_refused += 1
            return False
        self._num_bytes += len(payload)
        return True
