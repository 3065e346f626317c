"""What a pool notes of each block, as columns of numbers: arrays, since there may be a million blocks.

Knows neither owners nor content.
"""

from collections.abc import Mapping
from typing import NamedTuple

from kvwatch_engine.contracts.block import BlockId


class BlockHistory(NamedTuple):
    """What has become of a block since it was allocated. Times are monotonic ns."""

    allocated_ns: int
    released_ns: int
    """When its last owner released it; of no meaning while it is used."""
    num_hits: int
    """Times that its content was found in the prefix index."""


class BlockColumns:
    """Columns with a place for each block, the null block included, which the pool writes. Engine thread only.

    Each stays the same list for good, whatever number of blocks it has.
    """

    __slots__ = ("allocated_ns", "filled_slots", "groups", "hits", "ref_counts", "released_ns")

    def __init__(self, num_blocks: int, num_groups: int) -> None:
        """Begin with blocks that nobody has taken yet."""
        self.ref_counts = [0] * num_blocks
        """Block tables that contain the block."""
        self.filled_slots = [0] * num_blocks
        """Slots written since the block was allocated."""
        self.groups = [0] * num_blocks if num_groups > 1 else []
        """KV group of each used or cached block. Empty while there is only one group."""
        self.allocated_ns = [0] * num_blocks
        self.released_ns = [0] * num_blocks
        self.hits = [0] * num_blocks

    def history(self, block: BlockId) -> BlockHistory:
        """Return what has become of one block."""
        return BlockHistory(self.allocated_ns[block], self.released_ns[block], self.hits[block])

    def num_held_since(self, time_ns: int) -> int:
        """Return how many used blocks were allocated at a monotonic time or before. O(blocks)."""
        pairs = zip(self.ref_counts, self.allocated_ns, strict=True)
        return sum(1 for count, allocated_ns in pairs if count and allocated_ns <= time_ns)

    def lay_out(
        self, num_blocks: int, ref_counts: list[int], filled_slots: list[int], groups: list[int], now_ns: int
    ) -> None:
        """Have `num_blocks` blocks, of which the first ones are taken now. O(blocks)."""
        num_taken = len(ref_counts)
        empty = [0] * (num_blocks - num_taken)
        self.ref_counts[:] = ref_counts + empty
        self.filled_slots[:] = filled_slots + empty
        if self.groups:
            self.groups[:] = groups + empty
        self.allocated_ns[:] = [now_ns] * num_taken + empty
        self.released_ns[:] = self.hits[:] = [0] * num_blocks

    def resize(self, num_blocks: int, moves: Mapping[BlockId, BlockId]) -> None:
        """Move some blocks into empty places, then have `num_blocks`. O(blocks)."""
        num_new = max(0, num_blocks - len(self.ref_counts))
        columns = [self.ref_counts, self.filled_slots, self.allocated_ns, self.released_ns, self.hits]
        if self.groups:
            columns.append(self.groups)
        for column in columns:
            for source, destination in moves.items():
                column[destination] = column[source]
                column[source] = 0
            column[num_blocks:] = [0] * num_new
