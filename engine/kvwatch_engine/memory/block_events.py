"""What a pool tells of its blocks where one event does not suffice: KV groups and runs each have their own.

Lists that are given to an event belong to it from then on: nobody changes them. Whoever calls has asked whether
anybody listens.
"""

from collections.abc import Mapping, Sequence
from operator import itemgetter

from kvwatch.telemetry.events import BlocksDuplicated, BlocksEvicted, BlocksRelocated, BlocksStored
from kvwatch.telemetry.events.block import GROUPS, EvictionReason, Group, Tier
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.block import BlockHash, BlockId
from kvwatch_engine.memory.block_columns import BlockColumns
from kvwatch_engine.memory.owner import StoredRun


class BlockEvents:
    """Events of one pool. Engine thread only."""

    __slots__ = ("_columns", "_groups", "_log", "_tier")

    def __init__(self, log: EventLog, tier: Tier, columns: BlockColumns) -> None:
        """Tell of the blocks of a tier, of which the pool notes `columns`."""
        self._log = log
        self._tier: Tier = tier
        self._columns = columns
        self._groups = columns.groups

    def evicted(self, blocks: list[BlockId], hashes: list[BlockHash], reason: EvictionReason, beneficiary: str) -> None:
        """Tell of evicted blocks, group by group."""
        if self._groups:
            self._evicted_by_group(blocks, hashes, reason, beneficiary)
        else:
            self._tell_evicted(blocks, hashes, reason, beneficiary)

    def relocated(self, moves: Mapping[BlockId, BlockId]) -> None:
        """Tell of blocks that move, group by group; their groups are still those of the places that they leave."""
        by_group: dict[int, dict[BlockId, BlockId]] = {}
        for source, destination in moves.items():
            by_group.setdefault(self._groups[source] if self._groups else 0, {})[source] = destination
        for group, some in by_group.items():
            self._log.append(BlocksRelocated(list(some), list(some.values()), self._tier, GROUPS[group]))

    def stored(
        self,
        blocks: list[BlockId],
        hashes: list[BlockHash],
        parent: BlockHash | None,
        source: StoredRun,
        duplicates: Sequence[int],
    ) -> None:
        """Tell of blocks that entered the prefix index; those at the places `duplicates` did not."""
        if not duplicates:
            self._log.append(self._stored_event(blocks, hashes, parent, source, 0))
            return
        first = 0
        for place in (*duplicates, len(blocks)):
            if place > first:
                run = slice(first, place)
                self._log.append(self._stored_event(blocks[run], hashes[run], parent, source, first))
            first, parent = place + 1, hashes[place] if place < len(hashes) else None

    def duplicated(self, blocks: list[BlockId], originals: list[BlockId], source: StoredRun) -> None:
        """Tell of full blocks whose content other blocks hold already."""
        request, sequence = source.owner
        self._log.append(
            BlocksDuplicated(request, sequence, list(blocks), list(originals), self._tier, GROUPS[source.group])
        )

    # ------------------------------------------------------------------ parts

    def _evicted_by_group(
        self, blocks: list[BlockId], hashes: list[BlockHash], reason: EvictionReason, beneficiary: str
    ) -> None:
        by_group: dict[int, tuple[list[BlockId], list[BlockHash]]] = {}
        for block, content in zip(blocks, hashes, strict=True):
            some_blocks, some_hashes = by_group.setdefault(self._groups[block], ([], []))
            some_blocks.append(block)
            some_hashes.append(content)
        for group, evicted in by_group.items():
            self._tell_evicted(*evicted, reason, beneficiary, GROUPS[group])

    def _tell_evicted(
        self,
        blocks: list[BlockId],
        hashes: list[BlockHash],
        reason: EvictionReason,
        beneficiary: str,
        group: Group = "0",
    ) -> None:
        log, columns = self._log, self._columns
        allocated, released = columns.allocated_ns, columns.released_ns
        if len(blocks) == 1:
            block, now = blocks[0], log.now_ns
            ages, idles, hits = [now - allocated[block]], [now - released[block]], [columns.hits[block]]
        else:  # in tuples the times themselves: readers compute ages of them
            choose = itemgetter(*blocks)
            ages, idles, hits = choose(allocated), choose(released), list(choose(columns.hits))
        log.append(
            BlocksEvicted(
                hashes,  # type: ignore[arg-type]  # bytes by another name
                blocks,  # type: ignore[arg-type]  # numbers by another name
                ages,
                idles,
                hits,
                reason,
                beneficiary,
                self._tier,
                group,
            )
        )

    def _stored_event(
        self,
        blocks: list[BlockId],
        hashes: list[BlockHash],
        parent: BlockHash | None,
        source: StoredRun,
        first: int,
    ) -> BlocksStored:
        """Return the event of a run; `first` is the place of its first block among those that were given."""
        (request, sequence), first_index, token_ids, group, parents = source
        end = first + len(blocks)
        return BlocksStored(
            hashes,  # type: ignore[arg-type]  # bytes by another name
            blocks,  # type: ignore[arg-type]  # numbers by another name
            parent,
            self._tier,
            GROUPS[group],
            request,
            sequence,
            first_index + first,
            token_ids and token_ids[first:end],
            None if parents is None else [each or b"" for each in parents[first:end]],
        )
