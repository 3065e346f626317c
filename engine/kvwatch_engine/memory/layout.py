"""How what sequences hold is laid out in blocks of another size. Pure: it looks and decides, the block manager acts.

    blocks of 4    | a a a a | b b b b | c c . . |      what two sequences hold in common stays common: the same tokens
    blocks of 8    | a a a a   b b b b | c c . . . . . . |   from the same slots go to one block

Entries that have left a window stay null; room that a sequence has beyond what it has computed stays its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvwatch.telemetry.events import BlocksLaidOut
from kvwatch_engine.contracts.block import NULL_BLOCK, BlockId
from kvwatch_engine.contracts.step import Int64Array
from kvwatch_engine.memory.block_pool import Owner


@dataclass(frozen=True, slots=True)
class HeldTokens:
    """What one sequence holds in one group."""

    owner: Owner
    group: int
    table: Sequence[BlockId]
    """Its block table as it is; null blocks come first, where a window has passed."""
    first: int
    """First token whose K/V exists: others have left a window."""
    num_computed: int
    """Tokens that are computed: K/V exists of those from `first` on."""
    num_tokens: int
    """Tokens that it has room for and may have K/V of soon, computed ones included."""


@dataclass(slots=True)
class TableLayout:
    """A block table in the new layout."""

    table: list[BlockId] = field(default_factory=list)
    num_passed: int = 0
    """Leading entries that are null blocks."""
    first_held: int = 0
    """First token whose K/V exists; it may be in the middle of a block."""


@dataclass(slots=True)
class Layout:
    """A plan for one pool and its tables as they are now."""

    block_size: int
    num_blocks: int
    """Blocks of the pool, the null block included."""
    tables: dict[tuple[int, Owner], TableLayout] = field(default_factory=dict)
    ref_counts: list[int] = field(default_factory=lambda: [0])
    """Of the blocks that are used, from block 0 on: used blocks come first in the new pool."""
    filled_slots: list[int] = field(default_factory=lambda: [0])
    groups: list[int] = field(default_factory=lambda: [0])
    sources: list[Int64Array] = field(default_factory=list)
    """Slots of the old layout."""
    destinations: list[Int64Array] = field(default_factory=list)
    """Slots of the new layout that hold what those held."""

    @property
    def num_used(self) -> int:
        """Blocks that sequences hold."""
        return len(self.ref_counts) - 1

    def slots(self) -> tuple[Int64Array, Int64Array]:
        """Return all slots to be copied, from and to: i64[n] each."""
        if not self.sources:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        return np.concatenate(self.sources), np.concatenate(self.destinations)

    def new_block(self, group: int, num_filled: int) -> BlockId:
        """Take the next block for its first owner."""
        self.ref_counts.append(1)
        self.filled_slots.append(num_filled)
        self.groups.append(group)
        return BlockId(len(self.ref_counts) - 1)


def plan_layout(held: Sequence[HeldTokens], old_block_size: int, block_size: int, num_blocks: int) -> Layout:
    """Return how tables look in blocks of another size. Whether the pool has so many is for the caller to see.

    Args:
        held: what sequences hold, group by group.
        old_block_size: tokens of a block now.
        block_size: tokens of a block afterwards.
        num_blocks: blocks of the pool afterwards, the null block included.
    """
    layout = Layout(block_size, num_blocks)
    known: dict[tuple[int, int, bytes], BlockId] = {}
    for each in held:
        layout.tables[each.group, each.owner] = _lay_out(each, old_block_size, layout, known)
    return layout


def laid_out_event(layout: Layout, block_bytes: int) -> BlocksLaidOut:
    """Return what is told of a layout once it is the pool's; a block has `block_bytes` bytes over all layers then."""
    tables = {key: each.table[each.num_passed :] for key, each in layout.tables.items()}
    return BlocksLaidOut(
        layout.num_blocks,
        layout.block_size,
        block_bytes,
        [owner.request for _, owner in tables],
        [owner.sequence for _, owner in tables],
        [number for number, _ in tables],
        [len(table) for table in tables.values()],
        [block for table in tables.values() for block in table],
        list(range(1, len(layout.filled_slots))),
        list(layout.filled_slots[1:]),
    )


def _lay_out(
    held: HeldTokens, old_block_size: int, layout: Layout, known: dict[tuple[int, int, bytes], BlockId]
) -> TableLayout:
    size = layout.block_size
    first = min(held.first, held.num_computed)
    end = max(held.num_computed, min(held.num_tokens, len(held.table) * old_block_size))
    positions = np.arange(first, held.num_computed, dtype=np.int64)
    blocks = np.array(held.table, dtype=np.int64)
    slots = blocks[positions // old_block_size] * old_block_size + positions % old_block_size
    found = TableLayout(num_passed=first // size, first_held=first)
    found.table = [NULL_BLOCK] * found.num_passed
    for index in range(found.num_passed, -(-end // size)):
        start = max(index * size, first)
        stop = min((index + 1) * size, held.num_computed)
        of_block = slots[start - first : max(start, stop) - first]
        found.table.append(_block_of(held.group, start - index * size, of_block, layout, known))
    return found


def _block_of(
    group: int, offset: int, slots: Int64Array, layout: Layout, known: dict[tuple[int, int, bytes], BlockId]
) -> BlockId:
    """Return the block that holds these tokens: one that another table has already, or a new one."""
    if not len(slots):  # room
        return layout.new_block(group, 0)
    key = (group, offset, slots.tobytes())
    block = known.get(key)
    if block is not None:
        layout.ref_counts[block] += 1
        return block
    block = known[key] = layout.new_block(group, offset + len(slots))
    begin = block * layout.block_size + offset
    layout.sources.append(slots)
    layout.destinations.append(np.arange(begin, begin + len(slots), dtype=np.int64))
    return block
