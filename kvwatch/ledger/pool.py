"""The blocks of one tier, rebuilt from events.

Owns columns with one entry per block, the block tables, and totals that are kept up to date with every event, so that
reading a total is O(1) whatever the size of the pool. Knows nothing of requests' states nor of steps.

The totals are a double entry: *empty* and *cached* move by what an event means, *used* by what the reference counts
did. An event that contradicts the columns therefore breaks the law instead of silently bending it.

The columns are Python lists: an event touches few blocks, and one element of a list is several times cheaper to
change than one of a NumPy array. Readers get NumPy columns.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from kvwatch.telemetry.events import (
    BlocksAllocated,
    BlocksCopied,
    BlocksEvicted,
    BlocksReleased,
    BlocksRelocated,
    BlocksReused,
    BlocksShared,
    BlocksStored,
    CacheCleared,
    SequenceForked,
)
from kvwatch.telemetry.snapshot import SequenceState, TierState

Int32Column = npt.NDArray[np.int32]


class BlockState(StrEnum):
    """What a block is right now."""

    USED = "used"
    """In at least one block table."""
    CACHED = "cached"
    """Free, content known to the prefix index."""
    EMPTY = "empty"
    """Free, content meaningless."""


class TierPool:
    """Blocks of one tier. Observatory thread only.

    Every method that takes an event is O(blocks of the event). `on_fault` is called with a sentence when an event
    contradicts what is known; the event is applied as far as it makes sense.

    Writes wait in a dictionary and reach the column of filled slots when somebody looks: a block is written in
    many steps, and putting a step's writes into a dictionary is one call in C. Only used blocks ever wait there.
    """

    __slots__ = (
        "_filled_slots",
        "_hashes",
        "_num_filled_slots",
        "_on_fault",
        "_ref_counts",
        "_tables",
        "_written",
        "capacity",
        "ignored_files",
        "num_cached",
        "num_empty",
        "num_entries",
        "num_shared",
        "num_used",
        "tier",
    )

    def __init__(self, state: TierState, sequences: Iterable[SequenceState], on_fault: Callable[[str], None]) -> None:
        self._on_fault = on_fault
        self._ref_counts = list(state.ref_counts)
        self._hashes = list(state.hashes)
        self._filled_slots = list(state.filled_slots)
        self._written: dict[int, int] = {}
        self._tables: dict[str, dict[int, list[int]]] = {}
        for each in sequences:
            self._tables.setdefault(each.request, {})[each.sequence] = list(each.block_ids)
        self.tier = state.tier
        self.ignored_files = state.ignored_files
        """Files in the tier's folder that were of no use when it was opened, by why."""
        self.capacity = state.num_blocks - 1
        """Blocks of the tier, the null block left out."""
        counts, is_hashed = self.ref_counts, np.fromiter((h is not None for h in self._hashes), np.bool_)
        used = counts > 0
        self.num_used = int(used.sum())
        self.num_cached = int((~used & is_hashed).sum())
        self.num_empty = self.capacity - self.num_used - self.num_cached
        self.num_entries = int(counts.sum())
        """Table entries: the sum of all reference counts."""
        self.num_shared = int((counts > 1).sum())
        """Used blocks with more than one table entry."""
        filled_slots = np.array(self._filled_slots, np.int32)
        self._num_filled_slots = int(filled_slots[used].sum())

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
        self.num_used += num_taken
        self.num_empty -= num_blocks
        self.num_entries += num_blocks
        if event.reason != "cow":
            self._table(event.request, event.sequence).extend(block_ids)

    def release(self, event: BlocksReleased) -> None:
        """Each block loses one reference; at none it is cached if it has a hash, else empty."""
        ref_counts, hashes = self._ref_counts, self._hashes
        for block in event.block_ids:
            left = ref_counts[block] - 1
            if left < 0:
                self._on_fault(f"block {block} was released by {event.request} though nobody held it")
                continue
            ref_counts[block] = left
            if left == 0:
                self.num_used -= 1
                self._settle(block)
                self._num_filled_slots -= self._filled_slots[block]
                if hashes[block] is None:
                    self.num_empty += 1
                else:
                    self.num_cached += 1
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
                self.num_empty -= 1
                self.num_cached += 1
            hashes[block] = block_hash

    def evict(self, event: BlocksEvicted) -> None:
        """Cached blocks become empty."""
        for block in event.block_ids:
            if self._ref_counts[block] or self._hashes[block] is None:
                self._on_fault(f"block {block} was evicted though it was not cached")
                continue
            self._hashes[block] = None
            self.num_cached -= 1
        self.num_empty += len(event.block_ids)

    def reuse(self, event: BlocksReused) -> None:
        """Blocks with known content get one more reference each and are appended to the table."""
        for block in event.block_ids:
            if self._hashes[block] is None:
                self._on_fault(f"block {block} was hit by {event.request} though it has no hash")
            if not self._ref_counts[block]:
                self.num_used += 1
                self.num_cached -= 1
                self._num_filled_slots += self._filled_slots[block]
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
            self._num_filled_slots += filled_slots[source] - filled_slots[destination]
            filled_slots[destination] = filled_slots[source]

    def clear(self, event: CacheCleared) -> None:
        """No block has a hash any more; what was cached is empty. O(blocks of the tier)."""
        for block in event.block_ids:
            if self._hashes[block] is None or not self._ref_counts[block]:
                self._on_fault(f"block {block} lost its hash though it was not used and stored")
        self._hashes = [None] * len(self._hashes)
        self.num_empty += self.num_cached
        self.num_cached = 0

    def relocate(self, event: BlocksRelocated) -> None:
        """Blocks move to empty places with everything that is known of them. O(entries of all tables)."""
        self._settle_all()
        moves = dict(zip(event.sources, event.destinations, strict=True))
        hashes, ref_counts, filled_slots = self._hashes, self._ref_counts, self._filled_slots
        for source, destination in moves.items():
            if ref_counts[destination] or hashes[destination] is not None:
                self._on_fault(f"block {source} moved to block {destination}, which was not empty")
            ref_counts[destination], ref_counts[source] = ref_counts[source], 0
            hashes[destination], hashes[source] = hashes[source], None
            filled_slots[destination], filled_slots[source] = filled_slots[source], 0
        for sequences in self._tables.values():
            for table in sequences.values():
                table[:] = [moves.get(block, block) for block in table]

    def resize(self, num_blocks: int) -> None:
        """Blocks from `num_blocks` on, all of them empty, are gone; or new and empty ones come at the end."""
        self._settle_all()
        num_new = max(0, num_blocks - self.capacity - 1)
        if any(self._ref_counts[num_blocks:]) or any(each is not None for each in self._hashes[num_blocks:]):
            self._on_fault(f"the pool shrank to {num_blocks} blocks though others held something")
        self._ref_counts[num_blocks:] = [0] * num_new
        self._hashes[num_blocks:] = [None] * num_new
        self._filled_slots[num_blocks:] = [0] * num_new
        self.num_empty += num_blocks - 1 - self.capacity
        self.capacity = num_blocks - 1

    def fork(self, event: SequenceForked) -> None:
        """The child's table begins as the first `num_blocks` entries of the parent's."""
        shared = self._tables.get(event.request, {}).get(event.parent, [])[: event.num_blocks]
        if len(shared) != event.num_blocks:
            self._on_fault(f"{event.request} forked {event.num_blocks} blocks of a table that has {len(shared)}")
        for block in shared:
            self._add_reference(block)
        self._table(event.request, event.child).extend(shared)

    def write(self, block_ids: list[int], filled_slots: list[int]) -> None:
        """Note how far blocks are filled after a step. All of them are used."""
        self._written.update(zip(block_ids, filled_slots, strict=True))

    # ------------------------------------------------------------ reading

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now: cached and empty ones."""
        return self.num_cached + self.num_empty

    @property
    def num_filled_slots(self) -> int:
        """Filled slots of used blocks. O(blocks written since it was last asked for)."""
        self._settle_all()
        return self._num_filled_slots

    @property
    def ref_counts(self) -> Int32Column:
        """i32[num_blocks]: a copy of the reference counts; entry 0 is the null block."""
        return np.array(self._ref_counts, np.int32)

    @property
    def filled_slots(self) -> Int32Column:
        """i32[num_blocks]: slots written since each block was allocated; a copy."""
        self._settle_all()
        return np.array(self._filled_slots, np.int32)

    @property
    def hashes(self) -> list[bytes | None]:
        """Block hash of each block, None where it has none; a copy."""
        return list(self._hashes)

    @property
    def tables(self) -> dict[tuple[str, int], list[int]]:
        """Block ids of each (request, sequence) that holds blocks; a copy."""
        return {
            (request, sequence): list(table)
            for request, sequences in self._tables.items()
            for sequence, table in sequences.items()
        }

    @property
    def states(self) -> list[BlockState]:
        """State of each block from block 1 on: the null block has none, so entry i is block i + 1."""
        return list(self._states())

    def orphaned(self, live_requests: Collection[str]) -> int:
        """Count used blocks that no live request holds. O(1) while there is no sign of one, else O(blocks)."""
        num_listed = sum(len(table) for sequences in self._tables.values() for table in sequences.values())
        if num_listed == self.num_entries and self._tables.keys() <= set(live_requests):
            return 0
        is_held = np.zeros(self.capacity + 1, np.bool_)
        for request in self._tables.keys() & set(live_requests):
            for table in self._tables[request].values():
                is_held[table] = True
        return int(((self.ref_counts > 0) & ~is_held).sum())

    def to_state(self) -> TierState:
        """Return the columns in the form of a snapshot."""
        self._settle_all()
        columns = (list(self._ref_counts), list(self._hashes), list(self._filled_slots))
        return TierState(self.tier, self.capacity + 1, *columns, self.ignored_files)

    # ------------------------------------------------------------ inside

    def _states(self) -> Iterator[BlockState]:
        for count, block_hash in zip(self._ref_counts[1:], self._hashes[1:], strict=True):
            if count:
                yield BlockState.USED
            else:
                yield BlockState.EMPTY if block_hash is None else BlockState.CACHED

    def _settle(self, block: int) -> None:
        filled = self._written.pop(block, None)
        if filled is not None:
            self._num_filled_slots += filled - self._filled_slots[block]
            self._filled_slots[block] = filled

    def _settle_all(self) -> None:
        column, change = self._filled_slots, 0
        for block, filled in self._written.items():
            change += filled - column[block]
            column[block] = filled
        self._written.clear()
        self._num_filled_slots += change

    def _add_reference(self, block: int) -> None:
        count = self._ref_counts[block] + 1
        self._ref_counts[block] = count
        self.num_entries += 1
        if count == 2:
            self.num_shared += 1

    def _table(self, request: str, sequence: int) -> list[int]:
        sequences = self._tables.get(request)
        if sequences is None:
            sequences = self._tables[request] = {}
        table = sequences.get(sequence)
        if table is None:
            table = sequences[sequence] = []
        return table

    def _leave_table(self, event: BlocksReleased) -> None:
        table = self._table(event.request, event.sequence)
        block_ids = event.block_ids
        if table[: -len(block_ids) - 1 : -1] == block_ids:  # the tail, last block first: nearly always
            del table[len(table) - len(block_ids) :]
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
        del self._tables[request][sequence]
        if not self._tables[request]:
            del self._tables[request]


def _last_index(table: list[int], block: int) -> int | None:
    for position in range(len(table) - 1, -1, -1):
        if table[position] == block:
            return position
    return None
