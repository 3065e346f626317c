"""The scheduler: which tokens run in the next step, and what their results change.

    schedule():  transfers that have ended, deadlines ─▶ decode tokens of running sequences
                     ─▶ prefill chunks of running ─▶ admission of waiting ─▶ drafts in what is left
                 (when blocks are short: see `preemption.py`)
    apply():     see `results.py`

Continuous batching: every step is composed anew from whatever is live. Engine thread only.
"""

from collections.abc import Iterable

from kvwatch.telemetry.events import StepCompleted, StepScheduled
from kvwatch.telemetry.events.block import AllocationReason
from kvwatch.telemetry.events.request import PreemptionReason
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.request import FinishReason, SequenceOutput
from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.contracts.step import StepResult
from kvwatch_engine.contracts.tiers import Tiers, TransferKind
from kvwatch_engine.memory.block_manager import BlockManager
from kvwatch_engine.memory.table_write import BlockCopy
from kvwatch_engine.scheduling.admission import Admission
from kvwatch_engine.scheduling.cost_model import CostModel
from kvwatch_engine.scheduling.deadlines import Deadlines
from kvwatch_engine.scheduling.drafting import Drafting
from kvwatch_engine.scheduling.lifecycle import Lifecycle
from kvwatch_engine.scheduling.policy import StepSize, TokenBudget
from kvwatch_engine.scheduling.preemption import Preemption
from kvwatch_engine.scheduling.request import Request, RequestState, Sequence, WaitReason
from kvwatch_engine.scheduling.results import AppliedStep, Results, StepDurations
from kvwatch_engine.scheduling.step_bound import StepBound
from kvwatch_engine.scheduling.step_builder import Chunk, ScheduledStep, build_step

MAX_FAILED_ALLOCATIONS = 3
"""Steps in a row in which a pool may refuse blocks that it counts as free, before the request that needs them ends."""

DEADLINE_EXCEEDED = "DeadlineExceeded"
ALLOCATION_FAILED = "AllocationFailed"
"""Classes of the errors that end a request."""


class Scheduler:
    """Composes steps and applies their results.

    Invariants: a step takes at most `max_batch_tokens` tokens and `max_num_seqs` sequences; every running sequence
    that decodes is in every step, unless it is preempted, waits for blocks that are being swapped out, or memory ran
    out not long ago; requests are admitted in the order of their ranks.
    """

    def __init__(
        self, settings: EngineSettings, manager: BlockManager, log: EventLog, tiers: Tiers | None = None
    ) -> None:
        self._settings = settings
        self._manager = manager
        self._log = log
        self._tiers = tiers
        self.lifecycle = Lifecycle(manager, log, tiers.drop) if tiers is not None else Lifecycle(manager, log)
        self.cost = CostModel()
        self.admission = Admission(settings, manager, self.lifecycle, self.cost, log, tiers)
        self._preemption = Preemption(settings, manager, self.lifecycle, self.cost, log, tiers)
        self._drafting = Drafting(settings, manager, self.lifecycle)
        self._results = Results(settings, manager, self.lifecycle, log)
        self._deadlines = Deadlines()
        self._bound = StepBound()
        self._step_size = StepSize()
        self._ended: list[SequenceOutput] = []
        self.num_transfers = 0
        """Transfers of requests that have ended so far."""

    def adopt(self, settings: EngineSettings) -> None:
        """Follow these settings from the next step on."""
        self._settings = settings
        self._manager.max_chunk = settings.max_chunk
        for part in (self.admission, self._preemption, self._drafting, self._results):
            part.settings = settings

    @property
    def num_preemptions(self) -> int:
        """Preemptions so far."""
        return self._preemption.num_preemptions

    @property
    def has_work(self) -> bool:
        """Whether a request is live, or a transfer has not ended."""
        return self.lifecycle.num_live > 0 or (self._tiers is not None and self._tiers.num_in_flight > 0)

    @property
    def is_on_hold(self) -> bool:
        """Whether there is nothing to do but to wait until admission goes on, which somebody has paused."""
        is_busy = self.lifecycle.running or self.lifecycle.arriving or (self._tiers and self._tiers.num_in_flight)
        return self.admission.pause.is_active and not is_busy

    def yielding_order(self) -> list[Request]:
        """Return the running requests, those first that would yield first."""
        return self._preemption.yielding_order()

    def room_makers(self, num_blocks: int) -> list[Request]:
        """Return which running requests would yield so that so many more blocks are free; all if that is too few."""
        return self._preemption.room_makers(num_blocks)

    def num_blocks_freed_by(self, requests: Iterable[Request]) -> int:
        """Return how many blocks become free when all these running requests yield."""
        return self._preemption.num_blocks_freed_by(requests)

    def drop(self, request: Request, reason: PreemptionReason) -> None:
        """Have a running request give its blocks back and be computed again."""
        self._preemption.drop(request, reason)

    def add(self, request: Request) -> None:
        """Take a new request in."""
        self.lifecycle.queue(request)
        self._deadlines.add(request)

    def end(
        self, request: Request, reason: FinishReason, error: str = "", error_type: str = ""
    ) -> list[SequenceOutput]:
        """End a request whatever its state; return what its caller is told. `error_type` is for telemetry."""
        outputs = [
            SequenceOutput(request_id=request.request_id, sequence=sequence.index, finish_reason=reason, error=error)
            for sequence in request.sequences_of_caller()
        ]
        self.lifecycle.finish_request(request, reason, error_type)
        return outputs

    def take_ended(self) -> list[SequenceOutput]:
        """Return what callers of requests are told that ended while steps were composed, once."""
        ended, self._ended = self._ended, []
        return ended

    # ------------------------------------------------------------------ schedule

    def schedule(self, step: int) -> ScheduledStep | None:
        """Choose the tokens of the next step and give them their blocks.

        Returns:
            The step, or None when nothing can run.
        """
        self.note_transfers()
        self._end_expired()
        self._preemption.begin_step()
        self.admission.begin_step()
        budget = TokenBudget.for_step(self._settings, self._step_size.max_tokens)
        chunks: dict[Sequence, Chunk] = {}
        for want_decoding in (True, False):
            # Decode tokens first: a long prefill never makes those wait who are in the middle of an answer.
            for sequence in self._active_sequences():
                if sequence.is_decoding is want_decoding and sequence not in chunks:
                    self._schedule_sequence(sequence, budget, chunks)
            if want_decoding:
                self._leave_time(budget, chunks)
        if not self._preemption.has_shortage:
            # Whoever was preempted just now would be admitted again at once.
            self._admit_waiting(budget, chunks)
        self.admission.note_wait_reasons(budget)
        if not chunks:
            return None
        if self._settings.num_speculative_tokens:
            is_short = self._preemption.has_shortage or self.admission.waiting_for.get(WaitReason.BLOCKS, 0) > 0
            self._drafting.add_drafts(chunks, budget, can_grow=not is_short)
        scheduled = build_step(
            step, list(chunks.values()), self._manager, self._settings.eos_token_ids, self._log.clock
        )
        self._emit_scheduled(scheduled)
        return scheduled

    def _leave_time(self, budget: TokenBudget, chunks: dict[Sequence, Chunk]) -> None:
        """Keep the step, so far of those who decode, as short as it has to be; see `step_bound.py`."""
        settings = self._settings
        if not (settings.target_itl_seconds or settings.max_step_seconds):
            return
        num_begun = sum(
            sequence.num_tokens - sequence.num_computed
            for sequence in self._active_sequences()
            if not sequence.is_decoding
        )
        if not (num_begun or self.lifecycle.waiting or settings.num_speculative_tokens):
            return  # it only decodes
        num_tokens = sum(chunk.end - chunk.start for chunk in chunks.values())
        most = self._bound.most_prefill_tokens(
            len(chunks), num_tokens, num_begun + self.admission.num_startable_tokens, settings
        )
        if most is not None:
            budget.remaining = min(budget.remaining, most)

    def note_transfers(self) -> None:
        """Let those go on whose blocks have arrived, and those compute again whose blocks are lost."""
        if self._tiers is None:
            return
        for outcome in self._tiers.poll():
            self.num_transfers += 1
            request = self.lifecycle.find(outcome.request_id)
            if request is None or request.transfer is not outcome.kind:
                continue  # it has ended meanwhile
            if outcome.is_given_up:
                self.lifecycle.restart(request)
            elif outcome.error and outcome.kind is not TransferKind.RESTORE:
                self.lifecycle.abandon_swap(request, outcome.error)
            elif outcome.kind is TransferKind.SWAP_OUT:
                request.transfer = None
            else:
                self.admission.finish_transfer(request, outcome.num_blocks)

    def _end_expired(self) -> None:
        for request in self._deadlines.pop_expired(self._log.now_ns, self.lifecycle.find):
            assert request.deadline_ns is not None, "only requests with a deadline expire"
            seconds = (request.deadline_ns - request.queued_ns) / 1e9
            error = f"the request was not complete within its {seconds:g} seconds"
            self._ended += self.end(request, FinishReason.DEADLINE, error, DEADLINE_EXCEEDED)

    def _active_sequences(self) -> list[Sequence]:
        return [sequence for request in self.lifecycle.running for sequence in request.active_sequences()]

    def _schedule_sequence(self, sequence: Sequence, budget: TokenBudget, chunks: dict[Sequence, Chunk]) -> None:
        """Add a running sequence's next tokens to the step; others may have to yield when blocks are short."""
        request = sequence.request
        if request.state is not RequestState.RUNNING:
            return  # it was preempted in favour of an earlier one
        num_tokens = budget.chunk_for(sequence)
        if num_tokens == 0:
            return
        start, end = sequence.num_computed, sequence.num_computed + num_tokens
        num_held_before = self._manager.num_held(sequence.owner)
        copies = self._take_blocks(sequence, start, end, budget, chunks)
        if copies is None:
            return
        if copies or self._manager.num_held(sequence.owner) != num_held_before:
            self.lifecycle.note_blocks(request)
        budget.remaining -= num_tokens
        chunks[sequence] = Chunk(sequence, start, end, copies)

    def _take_blocks(
        self, sequence: Sequence, start: int, end: int, budget: TokenBudget, chunks: dict[Sequence, Chunk]
    ) -> tuple[BlockCopy, ...] | None:
        """Make tokens `start` to `end` writable; return the copies that takes, None when the sequence must wait."""
        request = sequence.request
        reason: AllocationReason = "decode" if sequence.is_decoding else "prefill"
        copies = self._manager.prepare_write(sequence.owner, start, end, reason)
        if copies is not None:
            request.num_failed_allocations = 0
            return copies
        needed = self._manager.num_blocks_to_write(sequence.owner, start, end)
        num_free = self._manager.pool.num_free
        self.lifecycle.fail_allocation(request, needed, num_free, is_admission=False)
        if needed <= num_free:  # nobody's yielding would help
            request.num_failed_allocations += 1
            if self._has_given_up(request):
                self._take_out(request, budget, chunks)
            return None
        copying = {chunk.sequence.request for chunk in chunks.values() if chunk.copies}
        victims = self._preemption.make_room(request, needed, copying)
        for victim in victims:
            self._take_out(victim, budget, chunks)
        if not victims or request in victims:
            return None
        return self._manager.prepare_write(sequence.owner, start, end, reason)

    def _has_given_up(self, request: Request) -> bool:
        """End a request for which the pool has no blocks again and again, though it counts enough as free."""
        if request.num_failed_allocations < MAX_FAILED_ALLOCATIONS:
            return False
        error = f"the block pool refused blocks {request.num_failed_allocations} times though enough are free"
        self._ended += self.end(request, FinishReason.ERROR, error, ALLOCATION_FAILED)
        return True

    def _take_out(self, request: Request, budget: TokenBudget, chunks: dict[Sequence, Chunk]) -> None:
        """Take a request out of the step, if it is in it."""
        for sequence in request.sequences:
            chunk = chunks.pop(sequence, None)
            if chunk is not None:
                budget.remaining += chunk.end - chunk.start

    def _admit_waiting(self, budget: TokenBudget, chunks: dict[Sequence, Chunk]) -> None:
        while (request := self.admission.admit_next(budget)) is not None:
            self._schedule_sequence(request.active_sequences()[0], budget, chunks)
        head = self.lifecycle.waiting.head
        if head is not None:
            self._has_given_up(head)

    def _emit_scheduled(self, scheduled: ScheduledStep) -> None:
        if not self._log.active:
            return
        chunks = scheduled.chunks
        filled = self._manager.pool.filled_slots
        self._log.append(
            StepScheduled(
                [chunk.sequence.request.request_id for chunk in chunks],
                [chunk.write_end - chunk.start for chunk in chunks],
                scheduled.input.num_tokens,
                len(chunks),
                scheduled.written_block_ids,
                [filled[block] for block in scheduled.written_block_ids],
            )
        )

    # ------------------------------------------------------------------ apply

    def apply(self, scheduled: ScheduledStep, result: StepResult) -> AppliedStep:
        """Enter the results of a step; return what goes to the callers."""
        lengths = [chunk.end - chunk.start for chunk in scheduled.chunks]
        num_prefill_tokens = sum(length for length in lengths if length > 1)
        self.cost.note_step(scheduled.input.num_tokens, num_prefill_tokens, result.forward_ns)
        self._bound.note_step(scheduled.input.num_tokens, len(lengths), result.forward_ns * 1e-9)
        self._step_size.succeed(self._settings)
        return self._results.apply(scheduled, result)

    def completed_event(
        self, scheduled: ScheduledStep, result: StepResult, applied: AppliedStep, durations: StepDurations
    ) -> StepCompleted:
        """Return the event that closes a step, with the checksums of pool, tables and queues."""
        return self._results.completed_event(scheduled, result, applied, durations, self.admission.waiting_for)

    def retry_smaller(self, scheduled: ScheduledStep) -> dict[int, int] | None:
        """Take back a step for which memory was short, so that its tokens run in smaller ones.

        Returns:
            The blocks whose write was taken back, with their filled slots; None when no smaller step is possible, and
            then nothing has changed.
        """
        if not self._step_size.halve(scheduled.input.num_tokens):
            return None
        for request in dict.fromkeys(chunk.sequence.request for chunk in scheduled.chunks if chunk.copies):
            self._preemption.drop(request, "memory")  # its copies may not have been carried out
        size, filled = self._manager.block_size, self._manager.pool.filled_slots
        taken_back: dict[int, int] = {}
        for chunk in scheduled.chunks:
            if chunk.sequence.request.state is not RequestState.RUNNING:
                continue
            if chunk.draft:
                self._manager.truncate(chunk.sequence.owner, chunk.end)
            first, last = chunk.start // size, (chunk.end - 1) // size
            for group in self._manager.groups:
                for index, block in enumerate(group.tables[chunk.sequence.owner][first : last + 1], first):
                    taken_back[block] = filled[block] = max(0, chunk.start - index * size)
        return taken_back
