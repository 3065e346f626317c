"""What the results of a step change: computed tokens, full blocks, forks, sampled tokens, ends. Engine thread only."""

from typing import Final

from kvwatch.telemetry.events import StepCompleted
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.request import FinishReason, PositionLogprobs, PromptLogprobs, SequenceOutput
from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.contracts.step import StepResult
from kvwatch_engine.memory.block_manager import BlockManager
from kvwatch_engine.scheduling.beam_groups import BeamGroups
from kvwatch_engine.scheduling.lifecycle import Lifecycle
from kvwatch_engine.scheduling.request import Sequence
from kvwatch_engine.scheduling.step_builder import ScheduledStep
from kvwatch_engine.scheduling.verification import Verification, VerifiedDraft

_MaybeTimes = tuple[int | None, int | None, int | None, int | None, int | None]
_UNKNOWN: Final[_MaybeTimes] = (None, None, None, None, None)

INVALID_LOGITS = "InvalidLogits"
"""Class of the error that ends a sequence alone: its logits are not numbers."""
GUIDE_FAILED = "GuideFailed"
"""The same: its grammar takes too much work."""


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
    """Durations of a step's phases beside those that its result tells, in ns."""

    __slots__ = ("apply_ns", "schedule_ns")

    def __init__(self, schedule_ns: int, apply_ns: int) -> None:
        self.schedule_ns = schedule_ns
        """Building included."""
        self.apply_ns = apply_ns


class Results:
    """Enters the results of steps."""

    def __init__(self, settings: EngineSettings, manager: BlockManager, lifecycle: Lifecycle, log: EventLog) -> None:
        self.settings = settings
        self._manager = manager
        self._lifecycle = lifecycle
        self._beams = BeamGroups(lifecycle)
        self._verification = Verification(manager, lifecycle, log)

    def apply(self, scheduled: ScheduledStep, result: StepResult) -> AppliedStep:
        """Enter the results of a step; return what goes to the callers."""
        self._enter_computed(scheduled)
        applied = AppliedStep()
        for sequence, scored in zip(scheduled.scored, result.scored, strict=True):
            if sequence.finish_reason is None:
                applied.outputs.append(self._apply_scored(sequence, scored))
        if scheduled.drafts:
            self._apply_drafts(scheduled, result, applied)
        for row, sequence in enumerate(scheduled.sampled):
            if sequence.finish_reason is None and row not in scheduled.drafts:
                applied.outputs += self._apply_row(sequence, row, result, applied)
        return applied

    def _enter_computed(self, scheduled: ScheduledStep) -> None:
        """Note what was computed of known tokens, and store what became full of it."""
        lifecycle = self._lifecycle
        for chunk in scheduled.chunks:
            sequence = chunk.sequence
            if sequence.finish_reason is not None:
                continue
            request = sequence.request
            lifecycle.note_computed(sequence, chunk.start, chunk.end)
            self._manager.store_full(sequence.owner, sequence.chain, chunk.end, sequence.tokens)
            if not request.has_forked:
                lifecycle.fork_followers(request)
            if self._manager.has_windows:  # after the fork: whoever goes on at the end of the prompt sees more
                self._manager.pass_windows(sequence.owner, chunk.end)
            if request.resumed_ns is not None:
                lifecycle.note_recovered(request)

    def _apply_scored(self, sequence: Sequence, scored: PromptLogprobs) -> SequenceOutput:
        request = sequence.request
        request.num_scored += len(scored.token_ids)
        return SequenceOutput(request_id=request.request_id, sequence=sequence.index, prompt_logprobs=scored)

    def _apply_drafts(self, scheduled: ScheduledStep, result: StepResult, applied: AppliedStep) -> None:
        """Enter what sequences with drafts have got; none of them ends before all rejected tokens are taken back."""
        verified = self._verification.apply(
            scheduled, result, lambda sequence, token: self._enter_token(sequence, token, applied)
        )
        for each in verified:
            if each.rows:
                applied.outputs.append(self._end_draft(each, result))
            else:
                applied.outputs += self._apply_error(each.sequence, result.errors[each.row])

    def _end_draft(self, verified: VerifiedDraft, result: StepResult) -> SequenceOutput:
        sequence, reason = verified.sequence, verified.finish_reason
        if reason is not None:
            self._lifecycle.finish_sequence(sequence, reason)
        tokens = tuple(result.token_ids[row] for row in verified.rows)
        logprobs = tuple(each for row in verified.rows if (each := result.logprobs[row]) is not None)
        return _output(sequence, tokens, logprobs, reason)

    def _apply_row(
        self, sequence: Sequence, row: int, result: StepResult, applied: AppliedStep
    ) -> list[SequenceOutput]:
        search = sequence.request.search
        if row in result.errors:
            return self._apply_error(sequence, result.errors[row])
        if search is None:
            return [self._apply_token(sequence, row, result, applied)]
        search.offer(sequence.index, result.candidates[row])
        if not search.is_ready:
            return []  # there was no room for all beams in one step
        for beam in sequence.request.sequences:
            applied.note_token(self._lifecycle.note_token(beam))
        return self._beams.advance(sequence.request, search)

    def _apply_error(self, sequence: Sequence, error: str) -> list[SequenceOutput]:
        """End a sequence for which no token could be chosen; a beam with its whole search."""
        ended = [sequence] if sequence.request.search is None else sequence.request.sequences_of_caller()
        is_guide_error = sequence.guide is not None and bool(sequence.guide.error)
        if sequence.request.search is None:
            error_type = GUIDE_FAILED if is_guide_error else INVALID_LOGITS
            self._lifecycle.finish_sequence(sequence, FinishReason.ERROR, error_type)
        else:
            self._lifecycle.finish_request(sequence.request, FinishReason.ERROR, INVALID_LOGITS)
        return [
            SequenceOutput(
                request_id=each.request.request_id,
                sequence=each.index,
                finish_reason=FinishReason.ERROR,
                error=error,
                is_guide_error=is_guide_error,
            )
            for each in ended
        ]

    def _apply_token(self, sequence: Sequence, row: int, result: StepResult, applied: AppliedStep) -> SequenceOutput:
        token = result.token_ids[row]
        logprobs = result.logprobs[row]
        reason = self._enter_token(sequence, token, applied)
        if reason is not None:
            self._lifecycle.finish_sequence(sequence, reason)
        return _output(sequence, (token,), () if logprobs is None else (logprobs,), reason)

    def _enter_token(self, sequence: Sequence, token: int, applied: AppliedStep) -> FinishReason | None:
        """Add a token to its sequence; return why that ends it."""
        sequence.output_token_ids.append(token)
        applied.note_token(self._lifecycle.note_token(sequence))
        return self._finish_reason(sequence, token)

    def _finish_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        params = sequence.request.sampling
        num_generated = len(sequence.output_token_ids)
        if num_generated > params.min_tokens and token in params.end_token_ids(self.settings.eos_token_ids):
            return FinishReason.STOP
        if num_generated >= params.max_tokens or sequence.num_tokens >= self.settings.max_model_len:
            return FinishReason.LENGTH
        return None

    def completed_event(
        self,
        scheduled: ScheduledStep,
        result: StepResult,
        applied: AppliedStep,
        durations: StepDurations,
        waiting_for: dict[str, int],
    ) -> StepCompleted:
        """Return the event that closes a step, with the checksums of pool, tables and queues."""
        pool, lifecycle = self._manager.pool, self._lifecycle
        operations: _MaybeTimes = result.operations or _UNKNOWN
        return StepCompleted(
            durations.schedule_ns - scheduled.build_ns,
            result.forward_ns,
            result.sample_ns,
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
            len(lifecycle.waiting) + len(lifecycle.arriving),
            dict(waiting_for),
            scheduled.build_ns,
            *operations,
            result.logits_ns,
        )


def _output(
    sequence: Sequence, tokens: tuple[int, ...], logprobs: tuple[PositionLogprobs, ...], reason: FinishReason | None
) -> SequenceOutput:
    """Return what the caller is told of a sequence's new tokens, and of its end, if there is a reason."""
    request = sequence.request
    return SequenceOutput(
        request_id=request.request_id,
        sequence=sequence.index,
        token_ids=tokens,
        logprobs=logprobs,
        finish_reason=reason,
        is_stop_token=reason is FinishReason.STOP,
        num_cached_tokens=request.num_cached_tokens,
    )
