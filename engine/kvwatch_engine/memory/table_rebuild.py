"""Rebuilds the block tables of a request that comes back from another tier: new blocks, shared as the old ones were.

    kept     first sequence  | 0 | 1 | 2 |          numbers of distinct blocks
             second sequence | 0 | 1 | 3 |
    rebuilt                  | 9 | 4 | 7 |          each number is one new block, wherever it occurs
                             | 9 | 4 | 5 |

All or nothing. Serves one group with full attention, as tiers do; knows nothing of transfers.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from kvwatch.telemetry.events import BlocksShared
from kvwatch.telemetry.events.block import GROUPS
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.block import BlockId
from kvwatch_engine.memory.block_pool import BlockPool, Owner
from kvwatch_engine.memory.group_tables import GroupTables


class TableRebuilder:
    """Engine thread only."""

    __slots__ = ("_group", "_log", "_pool")

    def __init__(self, pool: BlockPool, group: GroupTables, log: EventLog) -> None:
        """Enter tables into this group, whose blocks the pool has."""
        self._pool = pool
        self._group = group
        self._log = log

    def rebuild(self, tables: Mapping[Owner, Sequence[int]], num_distinct: int) -> list[BlockId] | None:
        """Give sequences of one request block tables; see `BlockManager.rebuild`."""
        if num_distinct > self._pool.num_free:
            return None
        places: list[BlockId | None] = [None] * num_distinct
        for owner, numbers in tables.items():
            assert owner not in self._group.tables, f"{owner} already has a block table"
            if not self._extend(owner, numbers, places):
                self._undo(tables)
                return None
        return [place for place in places if place is not None]

    def _extend(self, owner: Owner, numbers: Sequence[int], places: list[BlockId | None]) -> bool:
        """Make one table: runs of blocks that are new, and runs that another sequence has already."""
        table: list[BlockId] = []
        self._group.open(owner, table)  # its blocks enter the prefix index again when the sequence goes on
        for is_new, run_of_numbers in groupby(numbers, lambda number: places[number] is None):
            run = list(run_of_numbers)
            if is_new:
                blocks = self._pool.allocate(len(run), owner, "restore")
                if blocks is None:
                    return False
                for number, taken in zip(run, blocks, strict=True):
                    places[number] = taken
            else:
                blocks = [block for number in run if (block := places[number]) is not None]
                self._pool.share(blocks)
                if self._log.active:
                    self._log.append(BlocksShared(owner.request, owner.sequence, list(blocks), group=GROUPS[0]))
            table += blocks
        return True

    def _undo(self, owners: Iterable[Owner]) -> None:
        """The pool refused blocks against its own count: give back what was taken."""
        for owner in owners:
            if owner in self._group.tables:
                self._pool.release(self._group.close(owner), owner, "aborted")
