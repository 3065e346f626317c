"""What must always be true of a pool's blocks and of the tables over it. Pure: it looks."""

from collections.abc import Iterable, Mapping, Sequence

from kvwatch_engine.contracts.block import NULL_BLOCK, BlockHash, BlockId
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


def check_pinned(
    pinned: Mapping[BlockHash, int], index: PrefixIndex, idle_pinned: Sequence[BlockId], num_idle_pinned: int
) -> None:
    """Verify that pinned content is there, and that the unused blocks that hold it are counted.

    Raises:
        CacheCorruption: it is not so.
    """
    if len(idle_pinned) != num_idle_pinned or not all(content in index for content in pinned):
        raise CacheCorruption(
            f"{len(idle_pinned)} pinned blocks have no reference, not {num_idle_pinned}, or pinned content is gone"
        )


def check_tables(
    ref_counts: Sequence[int], groups: Sequence[int], tables: Iterable[tuple[int, Sequence[BlockId]]]
) -> None:
    """Verify that reference counts equal occurrences in tables, and that each block is in tables of its group.

    Args:
        ref_counts: of each block, the null block included.
        groups: KV group of each block; empty while there is only one.
        tables: with the group of each; null blocks left out.

    Raises:
        CacheCorruption: with the block of which it is not true.
    """
    occurrences = [0] * len(ref_counts)
    for number, table in tables:
        for block in table:
            occurrences[block] += 1
            if groups and groups[block] != number:
                raise CacheCorruption(f"block {block} of group {groups[block]} is in a table of group {number}")
    for index, (count, expected) in enumerate(zip(ref_counts, occurrences, strict=True)):
        if count != expected:
            raise CacheCorruption(f"block {index}: reference count {count}, but it is in {expected} tables")
