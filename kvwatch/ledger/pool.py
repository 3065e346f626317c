"""The blocks of one tier, rebuilt from events: those of all its KV groups, which share them.

Law: capacity = empty + sum over groups of (used + cached). Empty blocks belong to no group. What concerns single blocks
is kept up to date by the groups (see `group.py`); here are the totals, and what happens to the tier as a whole.
Readers get NumPy columns.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from kvwatch.ledger.group import Columns, GroupPool
from kvwatch.telemetry.events import BlocksLaidOut, BlocksRelocated, CacheCleared, SequenceForked
from kvwatch.telemetry.events.block import GROUPS
from kvwatch.telemetry.snapshot import PinState, SequenceState, TierState

Int32Column = npt.NDArray[np.int32]

FIRST_GROUP = "0"
"""The KV group that every engine has."""


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

    Every method that takes an event is O(blocks of the event), unless it says otherwise.
    """

    __slots__ = ("_columns", "_groups", "_on_fault", "_pins", "capacity", "ignored_files", "tier")

    def __init__(
        self,
        state: TierState,
        sequences: Iterable[SequenceState],
        on_fault: Callable[[str], None],
        groups: Iterable[str] = (FIRST_GROUP,),
        pins: Iterable[PinState] = (),
    ) -> None:
        """Begin with what a snapshot says.

        Args:
            state: its columns of the tier.
            sequences: its block tables in the tier.
            on_fault: called with a sentence when an event contradicts what is known.
            groups: the KV groups that the engine has, if it says so.
            pins: its pinned prefixes.
        """
        self._on_fault = on_fault
        self._columns = columns = Columns(state)
        self.tier = state.tier
        self.ignored_files = state.ignored_files
        """Files in the tier's folder that were of no use when it was opened, by why."""
        self.capacity = state.num_blocks - 1
        """Blocks of the tier, the null block left out."""
        tables = list(sequences)
        names = dict.fromkeys((FIRST_GROUP, *groups, *(each.group for each in tables)))
        names |= dict.fromkeys(GROUPS[number] for number in sorted(set(columns.groups)))
        columns.has_groups = len(names) > 1
        self._groups: dict[str, GroupPool] = {}
        for name in names:
            mine = (each for each in tables if each.group == name)
            self._groups[name] = GroupPool(name, GROUPS.index(name), columns, mine, on_fault)
        columns.num_empty = self.capacity - self.num_used - self.num_cached
        self._pins: dict[str, list[bytes]] = {}
        for pin in pins:
            self.pin(pin.pin, pin.hashes)

    # ------------------------------------------------------------ groups

    @property
    def groups(self) -> Mapping[str, GroupPool]:
        """Its KV groups by name."""
        return self._groups

    def group(self, name: str) -> GroupPool:
        """Return a KV group; one that nobody has told of exists from now on."""
        found = self._groups.get(name)
        if found is None:
            self._columns.has_groups = True
            number = GROUPS.index(name)
            found = self._groups[name] = GroupPool(name, number, self._columns, (), self._on_fault)
        return found

    # ------------------------------------------------------------ events

    def clear(self, event: CacheCleared) -> None:
        """No block has a hash any more; what was cached is empty. O(blocks of the tier)."""
        for block in event.block_ids:
            if self._columns.hashes[block] is None or not self._columns.ref_counts[block]:
                self._on_fault(f"block {block} lost its hash though it was not used and stored")
        if self._columns.pinned:
            self._on_fault(f"the cache was cleared though {len(self._columns.pinned)} blocks are pinned")
        self._columns.hashes[:] = [None] * len(self._columns.hashes)
        for group in self._groups.values():
            group.clear()

    def relocate(self, event: BlocksRelocated) -> None:
        """Blocks move to empty places with everything that is known of them. O(entries of all tables)."""
        self._settle_all()
        moves = dict(zip(event.sources, event.destinations, strict=True))
        columns = self._columns
        hashes, ref_counts = columns.hashes, columns.ref_counts
        for source, destination in moves.items():
            if ref_counts[destination] or hashes[destination] is not None:
                self._on_fault(f"block {source} moved to block {destination}, which was not empty")
            ref_counts[destination], ref_counts[source] = ref_counts[source], 0
            hashes[destination], hashes[source] = hashes[source], None
            for column in (columns.filled_slots, columns.groups):
                column[destination], column[source] = column[source], 0
        for sequences in self.group(event.group).tables.values():
            for table in sequences.values():
                table[:] = [moves.get(block, block) for block in table]

    def lay_out(self, event: BlocksLaidOut) -> None:
        """All blocks are new; what is held is what the event says. O(blocks of the tier)."""
        columns, count = self._columns, event.num_blocks
        self.ignored_files = event.ignored_files
        columns.written.clear()
        for column in (columns.ref_counts, columns.filled_slots, columns.groups):
            column[:] = [0] * count
        columns.hashes[:] = [None] * count
        self.capacity = columns.num_empty = count - 1
        for group in self._groups.values():
            group.reset()
        first = 0
        tables = zip(event.requests, event.sequences, event.groups, event.table_lengths, strict=True)
        for request, sequence, number, length in tables:
            self.group(GROUPS[number]).lay_out(request, sequence, event.block_ids[first : first + length])
            first += length
        self.write(event.written_block_ids, event.filled_slots)

    def resize(self, num_blocks: int) -> None:
        """Blocks from `num_blocks` on, all of them empty, are gone; or new and empty ones come at the end."""
        self._settle_all()
        columns = self._columns
        num_new = max(0, num_blocks - self.capacity - 1)
        if any(columns.ref_counts[num_blocks:]) or any(each is not None for each in columns.hashes[num_blocks:]):
            self._on_fault(f"the pool shrank to {num_blocks} blocks though others held something")
        for column in (columns.ref_counts, columns.filled_slots, columns.groups):
            column[num_blocks:] = [0] * num_new
        columns.hashes[num_blocks:] = [None] * num_new
        columns.num_empty += num_blocks - 1 - self.capacity
        self.capacity = num_blocks - 1

    def pin(self, name: str, hashes: list[bytes]) -> None:
        """Content of the prefix index stays from now on. O(blocks of the tier)."""
        columns = self._columns
        if name in self._pins:
            self._on_fault(f"{name} was pinned twice")
            return
        self._pins[name] = list(hashes)
        for content in hashes:
            columns.pinned[content] = columns.pinned.get(content, 0) + 1
        found = set(hashes) & {content for content in columns.hashes if content is not None}
        if len(found) < len(set(hashes)):
            self._on_fault(f"{name} pinned content that no block holds")
        columns.num_idle_pinned = self._count_idle_pinned()

    def unpin(self, name: str) -> None:
        """A pin ends. O(blocks of the tier)."""
        columns = self._columns
        if name not in self._pins:
            self._on_fault(f"{name} was unpinned though it is no pin")
            return
        for content in self._pins.pop(name):
            columns.pinned[content] -= 1
            if not columns.pinned[content]:
                del columns.pinned[content]
        columns.num_idle_pinned = self._count_idle_pinned()

    def fork(self, event: SequenceForked) -> None:
        """In each group the child's table begins as the first entries of the parent's, as many as the event says."""
        request, parent, child = event.request, event.parent, event.child
        self._groups[FIRST_GROUP].fork(request, parent, child, event.num_blocks)
        for number, num_blocks in enumerate(event.further_blocks, 1):
            self.group(GROUPS[number]).fork(request, parent, child, num_blocks)

    def write(self, block_ids: list[int], filled_slots: list[int]) -> None:
        """Note how far blocks are filled after a step. All of them are used."""
        self._columns.written.update(zip(block_ids, filled_slots, strict=True))

    # ------------------------------------------------------------ reading

    @property
    def num_used(self) -> int:
        """Blocks in at least one block table."""
        return sum(group.num_used for group in self._groups.values())

    @property
    def num_cached(self) -> int:
        """Free blocks whose content is known to the prefix index."""
        return sum(group.num_cached for group in self._groups.values())

    @property
    def num_empty(self) -> int:
        """Free blocks without content."""
        return self._columns.num_empty

    @property
    def num_entries(self) -> int:
        """Table entries: the sum of all reference counts."""
        return sum(group.num_entries for group in self._groups.values())

    @property
    def num_shared(self) -> int:
        """Used blocks with more than one table entry."""
        return sum(group.num_shared for group in self._groups.values())

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now: empty ones, and cached ones that are not pinned."""
        return self.num_cached + self._columns.num_empty - self._columns.num_idle_pinned

    @property
    def num_pinned(self) -> int:
        """Blocks of pinned prefixes, used or cached."""
        return len(self._columns.pinned)

    @property
    def num_filled_slots(self) -> int:
        """Filled slots of used blocks. O(blocks written since it was last asked for)."""
        self._settle_all()
        return sum(group.num_filled_slots for group in self._groups.values())

    def num_filled_slots_of(self, group: str) -> int:
        """Filled slots of one group's used blocks. O(blocks written since it was last asked for)."""
        self._settle_all()
        return self._groups[group].num_filled_slots

    @property
    def ref_counts(self) -> Int32Column:
        """i32[num_blocks]: a copy of the reference counts; entry 0 is the null block."""
        return np.array(self._columns.ref_counts, np.int32)

    @property
    def filled_slots(self) -> Int32Column:
        """i32[num_blocks]: slots written since each block was allocated; a copy."""
        self._settle_all()
        return np.array(self._columns.filled_slots, np.int32)

    @property
    def hashes(self) -> list[bytes | None]:
        """Block hash of each block, None where it has none; a copy."""
        return list(self._columns.hashes)

    @property
    def tables(self) -> dict[tuple[str, int], list[int]]:
        """Block ids of each (request, sequence) that holds blocks, group after group; a copy."""
        found: dict[tuple[str, int], list[int]] = {}
        for each in self.to_sequences():
            found.setdefault((each.request, each.sequence), []).extend(each.block_ids)
        return found

    @property
    def states(self) -> list[BlockState]:
        """State of each block from block 1 on: the null block has none, so entry i is block i + 1."""
        return list(self._states())

    def orphaned(self, live_requests: Collection[str]) -> int:
        """Count used blocks that no live request holds. O(table entries) while there is no sign of one, else more."""
        groups, live = self._groups.values(), set(live_requests)
        all_tables = [
            (name, table) for group in groups for name, each in group.tables.items() for table in each.values()
        ]
        num_listed = sum(len(table) for _, table in all_tables)
        if num_listed == self.num_entries and all(group.tables.keys() <= live for group in groups):
            return 0
        is_held = np.zeros(self.capacity + 1, np.bool_)
        for name, table in all_tables:
            if name in live:
                is_held[table] = True
        return int(((self.ref_counts > 0) & ~is_held).sum())

    def to_state(self) -> TierState:
        """Return the columns in the form of a snapshot."""
        self._settle_all()
        columns = self._columns
        return TierState(
            self.tier,
            self.capacity + 1,
            list(columns.ref_counts),
            list(columns.hashes),
            list(columns.filled_slots),
            self.ignored_files,
            list(columns.groups) if columns.has_groups else [],
        )

    def to_pins(self) -> list[PinState]:
        """Return the pinned prefixes in the form of a snapshot."""
        return [PinState(name, list(hashes)) for name, hashes in self._pins.items()]

    def to_sequences(self) -> list[SequenceState]:
        """Return the block tables in the form of a snapshot."""
        return [
            SequenceState(request, sequence, list(table), self.tier, group.name)
            for group in self._groups.values()
            for request, sequences in group.tables.items()
            for sequence, table in sequences.items()
        ]

    # ------------------------------------------------------------ inside

    def _count_idle_pinned(self) -> int:
        columns = self._columns
        if not columns.pinned:
            return 0
        places = enumerate(columns.hashes)
        return sum(content in columns.pinned and not columns.ref_counts[block] for block, content in places)

    def _states(self) -> Iterator[BlockState]:
        for count, block_hash in zip(self._columns.ref_counts[1:], self._columns.hashes[1:], strict=True):
            if count:
                yield BlockState.USED
            else:
                yield BlockState.EMPTY if block_hash is None else BlockState.CACHED

    def _settle_all(self) -> None:
        """Bring what was written to the column, and count it in the group of each block."""
        columns = self._columns
        column, groups = columns.filled_slots, columns.groups
        if columns.has_groups:
            changes = [0] * len(GROUPS)
            for block, filled in columns.written.items():
                changes[groups[block]] += filled - column[block]
                column[block] = filled
            for group in self._groups.values():
                group.num_filled_slots += changes[group.number]
        else:
            change = 0
            for block, filled in columns.written.items():
                change += filled - column[block]
                column[block] = filled
            self._groups[FIRST_GROUP].num_filled_slots += change
        columns.written.clear()
