"""How the blocks of a pool fit into another number of blocks. Pure: it looks and decides, the pool acts.

    before   . U C C . | U C .          U used, C cached, . empty; the new limit is |
    evict      one C, since four blocks hold two used ones and two cached ones
    move             ◀── U C            into empty places below the limit
    after    . U C U C

A larger pool needs neither: blocks are added at its end.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from kvwatch_engine.contracts.block import NULL_BLOCK, BlockId


@dataclass(frozen=True, slots=True)
class Relocation:
    """A plan for one pool as it is now."""

    num_blocks: int
    """Blocks from now on, the null block included."""
    num_evictions: int
    """Cached blocks that do not fit, least recently used first."""
    moves: dict[BlockId, BlockId]
    """Where blocks beyond the limit go: empty places below it."""
    kept: tuple[BlockId, ...]
    """All blocks that hold something afterwards, by the ids that they have now."""

    def place_of(self, block: BlockId) -> BlockId:
        """Return the id that a block has afterwards."""
        return self.moves.get(block, block)


def plan_relocation(
    ref_counts: Sequence[int], cached: Iterable[BlockId], num_blocks: int, pinned: Collection[BlockId] = ()
) -> Relocation | None:
    """Return how a pool becomes one of `num_blocks` blocks; None when its used and pinned blocks alone do not fit.

    Args:
        ref_counts: reference count of each block of the pool, the null block included.
        cached: its cached blocks, the next to be evicted first.
        num_blocks: blocks wanted, the null block included.
        pinned: blocks without a reference that stay all the same.
    """
    used = [BlockId(block) for block, count in enumerate(ref_counts) if count]
    used += pinned
    room = num_blocks - 1 - len(used)
    if room < 0:
        return None
    in_order = list(cached)
    num_evictions = max(0, len(in_order) - room)
    kept = sorted([*used, *in_order[num_evictions:]])
    beyond = [block for block in kept if block >= num_blocks]
    taken = set(kept)
    places = (BlockId(block) for block in range(NULL_BLOCK + 1, num_blocks) if block not in taken)
    moves = dict(zip(beyond, places, strict=False))
    assert len(moves) == len(beyond), "what is kept was counted before"
    return Relocation(num_blocks, num_evictions, moves, tuple(kept))
