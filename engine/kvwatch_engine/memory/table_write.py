"""Makes tokens writable: which blocks that takes, in all KV groups at once, and what is copied before.

A block of several owners is copied before one of them writes (copy-on-write); a table that is too short grows. All or
nothing: too few free blocks, or a pool that refuses some against its own count, leave everything as it was.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvwatch.telemetry.events import BlocksCopied
from kvwatch.telemetry.events.block import GROUPS, AllocationReason
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.block import BlockId
from kvwatch_engine.memory.block_pool import BlockPool, Owner
from kvwatch_engine.memory.group_tables import GroupTables


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """One block to be copied before the next write (copy-on-write)."""

    source: BlockId
    destination: BlockId


@dataclass(slots=True)
class PlannedWrite:
    """What one group's table needs before a write."""

    group: GroupTables
    table: list[BlockId]
    shared: list[int]
    """Places whose blocks have another owner."""
    num_missing: int
    """Blocks to be appended."""
    own: list[BlockId] = field(default_factory=list)
    new: list[BlockId] = field(default_factory=list)


class TableWriter:
    """Engine thread only."""

    __slots__ = ("_groups", "_log", "_pool")

    def __init__(self, pool: BlockPool, groups: Sequence[GroupTables], log: EventLog) -> None:
        """Write to the tables of these groups, whose blocks the pool has."""
        self._pool = pool
        self._groups = groups
        self._log = log

    def num_blocks_for(self, owner: Owner, start: int, end: int) -> int:
        """Return how many free blocks are needed before tokens `start` to `end` can be written."""
        return sum(len(each.shared) + each.num_missing for each in self._plan(owner, start, end))

    def prepare(self, owner: Owner, start: int, end: int, reason: AllocationReason) -> tuple[BlockCopy, ...] | None:
        """Make tokens `start` to `end` of a sequence writable: grow its tables, un-share the blocks it writes to.

        Returns:
            The copies that must be carried out before the write (usually none); None, with nothing changed, when too
            few blocks are free.
        """
        planned = self._plan(owner, start, end)
        if not planned:
            return ()
        if sum(len(each.shared) + each.num_missing for each in planned) > self._pool.num_free:
            return None
        if not all(self._take(each, owner, reason) for each in planned):
            self._take_back(planned, owner)
            return None
        copies: tuple[BlockCopy, ...] = ()
        for each in planned:
            each.table += each.new
            if each.shared:
                copies += self._unshare(owner, each)
        return copies

    # ------------------------------------------------------------------ parts

    def _plan(self, owner: Owner, start: int, end: int) -> list[PlannedWrite]:
        """Return what has to be done before a write, group by group; empty when nothing has."""
        size = self._groups[0].block_size
        num_blocks, first = -(-end // size), start // size
        ref_counts = self._pool.ref_counts
        planned: list[PlannedWrite] = []
        for group in self._groups:
            table = group.tables[owner]
            num_missing = num_blocks - len(table)
            if num_missing <= 0 and num_blocks - first == 1:  # one token in a block that is there: nearly always
                shared = [first] if ref_counts[table[first]] > 1 else []
            else:
                shared = group.shared_in(table, start, end)
            if num_missing > 0 or shared:
                planned.append(PlannedWrite(group, table, shared, max(0, num_missing)))
        return planned

    def _take(self, planned: PlannedWrite, owner: Owner, reason: AllocationReason) -> bool:
        """Take the blocks of one group's write; False when the pool refuses some against its own count."""
        number = planned.group.number
        if planned.shared:
            own = self._pool.allocate(len(planned.shared), owner, "cow", number)
            if own is None:
                return False
            planned.own = own
        if planned.num_missing:
            new = self._pool.allocate(planned.num_missing, owner, reason, number)
            if new is None:
                return False
            planned.new = new
        return True

    def _take_back(self, planned: Iterable[PlannedWrite], owner: Owner) -> None:
        """Undo `_take`, whatever it has taken."""
        for each in planned:
            if each.new:
                self._pool.release(each.new[::-1], owner, "truncated", each.group.number)
            if each.own:
                self._pool.release(each.own, owner, "cow", each.group.number)

    def _unshare(self, owner: Owner, planned: PlannedWrite) -> tuple[BlockCopy, ...]:
        """Put blocks of the sequence's own into places of its table that hold shared ones."""
        table, number = planned.table, planned.group.number
        shared = [table[place] for place in planned.shared]
        filled_slots = self._pool.filled_slots
        for place, source, destination in zip(planned.shared, shared, planned.own, strict=True):
            table[place] = destination
            filled_slots[destination] = filled_slots[source]
        if self._log.active:
            self._log.append(
                BlocksCopied(owner.request, owner.sequence, list(shared), list(planned.own), group=GROUPS[number])
            )
        self._pool.release(shared, owner, "cow", number)
        return tuple(map(BlockCopy, shared, planned.own))
