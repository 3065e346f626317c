"""What must always be true of a pool's blocks. Pure: it looks."""

from collections.abc import Sequence

from kvwatch_engine.contracts.block import NULL_BLOCK, BlockId
from kvwatch_engine.contracts.errors import CacheCorruption
from kvwatch_engine.memory.free_list import FreeList
from kvwatch_engine.memory.prefix_index import PrefixIndex


def check_blocks(
    ref_counts: Sequence[int], free_list: FreeList, index: PrefixIndex, idle_pinned: Sequence[BlockId]
) -> None:
    """Verify that each block is in one state; O(number of blocks).

    Args:
        ref_counts: block tables that contain each block, the null block included.
        free_list: the blocks that can be allocated.
        index: what blocks hold.
        idle_pinned: blocks that nobody uses and that are not free all the same.

    Raises:
        CacheCorruption: with the equation that does not hold.
    """
    free = list(free_list)
    if len(set(free)) != len(free):
        raise CacheCorruption(f"free list holds {len(free) - len(set(free))} blocks twice")
    if NULL_BLOCK in free or ref_counts[NULL_BLOCK] != 0 or index.hashes[NULL_BLOCK] is not None:
        raise CacheCorruption("the null block was allocated, hashed or freed")
    unreferenced = {block for block in range(1, len(ref_counts)) if ref_counts[block] == 0}
    if unreferenced - set(idle_pinned) != set(free):
        raise CacheCorruption(
            f"{len(unreferenced)} blocks have no reference, {len(idle_pinned)} of them are pinned, but {len(free)} "
            "are free"
        )
    if min(ref_counts) < 0:
        raise CacheCorruption(f"reference count {min(ref_counts)} is negative")
    index.check_integrity()
    cached = {block for block in free if index.hashes[block] is not None}
    if cached != set(free_list.cached()):
        raise CacheCorruption(f"{len(cached)} free blocks have a hash, but {free_list.num_cached} are listed as cached")
