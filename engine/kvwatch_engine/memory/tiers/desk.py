"""Transfers that are in flight: begins them, notices their end and their being late, tells events.

Knows jobs and deadlines; what an end means to blocks and requests is up to whoever began the transfer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvwatch.telemetry.events import (
    Offloaded,
    Restored,
    SwappedIn,
    SwappedOut,
    TransferFailed,
    TransferStarted,
)
from kvwatch.telemetry.events.block import Tier
from kvwatch.telemetry.events.transfer import TransferFailure, TransferKindName
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.snapshot import TransferState
from kvwatch_engine.contracts.tiers import TransferOutcome
from kvwatch_engine.memory.tiers.worker import Job, Worker

NOT_BEGUN: Final = -1
"""Number of a transfer that never began."""


@dataclass(slots=True, eq=False)
class Transfer:
    """One job and what it is for."""

    number: int
    kind: TransferKindName
    request_id: str
    """Empty for an offload."""
    from_tier: Tier
    to_tier: Tier
    job: Job
    on_end: Callable[["Transfer"], TransferOutcome | None]
    """Called when the worker has let go of it, also if it was late or dropped."""
    on_late: Callable[["Transfer"], TransferOutcome | None]
    """Called when it has taken too long; the worker may still move its blocks."""
    begun_ns: int
    is_dropped: bool = False
    """Its request ended: nobody wants what it brings."""
    is_late: bool = False
    """It was given up, and its failure told."""

    @property
    def num_blocks(self) -> int:
        """Blocks that move."""
        return len(self.job.source_keys)

    @property
    def num_arrived(self) -> int:
        """Leading blocks that arrived and are wanted."""
        return 0 if self.is_dropped or self.is_late else self.job.num_done


class TransferDesk:
    """Engine thread only."""

    def __init__(self, worker: Worker, log: EventLog, block_bytes: int, deadline_seconds: float) -> None:
        self._worker = worker
        self._log = log
        self._block_bytes = block_bytes
        self._deadline_ns = round(deadline_seconds * 1e9)
        self._open: dict[Job, Transfer] = {}
        self._ready: list[TransferOutcome] = []
        self._num_begun = 0

    def begin(
        self,
        kind: TransferKindName,
        request_id: str,
        tiers: tuple[Tier, Tier],
        job: Job,
        on_end: Callable[[Transfer], TransferOutcome | None],
        on_late: Callable[[Transfer], TransferOutcome | None],
    ) -> Transfer:
        """Hand a job to the worker; `tiers` are where from and where to."""
        transfer = Transfer(
            self._num_begun, kind, request_id, *tiers, job, on_end, on_late, self._log.clock.monotonic_ns()
        )
        self._num_begun += 1
        self._open[job] = transfer
        if self._log.active:
            self._log.append(TransferStarted(transfer.number, kind, request_id, transfer.num_blocks, *tiers))
        self._worker.submit(job)
        return transfer

    def submit(self, job: Job) -> None:
        """Hand over a job that moves nothing; nobody waits for its end."""
        self._worker.submit(job)

    def tell(self, outcome: TransferOutcome) -> None:
        """Let the next `poll` return an outcome."""
        self._ready.append(outcome)

    def withdraw(self, request_id: str) -> bool:
        """Tell no outcome of a request; return whether one was about to be told."""
        before = len(self._ready)
        self._ready = [outcome for outcome in self._ready if outcome.request_id != request_id]
        return len(self._ready) < before

    def poll(self) -> list[TransferOutcome]:
        """Return outcomes in the order of the ends. Cheap when nothing is in flight."""
        if self._open:
            for job in self._worker.take_ended():
                transfer = self._open.pop(job, None)
                if transfer is not None:
                    self._add(transfer.on_end(transfer))
            self._give_up_late_ones()
        if not self._ready:
            return []
        outcomes, self._ready = self._ready, []
        return outcomes

    def of_request(self, request_id: str) -> list[Transfer]:
        """Return the transfers of a request that were not given up."""
        return [each for each in self._open.values() if each.request_id == request_id and not each.is_late]

    def drop(self, transfer: Transfer) -> None:
        """Note that nobody wants what a transfer brings."""
        transfer.is_dropped = transfer.job.is_cancelled = True

    @property
    def num_in_flight(self) -> int:
        """Transfers that the worker has not let go of, and outcomes that were not told yet."""
        return len(self._open) + len(self._ready)

    @property
    def num_blocks_in_flight(self) -> int:
        """Blocks of these transfers."""
        return sum(each.num_blocks for each in self._open.values())

    def to_states(self) -> list[TransferState]:
        """Return what is on its way, for a snapshot."""
        return [
            TransferState(each.number, each.request_id, each.num_blocks, each.from_tier, each.to_tier)
            for each in self._open.values()
            if not each.is_late
        ]

    # ------------------------------------------------------------------ events

    def emit_arrived(
        self, transfer: Transfer, sources: Sequence[int], destinations: Sequence[int], filled_slots: Sequence[int]
    ) -> None:
        """Tell that blocks have arrived, unless it is none."""
        if not self._log.active or not destinations:
            return
        job = transfer.job
        told = {
            "transfer": transfer.number,
            "destinations": list(destinations),
            "filled_slots": list(filled_slots),
            "num_bytes": len(destinations) * self._block_bytes,
            "duration_ns": job.duration_ns,
            "waited_ns": max(0, job.started_ns - transfer.begun_ns),
            "from_tier": transfer.from_tier,
            "to_tier": transfer.to_tier,
        }
        if transfer.kind == "offload":
            self._log.append(Offloaded(**told))  # type: ignore[arg-type]
            return
        event = {"swap_out": SwappedOut, "swap_in": SwappedIn, "restore": Restored}[transfer.kind]
        self._log.append(event(request=transfer.request_id, sources=list(sources), **told))

    def emit_failed(self, transfer: Transfer) -> None:
        """Tell that the rest of a transfer's blocks did not arrive, unless that was told when it was given up."""
        if transfer.is_late:
            return
        reason = "dropped" if transfer.is_dropped else transfer.job.reason
        self._fail(transfer, reason or "dropped", transfer.num_blocks - transfer.num_arrived, transfer.job.error)

    def emit_not_begun(
        self, kind: TransferKindName, request_id: str, tiers: tuple[Tier, Tier], reason: TransferFailure, number: int
    ) -> None:
        """Tell that blocks could not even be sent on their way; `number` of them."""
        if self._log.active:
            self._log.append(TransferFailed(NOT_BEGUN, kind, request_id, reason, number, *tiers))

    # ------------------------------------------------------------------ parts

    def _fail(self, transfer: Transfer, reason: str, num_blocks: int, error: str = "") -> None:
        if self._log.active:
            self._log.append(
                TransferFailed(
                    transfer.number,
                    transfer.kind,
                    transfer.request_id,
                    reason,  # type: ignore[arg-type]
                    num_blocks,
                    transfer.from_tier,
                    transfer.to_tier,
                    error,
                )
            )

    def _give_up_late_ones(self) -> None:
        """Transfers are in the order in which they began, and all may take equally long."""
        now = self._log.clock.monotonic_ns()
        for transfer in list(self._open.values()):
            if now - transfer.begun_ns < self._deadline_ns:
                return
            if not transfer.is_late and not transfer.is_dropped:
                transfer.job.is_cancelled = True
                outcome = transfer.on_late(transfer)
                self._fail(transfer, "deadline", transfer.num_blocks)
                transfer.is_late = True
                self._add(outcome)

    def _add(self, outcome: TransferOutcome | None) -> None:
        if outcome is not None:
            self._ready.append(outcome)
