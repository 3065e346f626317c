"""Swap space for preempted requests: all blocks of a request go to the host, and come back into new blocks.

A block that several sequences of the request share moves once; the tables are kept as numbers of distinct blocks, so
that they can be rebuilt with the same sharing anywhere.
"""

from dataclasses import dataclass
from functools import partial
from typing import Final

from kvwatch.telemetry.events.block import ReleaseReason
from kvwatch_engine.contracts.block import BlockId
from kvwatch_engine.contracts.tiers import TransferKind, TransferOutcome
from kvwatch_engine.memory.block_manager import BlockManager
from kvwatch_engine.memory.block_pool import Owner
from kvwatch_engine.memory.tiers.desk import Transfer, TransferDesk
from kvwatch_engine.memory.tiers.levels import HostLevel
from kvwatch_engine.memory.tiers.speed import TransferSpeed
from kvwatch_engine.memory.tiers.stores import BlockStore
from kvwatch_engine.memory.tiers.worker import Job

_OUT: Final = ("device", "host")
_IN: Final = ("host", "device")


@dataclass(slots=True, eq=False)
class Swapped:
    """A request in the host's memory, or on its way there or back."""

    request_id: str
    tables: dict[Owner, list[int]]
    """For each sequence which of the distinct blocks it refers to, in order."""
    host_blocks: list[BlockId]
    """One for each distinct block."""
    filled_slots: list[int]

    @property
    def host_owner(self) -> Owner:
        """Who holds the host's blocks: the request's first sequence stands for all."""
        return Owner(self.request_id, 0)


class Swapping:
    """Engine thread only."""

    def __init__(
        self,
        manager: BlockManager,
        host: HostLevel | None,
        device: BlockStore[int],
        desk: TransferDesk,
        speed: TransferSpeed,
    ) -> None:
        """Swap to `host`; without one there is room for nobody."""
        self._manager = manager
        self._host = host
        self._device = device
        self._desk = desk
        self._speed = speed
        self._swapped: dict[str, Swapped] = {}

    def can_take(self, request_id: str) -> bool:
        """Whether the host has room for all distinct blocks that the request's sequences hold."""
        needed = self._manager.num_distinct_blocks(self._owners(request_id))
        return self._host is not None and needed <= self._host.pool.num_free

    def num_blocks_to_restore(self, request_id: str) -> int:
        """Return how many device blocks `begin_in` will take."""
        return len(self._swapped[request_id].host_blocks)

    def begin_out(self, request_id: str) -> None:
        """Begin to copy a request's blocks to the host."""
        assert self._host is not None, "there is no host tier"
        assert request_id not in self._swapped, f"{request_id} is swapped out already"
        manager = self._manager
        owners = self._owners(request_id)
        distinct = list(dict.fromkeys(block for owner in owners for block in manager.table(owner)))
        places = {block: number for number, block in enumerate(distinct)}
        host_blocks = self._host.pool.allocate(len(distinct), Owner(request_id, 0), "swap")
        if host_blocks is None:
            self._desk.emit_not_begun("swap_out", request_id, _OUT, "no_room", len(distinct))
            self._release(owners)
            self._desk.tell(TransferOutcome(request_id, TransferKind.SWAP_OUT, 0, "no_room"))
            return
        filled = manager.pool.filled_slots
        swapped = self._swapped[request_id] = Swapped(
            request_id,
            {owner: [places[block] for block in manager.table(owner)] for owner in owners},
            host_blocks,
            [filled[block] for block in distinct],
        )
        for owner in owners:
            manager.hold(owner)
        job = Job(self._device, distinct, self._host.store, host_blocks)
        end, late = partial(self._end_out, swapped, distinct), partial(self._give_up, swapped)
        self._desk.begin("swap_out", request_id, _OUT, job, end, late)

    def begin_in(self, request_id: str) -> bool:
        """Take device blocks and begin to fill them; False, with nothing changed, when too few are free."""
        assert self._host is not None, "there is no host tier"
        swapped = self._swapped[request_id]
        blocks = self._manager.rebuild(swapped.tables, len(swapped.host_blocks))
        if blocks is None:
            return False
        for owner in swapped.tables:
            self._manager.hold(owner)
        job = Job(self._host.store, swapped.host_blocks, self._device, blocks)
        end, late = partial(self._end_in, swapped, blocks), partial(self._give_up, swapped)
        self._desk.begin("swap_in", request_id, _IN, job, end, late)
        return True

    def drop(self, request_id: str) -> None:
        """Forget a request. What takes part in a transfer is freed at its end, the rest at once."""
        transfers = self._desk.of_request(request_id)
        for transfer in transfers:
            self._desk.drop(transfer)
        # The scheduler takes a request for one that waits for a transfer until it was told the outcome.
        if self._desk.withdraw(request_id) or transfers:
            self._release(self._owners(request_id), "aborted")
        swapped = self._swapped.pop(request_id, None)
        if swapped is not None and not any(each.kind in ("swap_out", "swap_in") for each in transfers):
            self._free_host(swapped)

    def to_kept(self) -> list[Swapped]:
        """Return the requests that are swapped out, or on their way."""
        return list(self._swapped.values())

    # ------------------------------------------------------------------ ends

    def _end_out(self, swapped: Swapped, sources: list[BlockId], transfer: Transfer) -> TransferOutcome | None:
        job, host = transfer.job, self._host
        assert host is not None, "there is no host tier"
        is_good = transfer.num_arrived == len(sources)
        if is_good:
            for block, filled in zip(swapped.host_blocks, swapped.filled_slots, strict=True):
                host.pool.filled_slots[block] = filled
            self._desk.emit_arrived(transfer, sources, swapped.host_blocks, swapped.filled_slots)
            self._speed.note("out", len(sources), job.duration_ns)
        else:
            self._desk.emit_failed(transfer)
            self._free_host(swapped)
        self._end_holds(swapped)
        if transfer.is_late or transfer.is_dropped:
            return None
        self._release(list(swapped.tables))
        if not is_good:
            self._swapped.pop(swapped.request_id, None)
        return _outcome(transfer, TransferKind.SWAP_OUT, is_good=is_good)

    def _end_in(self, swapped: Swapped, targets: list[BlockId], transfer: Transfer) -> TransferOutcome | None:
        is_good = transfer.num_arrived == len(targets)
        if is_good:
            for block, filled in zip(targets, swapped.filled_slots, strict=True):
                self._manager.pool.filled_slots[block] = filled
            self._desk.emit_arrived(transfer, swapped.host_blocks, targets, swapped.filled_slots)
            self._speed.note("in", len(targets), transfer.job.duration_ns)
        else:
            self._desk.emit_failed(transfer)
        self._free_host(swapped, is_good=is_good)
        self._end_holds(swapped)
        if transfer.is_late or transfer.is_dropped:
            return None
        self._swapped.pop(swapped.request_id, None)
        if not is_good:
            self._release(list(swapped.tables))
        return _outcome(transfer, TransferKind.SWAP_IN, is_good=is_good)

    def _give_up(self, swapped: Swapped, transfer: Transfer) -> TransferOutcome:
        """It takes too long: the request is to be recomputed. Its blocks are held until the worker lets go of them."""
        self._swapped.pop(swapped.request_id, None)
        self._release(list(swapped.tables))
        return TransferOutcome(swapped.request_id, TransferKind(transfer.kind), 0, "deadline")

    # ------------------------------------------------------------------ parts

    def _owners(self, request_id: str) -> list[Owner]:
        return sorted(owner for owner in self._manager.owners() if owner.request == request_id)

    def _release(self, owners: list[Owner], reason: ReleaseReason = "preempted") -> None:
        for owner in owners:
            self._manager.release(owner, reason)

    def _end_holds(self, swapped: Swapped) -> None:
        for owner in swapped.tables:
            self._manager.end_hold(owner)

    def _free_host(self, swapped: Swapped, *, is_good: bool = False) -> None:
        assert self._host is not None, "there is no host tier"
        blocks = swapped.host_blocks[::-1]
        self._host.pool.release(blocks, swapped.host_owner, "restored" if is_good else "aborted")


def _outcome(transfer: Transfer, kind: TransferKind, *, is_good: bool) -> TransferOutcome:
    error = "" if is_good else transfer.job.reason
    return TransferOutcome(transfer.request_id, kind, transfer.num_blocks if is_good else 0, error)
