"""The blocks of one KV group in one tier, rebuilt from events.

Groups share the tier's columns, since they share its blocks; each owns its block tables and totals, which are kept
up to date with every event, so that reading a total is O(1) whatever the size of the pool. Knows nothing of requests'
states nor of steps.

The totals are a double entry: *empty*, which belongs to the tier, and *cached* move by what an event means, *used* by
what the reference counts did. An event that contradicts the columns therefore breaks the law instead of silently
bending it.
"""

from collections.abc import Callable, Iterable

import numpy as np

from kvwatch.telemetry.events import (
    BlocksAllocated,
    BlocksCopied,
    BlocksEvicted,
    BlocksReleased,
    BlocksReused,
    BlocksShared,
    BlocksStored,
)
from kvwatch.telemetry.snapshot import SequenceState, TierState


class Columns:
    """What is known of each block of a tier, and how many are empty.

    The columns are Python lists: an event touches few blocks, and one element of a list is several times cheaper to
    change than one of a NumPy array.

    Writes wait in a dictionary and reach the column of filled slots when somebody looks: a block is written in
    many steps, and putting a step's writes into a dictionary is one call in C. Only used blocks ever wait there.
    """

    __slots__ = (
        "filled_slots",
        "groups",
        "has_groups",
        "hashes",
        "num_empty",
        "num_idle_pinned",
        "pinned",
        "ref_counts",
        "written",
    )

    def __init__(self, state: TierState) -> None:
        self.ref_counts = list(state.ref_counts)
        self.hashes = list(state.hashes)
        self.filled_slots = list(state.filled_slots)
        self.groups = list(state.block_groups) or [0] * state.num_blocks
        """Number of the group of each used or cached block."""
        self.has_groups = bool(state.block_groups)
        """Whether there are several groups: with one the column is of no interest."""
        self.written: dict[int, int] = {}
        """Filled slots of blocks that were written since somebody looked."""
        self.num_empty = 0
        self.pinned: dict[bytes, int] = {}
        """Content that is pinned, and how many pins it has."""
        self.num_idle_pinned = 0
        """Blocks that are pinned and not used: cached, and not free."""


_REASONS_OF_LIVE_TABLES = ("window", "truncated")
"""A sequence may have tables that transfers still hold, before the one that it has now; of these the oldest is released
first, and whole. For these reasons blocks leave the one that it has now."""


class GroupPool:
    """Blocks of one group in one tier. Observatory thread only.

    Every method that takes an event is O(blocks of the event). `on_fault` is called with a sentence when an event
    contradicts what is known; the event is applied as far as it makes sense.
    """

    __slots__ = (
        "_columns",
        "_filled_slots",
        "_hashes",
        "_on_fault",
        "_ref_counts",
        "name",
        "num_cached",
        "num_entries",
        "num_filled_slots",
        "num_shared",
        "num_used",
        "number",
        "tables",
    )

    def __init__(
        self, name: str, number: int, columns: Columns, tables: Iterable[SequenceState], on_fault: Callable[[str], None]
    ) -> None:
        """Take over what a tier's columns say of one group. O(blocks)."""
        self.name = name
        self.number = number
        self._on_fault = on_fault
        self._columns = columns
        self._ref_counts = columns.ref_counts
        self._hashes = columns.hashes
        self._filled_slots = columns.filled_slots
        self.tables: dict[str, dict[int, list[int]]] = {}
        """Block tables by request and sequence, without what has left the window; read-only for others."""
        for each in tables:
            self.tables.setdefault(each.request, {})[each.sequence] = list(each.block_ids)
        is_mine = np.array(columns.groups, np.int32) == number
        counts = np.where(is_mine, np.array(self._ref_counts, np.int32), 0)
        is_hashed = np.fromiter((content is not None for content in self._hashes), np.bool_)
        self.num_used = int((counts > 0).sum())
        self.num_cached = int((is_mine & (counts == 0) & is_hashed).sum())
        self.num_entries = int(counts.sum())
        """Table entries: the sum of all reference counts."""
        self.num_shared = int((counts > 1).sum())
        """Used blocks with more than one table entry."""
        self.num_filled_slots = int(np.array(self._filled_slots, np.int32)[counts > 0].sum())
        """Filled slots of used blocks, but for what waits in the columns' `written`."""

    # ------------------------------------------------------------ events

    def allocate(self, event: BlocksAllocated) -> None:
        """Empty blocks become used; unless they are for copy-on-write, they are appended to the table."""
        ref_counts, hashes, filled_slots = self._ref_counts, self._hashes, self._filled_slots
        block_ids = event.block_ids
        num_blocks = num_taken = len(block_ids)
        for block in block_ids:
            if ref_counts[block] or hashes[block] is not None:
                self._on_fault(f"block {block} was allocated to {event.request} though it was not empty")
                num_taken -= 1
                continue
            ref_counts[block] = 1
            filled_slots[block] = 0
        columns = self._columns
        if columns.has_groups:
            for block in block_ids:
                columns.groups[block] = self.number
        self.num_used += num_taken
        columns.num_empty -= num_blocks
        self.num_entries += num_blocks
        if event.reason != "cow":
            self._table(event.request, event.sequence).extend(block_ids)

    def release(self, event: BlocksReleased) -> None:
        """Each block loses one reference; at none it is cached if it has a hash, else empty."""
        ref_counts, hashes, pinned = self._ref_counts, self._hashes, self._columns.pinned
        for block in event.block_ids:
            left = ref_counts[block] - 1
            if left < 0:
                self._on_fault(f"block {block} was released by {event.request} though nobody held it")
                continue
            ref_counts[block] = left
            if left == 0:
                self.num_used -= 1
                self._settle(block)
                self.num_filled_slots -= self._filled_slots[block]
                if hashes[block] is None:
                    self._columns.num_empty += 1
                else:
                    self.num_cached += 1
                    if pinned and hashes[block] in pinned:
                        self._columns.num_idle_pinned += 1
            elif left == 1:
                self.num_shared -= 1
        self.num_entries -= len(event.block_ids)
        if event.reason != "cow":
            self._leave_table(event)

    def store(self, event: BlocksStored) -> None:
        """Blocks get their hash."""
        hashes, ref_counts = self._hashes, self._ref_counts
        for block_hash, block in zip(event.hashes, event.block_ids, strict=True):
            if not ref_counts[block] and hashes[block] is None:
                self._columns.num_empty -= 1
                self.num_cached += 1
            hashes[block] = block_hash

    def evict(self, event: BlocksEvicted) -> None:
        """Cached blocks become empty."""
        pinned = self._columns.pinned
        for block in event.block_ids:
            if self._ref_counts[block] or self._hashes[block] is None:
                self._on_fault(f"block {block} was evicted though it was not cached")
                continue
            if pinned and self._hashes[block] in pinned:
                self._on_fault(f"block {block} was evicted though it is pinned")
            self._hashes[block] = None
            self.num_cached -= 1
        self._columns.num_empty += len(event.block_ids)

    def reuse(self, event: BlocksReused) -> None:
        """Blocks with known content get one more reference each and are appended to the table."""
        pinned = self._columns.pinned
        for block in event.block_ids:
            if self._hashes[block] is None:
                self._on_fault(f"block {block} was hit by {event.request} though it has no hash")
            if not self._ref_counts[block]:
                self.num_used += 1
                self.num_cached -= 1
                if pinned and self._hashes[block] in pinned:
                    self._columns.num_idle_pinned -= 1
                self.num_filled_slots += self._filled_slots[block]
            self._add_reference(block)
        self._table(event.request, event.sequence).extend(event.block_ids)

    def share(self, event: BlocksShared) -> None:
        """Used blocks get one more reference each and are appended to the table."""
        for block in event.block_ids:
            if not self._ref_counts[block]:
                self._on_fault(f"block {block} was shared by {event.request} though nobody held it")
            self._add_reference(block)
        self._table(event.request, event.sequence).extend(event.block_ids)

    def copy(self, event: BlocksCopied) -> None:
        """In the sequence's table each source is replaced by its destination, which is filled as the source is."""
        filled_slots = self._filled_slots
        table = self._table(event.request, event.sequence)
        for source, destination in zip(event.sources, event.destinations, strict=True):
            position = _last_index(table, source)
            if position is None:
                self._on_fault(f"block {source} was copied by {event.request} though its table lacks it")
                continue
            table[position] = destination
            self._settle(source)
            self.num_filled_slots += filled_slots[source] - filled_slots[destination]
            filled_slots[destination] = filled_slots[source]

    def fork(self, request: str, parent: int, child: int, num_blocks: int) -> None:
        """The child's table begins as the first `num_blocks` entries of the parent's."""
        shared = self.tables.get(request, {}).get(parent, [])[:num_blocks]
        if len(shared) != num_blocks:
            self._on_fault(f"{request} forked {num_blocks} blocks of a table that has {len(shared)}")
        for block in shared:
            self._add_reference(block)
        self._table(request, child).extend(shared)

    def clear(self) -> None:
        """Note that no block has a hash any more; the tier empties the column."""
        self._columns.num_empty += self.num_cached
        self.num_cached = 0

    def reset(self) -> None:
        """Note that the group holds nothing any more; the tier empties the columns."""
        self.tables.clear()
        self.num_used = self.num_cached = self.num_entries = self.num_shared = self.num_filled_slots = 0

    def lay_out(self, request: str, sequence: int, block_ids: list[int]) -> None:
        """A sequence has this block table now; blocks that no table before it had come out of the empty ones."""
        columns = self._columns
        for block in block_ids:
            if not self._ref_counts[block]:
                self.num_used += 1
                columns.num_empty -= 1
                columns.groups[block] = self.number
            self._add_reference(block)
        self._table(request, sequence).extend(block_ids)

    # ------------------------------------------------------------ inside

    def _settle(self, block: int) -> None:
        filled = self._columns.written.pop(block, None)
        if filled is not None:
            self.num_filled_slots += filled - self._filled_slots[block]
            self._filled_slots[block] = filled

    def _add_reference(self, block: int) -> None:
        count = self._ref_counts[block] + 1
        self._ref_counts[block] = count
        self.num_entries += 1
        if count == 2:
            self.num_shared += 1

    def _table(self, request: str, sequence: int) -> list[int]:
        sequences = self.tables.get(request)
        if sequences is None:
            sequences = self.tables[request] = {}
        table = sequences.get(sequence)
        if table is None:
            table = sequences[sequence] = []
        return table

    def _leave_table(self, event: BlocksReleased) -> None:
        table = self._table(event.request, event.sequence)
        block_ids = event.block_ids
        if table[: -len(block_ids) - 1 : -1] == block_ids:  # the tail, last block first: nearly always
            del table[len(table) - len(block_ids) :]
        elif (start := _start_of(table, block_ids[::-1], is_last=event.reason in _REASONS_OF_LIVE_TABLES)) is not None:
            del table[start : start + len(block_ids)]
        else:
            for block in block_ids:
                position = _last_index(table, block)
                if position is None:
                    self._on_fault(f"block {block} was released by {event.request} though its table lacks it")
                else:
                    del table[position]
        if not table:
            self._drop_table(event.request, event.sequence)

    def _drop_table(self, request: str, sequence: int) -> None:
        del self.tables[request][sequence]
        if not self.tables[request]:
            del self.tables[request]


def _start_of(table: list[int], run: list[int], *, is_last: bool) -> int | None:
    """Return where a run of blocks begins in a table: its last or first place; None if it is not there."""
    places = range(len(table) - len(run) + 1)
    for start in reversed(places) if is_last else places:
        if table[start : start + len(run)] == run:
            return start
    return None


def _last_index(table: list[int], block: int) -> int | None:
    for position in range(len(table) - 1, -1, -1):
        if table[position] == block:
            return position
    return None
