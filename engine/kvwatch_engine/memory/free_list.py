"""Free blocks in eviction order. Knows nothing of owners or hashes."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping

from kvwatch_engine.contracts.block import BlockId


class FreeList:
    """Free blocks of a pool: empty ones are taken first, then cached ones, least recently released first.

    Every operation is O(1). A block is in the list at most once; the caller (the block pool) guarantees it and the
    invariant is checked by `BlockPool.check_integrity`. Engine thread only.
    """

    __slots__ = ("_cached", "_empty")

    def __init__(self, first: int, end: int) -> None:
        # A stack: block `first` is on top. The block released last is taken first, its memory is still warm.
        self._empty: list[BlockId] = [BlockId(block) for block in range(end - 1, first - 1, -1)]
        # An OrderedDict is a doubly linked list in C with O(1) removal anywhere; a plain dict would scan the holes
        # that removals leave at its front.
        self._cached: OrderedDict[BlockId, None] = OrderedDict()

    @property
    def num_empty(self) -> int:
        """Free blocks without content."""
        return len(self._empty)

    @property
    def num_cached(self) -> int:
        """Free blocks whose content may still be reused."""
        return len(self._cached)

    def __len__(self) -> int:
        """Number of free blocks."""
        return len(self._empty) + len(self._cached)

    def __iter__(self) -> Iterator[BlockId]:
        """Iterate in eviction order."""
        yield from reversed(self._empty)
        yield from self._cached

    def cached(self) -> Iterator[BlockId]:
        """Iterate over cached blocks, the next to be evicted first."""
        return iter(self._cached)

    def take_empty(self, count: int) -> list[BlockId]:
        """Remove and return `count` empty blocks, or all if there are fewer."""
        empty = self._empty
        if count == 0 or not empty:
            return []
        taken = empty[: -count - 1 : -1]
        del empty[-count:]
        return taken

    def take_oldest_cached(self, count: int) -> list[BlockId]:
        """Remove and return the `count` cached blocks that were released longest ago; there must be so many."""
        take = self._cached.popitem
        return [take(False)[0] for _ in range(count)]  # not the last; by name it would be slower

    def add_empty(self, block: BlockId) -> None:
        """Add a block without content."""
        self._empty.append(block)

    def add_cached(self, block: BlockId) -> None:
        """Add a block with content; it becomes the last to be evicted."""
        self._cached[block] = None

    def touch_cached(self, block: BlockId) -> None:
        """Let a cached block be the last to be evicted."""
        self._cached.move_to_end(block)

    def remove_cached(self, block: BlockId) -> None:
        """Take a cached block back into use."""
        del self._cached[block]

    def resize(self, old_end: int, end: int, moves: Mapping[BlockId, BlockId]) -> None:
        """Go from blocks below `old_end` to blocks below `end`; free ones among `moves` change their id. O(free).

        The eviction order stays. New blocks are taken last: the others' memory may still be warm.
        """
        taken = set(moves.values())
        kept = [block for block in self._empty if block < end and block not in taken]
        self._empty = [BlockId(block) for block in range(end - 1, old_end - 1, -1)] + kept
        self._cached = OrderedDict((moves.get(block, block), None) for block in self._cached)
