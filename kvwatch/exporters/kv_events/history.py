"""The batches that can be replayed, in bounded memory, and what all older ones amount to.

    batches published    0 1 2 3 4 | 5 6 7 8 9
                         base      | kept

What falls out of the buffer is folded into a base: the set of hashes that a reader of all older batches would have. A
replay from before the buffer begins with the base (everything cleared, then stored), numbered so that the kept batches
follow without a hole. So whoever asks, however late, ends with exactly what is resident.
"""

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from kvwatch.exporters.kv_events.residency import Residency
from kvwatch.wire.kv_events import AllBlocksCleared, Batch, BlockStored, WireEvent, decode_batch, encode_batch

BLOCKS_PER_BATCH = 512


class Sent(NamedTuple):
    """One batch as it went out."""

    seq: int
    payload: bytes


class History:
    """Replayable batches of one publisher. Observatory thread only.

    Args:
        max_batches: Batches kept.
        max_bytes: Bytes of payloads kept; the newest batch is kept whatever its size.
        dp_rank: Rank that the base's batches name.
    """

    def __init__(self, max_batches: int, max_bytes: int, dp_rank: int = 0) -> None:
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._dp_rank = dp_rank
        self._kept: deque[Sent] = deque()
        self._base = Residency()
        self._base_ts = 0.0
        self.num_bytes = 0
        """Bytes of the kept payloads."""

    def __len__(self) -> int:
        """Return the number of batches kept."""
        return len(self._kept)

    @property
    def next_seq(self) -> int:
        """Number that the next batch must have."""
        return self._kept[-1].seq + 1 if self._kept else 0

    def append(self, payload: bytes) -> int:
        """Keep a batch; return its number. Amortised O(blocks of the batches that fall out)."""
        seq = self.next_seq
        self._kept.append(Sent(seq, payload))
        self.num_bytes += len(payload)
        while len(self._kept) > 1 and (len(self._kept) > self._max_batches or self.num_bytes > self._max_bytes):
            self._fold(self._kept.popleft())
        return seq

    def since(self, start: int) -> list[Sent]:
        """Return what a reader needs that has everything before `start`: at first the base, if that is asked for."""
        if not self._kept or start >= self._kept[0].seq:
            first = min(start - self._kept[0].seq, len(self._kept)) if self._kept else 0
            return list(islice(self._kept, first, None))
        return [*self._base_batches(start), *self._kept]

    def _fold(self, sent: Sent) -> None:
        batch = decode_batch(sent.payload)
        for event in batch.events:
            self._base.apply(event)
        self._base_ts = batch.ts
        self.num_bytes -= len(sent.payload)

    def _base_batches(self, start: int) -> Iterator[Sent]:
        """Yield the base in at most as many batches as there are numbers from `start` to the buffer."""
        end = self._kept[0].seq
        most = end - start
        size = max(BLOCKS_PER_BATCH, -(-len(self._base) // most))
        events: list[WireEvent] = [AllBlocksCleared()]
        batches: list[list[WireEvent]] = [events]
        num_blocks = 0
        for event in self._base.events(size):
            if num_blocks + len(event.block_hashes) > size and len(batches) < most:
                events, num_blocks = [], 0
                batches.append(events)
            events.append(event)
            num_blocks += _size(event)
        for index, each in enumerate(batches):
            payload = encode_batch(Batch(self._base_ts, each, self._dp_rank))
            yield Sent(end - len(batches) + index, payload)


def _size(event: BlockStored) -> int:
    return len(event.block_hashes)
