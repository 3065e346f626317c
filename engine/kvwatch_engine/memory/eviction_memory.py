"""Remembers what was evicted for want of room not long ago: what a request asks for now and would have found.

Evictions are many and questions few, and most questions are about the first block of a prompt that nobody has seen
before. To these the answer is known without looking. So hashes are kept in the lists in which they come, and only
sorted when somebody asks on; most are forgotten before.
"""

from collections.abc import Collection, Container, Sequence
from typing import Final

from kvwatch_engine.contracts.block import BlockHash

MAX_REMEMBERED_EVICTIONS: Final = 65_536
"""Evicted hashes that are known at least, unless the pool has fewer blocks; twice as many take 20 MB."""

_MIN_FIRSTS: Final = 4096
"""First blocks that are known before it is looked which of them are of interest."""


class EvictionMemory:
    """Hashes of evicted blocks: the last ones, at least as many as the pool has blocks, less than twice as many."""

    __slots__ = ("_before", "_firsts", "_max_firsts", "_recent")

    def __init__(self) -> None:
        self._recent = _Generation()
        """Since the last time that this was full."""
        self._before = _Generation()
        """What that was then."""
        self._firsts: set[BlockHash] = set()
        """All first blocks of sequences that are in the pool or remembered here, and others."""
        self._max_firsts = _MIN_FIRSTS

    def __len__(self) -> int:
        """Return the number of evictions that are remembered; content counts each time."""
        return self._recent.num_evictions + self._before.num_evictions

    def knows(self, content: BlockHash, *, is_first: bool = False) -> bool:
        """Return whether it was evicted not long ago; `is_first` if only the first block of a sequence can hold it."""
        if is_first and content not in self._firsts:
            return False
        return content in self._recent or content in self._before

    def note_first(self, content: BlockHash, present: Container[BlockHash]) -> None:
        """Note that the first block of a sequence was stored, to be asked about when it is evicted.

        Args:
            content: of the block.
            present: what the pool holds now.
        """
        self._firsts.add(content)
        if len(self._firsts) > self._max_firsts:
            self._firsts = {each for each in self._firsts if each in present or self.knows(each)}
            self._max_firsts = max(_MIN_FIRSTS, 2 * len(self._firsts))

    def add(self, hashes: Sequence[BlockHash], num_blocks: int) -> None:
        """Note evictions in a pool of `num_blocks`. The list is kept: nobody may change it."""
        recent = self._recent
        recent.unsorted.append(hashes)
        recent.num_evictions += len(hashes)
        if recent.num_evictions >= min(num_blocks, MAX_REMEMBERED_EVICTIONS):
            self._recent, self._before = _Generation(), recent

    def discard(self, hashes: Collection[BlockHash]) -> None:
        """Note that content was lost in another way: it would not be here with more room either."""
        self._recent.discard(hashes)
        self._before.discard(hashes)

    def clear(self) -> None:
        """Forget all evictions."""
        self._recent, self._before = _Generation(), _Generation()


class _Generation:
    """Evictions that are forgotten together: forgetting the oldest one by one would cost more."""

    __slots__ = ("_sorted", "num_evictions", "unsorted")

    def __init__(self) -> None:
        self.unsorted: list[Sequence[BlockHash]] = []
        """What has come since somebody asked."""
        self._sorted: set[BlockHash] = set()
        self.num_evictions = 0

    def __contains__(self, content: BlockHash) -> bool:
        """Return whether it is one of these."""
        return content in self._all()

    def discard(self, hashes: Collection[BlockHash]) -> None:
        """Leave some out."""
        self._all().difference_update(hashes)

    def _all(self) -> set[BlockHash]:
        if self.unsorted:
            self._sorted.update(*self.unsorted)
            self.unsorted.clear()
        return self._sorted
