"""Tiers over dictionaries: what the seam `contracts/tiers.py` promises, done naively for tests of the scheduler.

They truly keep what blocks hold (the tokens in a `NullModel`'s slots), move it when a transfer ends, and lose it when
one fails. While blocks are on their way in, their slots hold nothing: whoever read them too early would notice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from builders import NullModel, emit_written

from kvwatch.telemetry.events import BlocksShared
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.snapshot import SequenceState, TierState, TransferState
from kvwatch_engine.contracts.block import BlockHash, BlockId
from kvwatch_engine.contracts.cache import BlockLayout
from kvwatch_engine.contracts.tiers import TierHit, TransferKind, TransferOutcome
from kvwatch_engine.memory.block_manager import BlockManager
from kvwatch_engine.memory.block_pool import Owner

Content = dict[int, int]
"""Token by offset in the block."""


@dataclass
class Transfer:
    """One that is in flight."""

    request_id: str
    kind: TransferKind
    polls_left: int
    fails: bool
    owner: Owner | None = None
    first_index: int = 0
    hashes: tuple[BlockHash, ...] = ()
    is_dropped: bool = False


@dataclass
class Kept:
    """A request that was swapped out: its tables in terms of the blocks that it had, and their content."""

    tables: dict[Owner, list[BlockId]]
    contents: dict[BlockId, Content] = field(default_factory=dict)
    filled: dict[BlockId, int] = field(default_factory=dict)


class DictTiers:
    """A host for swapped requests and prefixes, and a disk for every other prefix block."""

    def __init__(
        self,
        manager: BlockManager,
        log: EventLog,
        model: NullModel,
        random: Random,
        *,
        max_polls: int = 0,
        failure_rate: float = 0.0,
        host_blocks: int = 1000,
        num_prefixes: int = 0,
        seconds_per_block: float | None = None,
    ) -> None:
        """Create empty tiers.

        Args:
            manager: the device's block tables.
            log: where events go.
            model: its slots are the device's memory.
            random: decides how long transfers take and which fail.
            max_polls: most polls that a transfer takes beyond the next one.
            failure_rate: share of transfers that fail.
            host_blocks: blocks of swapped requests that fit.
            num_prefixes: prefix blocks that are kept; 0 offloads nothing.
            seconds_per_block: what an estimate says; none as long as nothing was measured.
        """
        self._manager = manager
        self._log = log
        self._model = model
        self._random = random
        self._max_polls = max_polls
        self.failure_rate = failure_rate
        self._host_blocks = host_blocks
        self._num_prefixes = num_prefixes
        self.seconds_per_block = seconds_per_block
        self.kept: dict[str, Kept] = {}
        self.prefixes: dict[BlockHash, list[int]] = {}
        self._forgotten: dict[BlockHash, list[int]] = {}
        """Prefixes that cannot be found any more, but may be on their way."""
        self._claimed: dict[Owner, tuple[TierHit, ...]] = {}
        self.in_flight: list[Transfer] = []
        self.num_done: dict[TransferKind, int] = dict.fromkeys(TransferKind, 0)

    # ------------------------------------------------------------------ swap

    def can_take(self, request_id: str) -> bool:
        held = {block for table in self._tables(request_id).values() for block in table}
        return sum(len(kept.filled) for kept in self.kept.values()) + len(held) <= self._host_blocks

    def num_blocks_to_restore(self, request_id: str) -> int:
        return len({block for table in self.kept[request_id].tables.values() for block in table})

    def estimate_seconds(self, num_blocks: int) -> float | None:
        return None if self.seconds_per_block is None else num_blocks * self.seconds_per_block

    def begin_out(self, request_id: str) -> None:
        assert request_id not in self.kept, "it is here already"
        tables = self._tables(request_id)
        assert tables, "there is nothing to swap out"
        filled = {block: self._manager.pool.filled_slots[block] for table in tables.values() for block in table}
        self.kept[request_id] = Kept({owner: list(table) for owner, table in tables.items()}, filled=filled)
        self._begin(request_id, TransferKind.SWAP_OUT)

    def begin_in(self, request_id: str) -> bool:
        kept, pool = self.kept[request_id], self._manager.pool
        assert all(transfer.request_id != request_id for transfer in self.in_flight)
        if self.num_blocks_to_restore(request_id) > pool.num_free:
            return False
        places: dict[BlockId, BlockId] = {}
        for owner, table in kept.tables.items():
            new_table: list[BlockId] = []
            for block in table:
                if block in places:
                    pool.share([places[block]])
                    if self._log.active:
                        self._log.append(BlocksShared(owner.request, owner.sequence, [places[block]]))
                else:
                    taken = pool.allocate(1, owner, "restore")
                    assert taken is not None, "they were counted"
                    places[block] = taken[0]
                    self._forget(taken[0])
                new_table.append(places[block])
            self._manager.groups[0].open(owner, new_table)
        self._begin(request_id, TransferKind.SWAP_IN)
        return True

    def drop(self, request_id: str) -> None:
        transfers = [transfer for transfer in self.in_flight if transfer.request_id == request_id]
        for transfer in transfers:
            transfer.is_dropped = True
        if not transfers:
            self.kept.pop(request_id, None)

    # ------------------------------------------------------------------ prefixes

    def find(self, hashes: Sequence[BlockHash]) -> list[TierHit]:
        hits: list[TierHit] = []
        for content in hashes:
            if content not in self.prefixes:
                break
            tier = "disk" if content[0] % 2 else "host"
            if hits and hits[-1].tier == tier:
                hits[-1] = TierHit(tier, (*hits[-1].hashes, content))
            else:
                hits.append(TierHit(tier, (content,)))
        return hits

    def claim(self, request_id: str, sequence: int, hits: Sequence[TierHit]) -> None:
        owner = Owner(request_id, sequence)
        assert owner not in self._claimed
        self._claimed[owner] = tuple(hits)

    def end_claim(self, request_id: str, sequence: int) -> None:
        del self._claimed[Owner(request_id, sequence)]

    def begin_restore(self, request_id: str, sequence: int, first_index: int, hits: Sequence[TierHit]) -> None:
        hashes = tuple(content for hit in hits for content in hit.hashes)
        owner = Owner(request_id, sequence)
        assert self._claimed.pop(owner, None) == tuple(hits), "what was found was not claimed"
        for block in self._manager.table(owner)[first_index : first_index + len(hashes)]:
            self._forget(block)
        transfer = self._begin(request_id, TransferKind.RESTORE)
        transfer.owner, transfer.first_index, transfer.hashes = owner, first_index, hashes

    # ------------------------------------------------------------------ the end

    @property
    def num_in_flight(self) -> int:
        return len(self.in_flight)

    def poll(self) -> list[TransferOutcome]:
        self._offload()
        ended = [transfer for transfer in self.in_flight if transfer.polls_left == 0]
        self.in_flight = [transfer for transfer in self.in_flight if transfer.polls_left > 0]
        for transfer in self.in_flight:
            transfer.polls_left -= 1
        finish: dict[TransferKind, Callable[[Transfer], TransferOutcome]] = {
            TransferKind.SWAP_OUT: self._end_out,
            TransferKind.SWAP_IN: self._end_in,
            TransferKind.RESTORE: self._end_restore,
        }
        return [self._drop_tables(each) if each.is_dropped else finish[each.kind](each) for each in ended]

    def wait(self, seconds: float) -> bool:
        assert seconds > 0
        return bool(self.in_flight)

    def clear(self) -> dict[str, int]:
        num_cleared = len(self.prefixes)
        self._forgotten |= self.prefixes  # what is claimed or on its way still arrives
        self.prefixes.clear()
        return {"host": num_cleared}

    def lay_out(self, layout: BlockLayout) -> None:  # noqa: ARG002
        assert not self.in_flight
        assert not self.kept, "no request is swapped out"
        self.prefixes.clear()
        self._forgotten.clear()

    def close(self) -> None:
        self.in_flight.clear()

    def states(self) -> list[TierState]:
        return []

    def sequences(self) -> list[SequenceState]:
        return []

    def transfers(self) -> list[TransferState]:
        return []

    def check_integrity(self) -> None:
        assert sum(len(kept.filled) for kept in self.kept.values()) <= self._host_blocks
        assert not self._claimed, "claims last no longer than an admission"

    # ------------------------------------------------------------------ parts

    def _tables(self, request_id: str) -> dict[Owner, list[BlockId]]:
        owners = [owner for owner in self._manager.owners() if owner.request == request_id]
        return {owner: self._manager.table(owner) for owner in sorted(owners)}

    def _begin(self, request_id: str, kind: TransferKind) -> Transfer:
        polls = self._random.randint(0, self._max_polls)
        transfer = Transfer(request_id, kind, polls, fails=self._random.random() < self.failure_rate)
        self.in_flight.append(transfer)
        return transfer

    def _drop_tables(self, transfer: Transfer) -> TransferOutcome:
        self._release(transfer.request_id, "aborted")
        self.kept.pop(transfer.request_id, None)
        return TransferOutcome(transfer.request_id, transfer.kind, 0, "dropped")

    def _release(self, request_id: str, reason: str) -> None:
        for owner in self._tables(request_id):
            self._manager.release(owner, reason)  # type: ignore[arg-type]

    def _end_out(self, transfer: Transfer) -> TransferOutcome:
        kept = self.kept[transfer.request_id]
        assert self._tables(transfer.request_id) == kept.tables, "its tables were touched meanwhile"
        kept.contents = {block: self._read(block) for block in kept.filled}
        self._release(transfer.request_id, "preempted")
        if transfer.fails:
            del self.kept[transfer.request_id]
        return self._outcome(transfer, len(kept.filled))

    def _end_in(self, transfer: Transfer) -> TransferOutcome:
        kept = self.kept.pop(transfer.request_id)
        if transfer.fails:
            self._release(transfer.request_id, "preempted")
            return self._outcome(transfer, 0)
        tables = self._tables(transfer.request_id)
        places = {
            old: new for owner, table in kept.tables.items() for old, new in zip(table, tables[owner], strict=True)
        }
        for old, new in places.items():
            self._write(new, kept.contents[old], kept.filled[old])
        emit_written(self._log, self._manager, transfer.request_id, list(places.values()))
        return self._outcome(transfer, len(places))

    def _end_restore(self, transfer: Transfer) -> TransferOutcome:
        assert transfer.owner is not None
        num_good = self._random.randint(0, len(transfer.hashes) - 1) if transfer.fails else len(transfer.hashes)
        blocks = self._manager.table(transfer.owner)[transfer.first_index : transfer.first_index + num_good]
        size = self._manager.block_size
        for block, content in zip(blocks, transfer.hashes, strict=False):
            self._write(block, dict(enumerate(self.prefixes.get(content) or self._forgotten[content])), size)
        emit_written(self._log, self._manager, transfer.request_id, blocks)
        return self._outcome(transfer, num_good)

    def _outcome(self, transfer: Transfer, num_blocks: int) -> TransferOutcome:
        self.num_done[transfer.kind] += not transfer.fails
        return TransferOutcome(transfer.request_id, transfer.kind, num_blocks, "copy" if transfer.fails else "")

    def _offload(self) -> None:
        """Keep the content of every cached block, as if it had been evicted; the oldest are forgotten."""
        if not self._num_prefixes:
            return
        pool = self._manager.pool
        for block, content in enumerate(pool.hashes):
            if content is not None and pool.ref_counts[block] == 0:
                self.prefixes.pop(content, None)
                tokens = self._read(BlockId(block))
                self.prefixes[content] = [tokens[offset] for offset in range(self._manager.block_size)]
        for content in list(self.prefixes)[: -self._num_prefixes]:
            self._forgotten[content] = self.prefixes.pop(content)

    def _read(self, block: BlockId) -> Content:
        first = block * self._manager.block_size
        slots = self._model.slots
        offsets = range(self._manager.block_size)
        return {offset: slots[first + offset] for offset in offsets if first + offset in slots}

    def _write(self, block: BlockId, content: Content, filled: int) -> None:
        first = block * self._manager.block_size
        self._model.slots.update({first + offset: token for offset, token in content.items()})
        self._manager.pool.filled_slots[block] = filled

    def _forget(self, block: BlockId) -> None:
        first = block * self._manager.block_size
        for offset in range(self._manager.block_size):
            self._model.slots.pop(first + offset, None)
