"""What stands of a step's drafts: the tokens that the model chose itself. What was written for the rest is taken back.

    known   | t0 .. t9 |                         computed before
    step    |       t9 | d1 d2 d3 |              one chunk: the newest token and a draft of three
    samples |          | s1 s2 s3 s4             what follows t9, d1, d2, d3
                         =  =  /                 s1 = d1, s2 = d2, s3 is not d3: s1, s2 and s3 are the next tokens

Row i is sampled as if the draft before it had been generated: with the sequence's own seed and that position, with the
penalties and forbidden tokens of that position. So each token that stands is the one that would have come without
drafts, greedy or drawn, seeds included; but for near ties, which products with another number of rows may decide
otherwise.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvwatch.telemetry.events import DraftsVerified
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.block import BlockId
from kvwatch_engine.contracts.request import FinishReason
from kvwatch_engine.contracts.step import StepResult
from kvwatch_engine.memory.block_manager import BlockManager
from kvwatch_engine.scheduling.lifecycle import Lifecycle
from kvwatch_engine.scheduling.request import Sequence
from kvwatch_engine.scheduling.step_builder import DraftRows, ScheduledStep

EnterToken = Callable[[Sequence, int], FinishReason | None]
"""Adds a token to a sequence; returns why that ends it."""


@dataclass(frozen=True, slots=True)
class VerifiedDraft:
    """What a step brought for a sequence that had a draft. Its tokens are entered; it has not ended yet."""

    sequence: Sequence
    row: int
    """Its first row."""
    num_proposed: int
    rows: list[int]
    """Rows whose tokens stand, in order; none if the first one has an error."""
    finish_reason: FinishReason | None

    @property
    def num_accepted(self) -> int:
        """Tokens beyond the one that every step brings."""
        return max(0, len(self.rows) - 1)


class Verification:
    """Enters what stands of drafts. Engine thread only.

    Afterwards each sequence holds the blocks of its computed tokens and no other, and none that is stored has a
    rejected token in it.
    """

    def __init__(self, manager: BlockManager, lifecycle: Lifecycle, log: EventLog) -> None:
        self._manager = manager
        self._lifecycle = lifecycle
        self._log = log

    def apply(self, scheduled: ScheduledStep, result: StepResult, enter: EnterToken) -> list[VerifiedDraft]:
        """Enter the tokens of all sequences with drafts; the caller ends those that have a reason, or an error."""
        partial: list[BlockId] = []
        verified: list[VerifiedDraft] = []
        for row, draft in scheduled.drafts.items():
            each = _verify(scheduled.sampled[row], row, draft, result, enter)
            partial += self._settle(each)
            verified.append(each)
        if self._log.active:
            self._log.append(self._event(verified, partial))
        return verified

    def _settle(self, verified: VerifiedDraft) -> list[BlockId]:
        """Keep the K/V of accepted tokens, and take the rest back; return blocks that are less filled than written."""
        sequence, num_accepted = verified.sequence, verified.num_accepted
        request, manager = sequence.request, self._manager
        request.num_draft_tokens += verified.num_proposed
        request.num_accepted_draft_tokens += num_accepted
        start = sequence.num_computed
        end = start + num_accepted
        taken_back = [] if num_accepted == verified.num_proposed else manager.truncate(sequence.owner, end)
        if num_accepted:
            self._lifecycle.note_computed(sequence, start, end)
            manager.store_full(sequence.owner, sequence.chain, end, sequence.tokens)
            manager.pass_windows(sequence.owner, end)
        return taken_back

    def _event(self, verified: list[VerifiedDraft], partial: list[BlockId]) -> DraftsVerified:
        num_proposed = sum(each.num_proposed for each in verified)
        num_accepted = sum(each.num_accepted for each in verified)
        filled = self._manager.pool.filled_slots
        return DraftsVerified(
            [each.sequence.request.request_id for each in verified],
            [each.num_proposed for each in verified],
            [each.num_accepted for each in verified],
            len(verified),
            num_accepted,
            num_proposed - num_accepted,
            list(partial),
            [filled[block] for block in partial],
        )


def _verify(sequence: Sequence, row: int, draft: DraftRows, result: StepResult, enter: EnterToken) -> VerifiedDraft:
    """Enter tokens as long as the draft before each of them stands."""
    num_proposed = len(draft.token_ids)
    standing: list[int] = []
    reason: FinishReason | None = None
    for place, each in enumerate((row, *range(draft.first_row, draft.first_row + num_proposed))):
        if each in result.errors:
            break  # behind the first row, the next step computes it again, and finds the same
        token = result.token_ids[each]
        standing.append(each)
        reason = enter(sequence, token)
        if reason is not None or place == num_proposed or token != draft.token_ids[place]:
            break
    return VerifiedDraft(sequence, row, num_proposed, standing, reason)
