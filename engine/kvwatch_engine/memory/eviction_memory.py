"""Remembers what was evicted for want of room not long ago: what a request asks for now and would have found."""

from collections.abc import Collection, Sequence
from typing import Final

from kvwatch_engine.contracts.block import BlockHash

MAX_REMEMBERED_EVICTIONS: Final = 65_536
"""Evicted hashes that are known at least, unless the pool has fewer blocks; twice as many take 20 MB."""


class EvictionMemory:
    """Hashes of evicted blocks: the last ones, as many as the pool has blocks, up to twice as many."""

    __slots__ = ("_before", "_recent")

    def __init__(self) -> None:
        self._recent: set[BlockHash] = set()
        """Since the last time that this was full."""
        self._before: set[BlockHash] = set()
        """What that was then."""

    def __contains__(self, content: BlockHash) -> bool:
        """Return whether it was evicted not long ago."""
        return content in self._recent or content in self._before

    def add(self, hashes: Sequence[BlockHash], num_blocks: int) -> None:
        """Note evictions in a pool of `num_blocks`. Two sets in turn cost less than to forget the oldest one by one."""
        self._recent.update(hashes)
        if len(self._recent) >= min(num_blocks, MAX_REMEMBERED_EVICTIONS):
            self._recent, self._before = set(), self._recent

    def discard(self, hashes: Collection[BlockHash]) -> None:
        """Note that content was lost in another way: it would not be here with more room either."""
        self._recent.difference_update(hashes)
        self._before.difference_update(hashes)

    def clear(self) -> None:
        """Forget everything."""
        self._recent.clear()
        self._before.clear()
