"""The scheduler: which tokens run in the next step, and what their results change.

    schedule():  decode tokens of running sequences ─▶ prefill chunks of running ─▶ admission of waiting
                      (preempting the newest request when blocks are short)
    apply():     note computed tokens ─▶ store full blocks ─▶ fork ─▶ append sampled tokens ─▶ end what is complete

Continuous batching: every step is composed anew from whatever is live. Engine thread only.
"""

from collections.abc import Sequence as ReadOnlySequence

from kvwatch.telemetry.events import StepCompleted, StepScheduled
from kvwatch.telemetry.events.block import AllocationReason
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.request import FinishReason, SequenceOutput
from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.contracts.step import StepResult
from kvwatch_engine.memory.block_manager import BlockManager
from kvwatch_engine.scheduling.lifecycle import Lifecycle
from kvwatch_engine.scheduling.policy import TokenBudget, WatermarkAdmission, newest_first_victim
from kvwatch_engine.scheduling.request import Request, RequestState, Sequence, WaitReason
from kvwatch_engine.scheduling.step_builder import Chunk, ScheduledStep, build_step, end_token_ids

INVALID_LOGITS = "InvalidLogits"
"""Class of the error that ends a sequence alone: its logits are not numbers."""


class Scheduler:
    """Composes steps and applies their results.

    Invariants: a step takes at most `max_batch_tokens` tokens and `max_num_seqs` sequences; every running sequence
    that decodes is in every step, unless it is preempted; requests are admitted in order of arrival.
    """

    def __init__(self, settings: EngineSettings, manager: BlockManager, log: EventLog) -> None:
        self._settings = settings
        self._manager = manager
        self._log = log
        self._admission = WatermarkAdmission(settings.watermark_blocks)
        self.lifecycle = Lifecycle(manager, log)
        self.num_preemptions = 0
        """Preemptions so far."""

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running."""
        return bool(self.lifecycle.running) or len(self.lifecycle.waiting) > 0

    # ------------------------------------------------------------------ schedule

    def schedule(self, step: int) -> ScheduledStep | None:
        """Choose the tokens of the next step and give them their blocks.

        Returns:
            The step, or None when nothing can run.
        """
        budget = TokenBudget.for_step(self._settings)
        chunks: dict[Sequence, Chunk] = {}
        preemptions_before = self.num_preemptions
        for want_decoding in (True, False):
            # Decode tokens first: a long prefill never makes those wait who are in the middle of an answer.
            for sequence in self._active_sequences():
                if sequence.is_decoding is want_decoding and sequence not in chunks:
                    self._schedule_sequence(sequence, budget, chunks)
        if self.num_preemptions == preemptions_before:
            # Whoever was preempted just now would be admitted again at once.
            self._admit_waiting(budget, chunks)
        self._note_wait_reasons(budget)
        if not chunks:
            return None
        scheduled = build_step(step, list(chunks.values()), self._manager, self._settings.eos_token_ids)
        self._emit_scheduled(scheduled)
        return scheduled

    def _active_sequences(self) -> list[Sequence]:
        return [sequence for request in self.lifecycle.running for sequence in request.active_sequences()]

    def _schedule_sequence(self, sequence: Sequence, budget: TokenBudget, chunks: dict[Sequence, Chunk]) -> None:
        """Add a running sequence's next tokens to the step, preempting others when blocks are short."""
        request = sequence.request
        if request.state is not RequestState.RUNNING:
            return  # it was preempted in favour of an earlier one
        num_tokens = budget.chunk_for(sequence)
        if num_tokens == 0:
            return
        start, end = sequence.num_computed, sequence.num_computed + num_tokens
        num_blocks_before = len(self._manager.table(sequence.owner))
        reason: AllocationReason = "decode" if sequence.is_decoding else "prefill"
        while (copies := self._manager.prepare_write(sequence.owner, start, end, reason)) is None:
            needed = self._manager.num_blocks_to_write(sequence.owner, start, end)
            self.lifecycle.fail_allocation(request, needed, self._manager.pool.num_free, is_admission=False)
            victim = newest_first_victim(self.lifecycle.running)
            self._preempt(victim, request, budget, chunks)
            if victim is request:
                return
        if copies or len(self._manager.table(sequence.owner)) != num_blocks_before:
            self.lifecycle.note_blocks(request)
        budget.remaining -= num_tokens
        chunks[sequence] = Chunk(sequence, start, end, copies)

    def _preempt(
        self, victim: Request, beneficiary: Request, budget: TokenBudget, chunks: dict[Sequence, Chunk]
    ) -> None:
        for sequence in victim.sequences:
            chunk = chunks.pop(sequence, None)
            if chunk is not None:  # it was in this step already
                budget.remaining += chunk.end - chunk.start
        self.lifecycle.preempt(victim, beneficiary)
        self.num_preemptions += 1

    def _admit_waiting(self, budget: TokenBudget, chunks: dict[Sequence, Chunk]) -> None:
        """Admit waiting requests in order of arrival, until one does not fit: nobody overtakes it."""
        lifecycle = self.lifecycle
        while (request := lifecycle.waiting.head) is not None:
            request.wait_reason = None
            if budget.remaining == 0:
                request.wait_reason = WaitReason.TOKENS
                return
            num_sequences = lifecycle.num_running_sequences + len(request.live_sequences())
            if num_sequences > self._settings.max_num_seqs:
                request.wait_reason = WaitReason.SEQUENCES
                return
            prefix = lifecycle.find_prefix(request)
            needed = lifecycle.num_blocks_needed(request, prefix)
            available = self._admission.blocks_available(self._manager.pool.num_free, is_idle=not lifecycle.running)
            if needed > available:
                request.wait_reason = WaitReason.BLOCKS
                lifecycle.fail_allocation(request, needed, available, is_admission=True)
                return
            lifecycle.admit(request, prefix)
            self._schedule_sequence(request.active_sequences()[0], budget, chunks)

    def _note_wait_reasons(self, budget: TokenBudget) -> None:
        """Those behind the head wait for what the head waits for; after a preemption that is blocks."""
        head = self.lifecycle.waiting.head
        if head is None:
            return
        reason = head.wait_reason or (WaitReason.TOKENS if budget.remaining == 0 else WaitReason.BLOCKS)
        for request in self.lifecycle.waiting:
            request.wait_reason = reason

    def _emit_scheduled(self, scheduled: ScheduledStep) -> None:
        if not self._log.active:
            return
        chunks = scheduled.chunks
        filled = self._manager.pool.filled_slots
        self._log.append(
            StepScheduled(
                [chunk.sequence.request.request_id for chunk in chunks],
                [chunk.end - chunk.start for chunk in chunks],
                scheduled.input.num_tokens,
                len(chunks),
                scheduled.written_block_ids,
                [filled[block] for block in scheduled.written_block_ids],
            )
        )

    # ------------------------------------------------------------------ apply

    def apply(self, scheduled: ScheduledStep, result: StepResult) -> "AppliedStep":
        """Enter the results of a step; return what goes to the callers."""
        lifecycle = self.lifecycle
        for chunk in scheduled.chunks:
            sequence = chunk.sequence
            if sequence.finish_reason is not None:
                continue
            request = sequence.request
            lifecycle.note_computed(sequence, chunk.start, chunk.end)
            self._manager.store_full(sequence.owner, sequence.chain, chunk.end, sequence.tokens)
            if not request.has_forked:
                lifecycle.fork_followers(request)
            if request.resumed_ns is not None:
                lifecycle.note_recovered(request)
        applied = AppliedStep()
        for row, sequence in enumerate(scheduled.sampled):
            if sequence.finish_reason is None:
                applied.outputs.append(self._apply_row(sequence, row, result, applied))
        return applied

    def _apply_row(self, sequence: Sequence, row: int, result: StepResult, applied: "AppliedStep") -> SequenceOutput:
        request = sequence.request
        if row in result.errors:
            self.lifecycle.finish_sequence(sequence, FinishReason.ERROR, INVALID_LOGITS)
            return SequenceOutput(
                request_id=request.request_id,
                sequence=sequence.index,
                finish_reason=FinishReason.ERROR,
                error=result.errors[row],
            )
        token = result.token_ids[row]
        logprobs = result.logprobs[row]
        sequence.output_token_ids.append(token)
        applied.note_token(self.lifecycle.note_token(sequence))
        reason = self._finish_reason(sequence, token)
        if reason is not None:
            self.lifecycle.finish_sequence(sequence, reason)
        return SequenceOutput(
            request_id=request.request_id,
            sequence=sequence.index,
            token_ids=(token,),
            logprobs=() if logprobs is None else (logprobs,),
            finish_reason=reason,
            is_stop_token=reason is FinishReason.STOP,
            num_cached_tokens=request.num_cached_tokens,
        )

    def _finish_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        params = sequence.request.sampling
        num_generated = len(sequence.output_token_ids)
        if num_generated > params.min_tokens and token in end_token_ids(params, self._settings.eos_token_ids):
            return FinishReason.STOP
        if num_generated >= params.max_tokens or sequence.num_tokens >= self._settings.max_model_len:
            return FinishReason.LENGTH
        return None

    def completed_event(
        self, scheduled: ScheduledStep, applied: "AppliedStep", durations: "StepDurations"
    ) -> StepCompleted:
        """Return the event that closes a step, with the checksums of pool, tables and queues."""
        pool, lifecycle = self._manager.pool, self.lifecycle
        num_waiting = len(lifecycle.waiting)
        head = lifecycle.waiting.head
        reason = head.wait_reason if head is not None else None
        return StepCompleted(
            durations.schedule_ns,
            durations.forward_ns,
            durations.sample_ns,
            durations.apply_ns,
            applied.num_generated,
            scheduled.num_recomputed,
            list(applied.inter_token_counts),
            list(applied.inter_token_counts.values()),
            pool.num_used,
            pool.num_cached,
            pool.num_empty,
            pool.num_references,
            len(lifecycle.running),
            num_waiting,
            {reason.value: num_waiting} if reason is not None else {},
        )


class AppliedStep:
    """What one step brought, while its results are entered."""

    __slots__ = ("inter_token_counts", "num_generated", "outputs")

    def __init__(self) -> None:
        self.outputs: list[SequenceOutput] = []
        self.num_generated = 0
        self.inter_token_counts: dict[int, int] = {}
        """Time between two tokens of a sequence, in ns -> sequences. Sequences in step with each other share one."""

    def note_token(self, inter_token_ns: int | None) -> None:
        """Count one generated token."""
        self.num_generated += 1
        if inter_token_ns is not None:
            self.inter_token_counts[inter_token_ns] = self.inter_token_counts.get(inter_token_ns, 0) + 1


class StepDurations:
    """Durations of a step's phases, in ns."""

    __slots__ = ("apply_ns", "forward_ns", "sample_ns", "schedule_ns")

    def __init__(self, schedule_ns: int, forward_ns: int, sample_ns: int, apply_ns: int) -> None:
        self.schedule_ns = schedule_ns
        self.forward_ns = forward_ns
        self.sample_ns = sample_ns
        self.apply_ns = apply_ns


def aborted_outputs(requests: ReadOnlySequence[Request]) -> list[SequenceOutput]:
    """Return the outputs that tell callers of requests which are about to be aborted."""
    return [
        SequenceOutput(request_id=request.request_id, sequence=sequence.index, finish_reason=FinishReason.ABORT)
        for request in requests
        for sequence in request.live_sequences()
    ]
