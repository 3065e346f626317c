"""How long a step with prefill may take: those who decode wait for its end, those who have no token yet for the next.

    nobody decodes        max_step_seconds
    somebody decodes      target_itl_seconds; or max_step_seconds, while the error budget has a gap for each of them

Error budget: of the gaps between two tokens of a sequence, `LONG_GAP_SHARE` may be longer than the target. It is spent
on queues, since one long step instead of many short ones brings all of them to their first token sooner, and has them
decode together from then on: fewer of the later gaps have somebody's prompt in them.
"""

from typing import Final

from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.scheduling.prefill_pace import PrefillPace

LONG_GAP_SHARE: Final = 0.005
"""Part of all gaps that may be longer than the target: half of what the 99th percentile leaves out, since machines are
not exact."""
MOST_LONG_GAPS: Final = 20.0
"""The most that is saved up, and what there is at first: at most 1 % of any 4,000 gaps are long."""
QUEUE_STEPS: Final = 3
"""What is done in so many steps within the target is no queue."""


class StepBound:
    """Says how much prefill fits into a step, and counts the long gaps. Engine thread only."""

    def __init__(self) -> None:
        self._pace = PrefillPace()
        self.num_long_gaps_left = MOST_LONG_GAPS
        """What is left of the error budget."""
        self._num_decoding = 0
        self._num_in_target: int | None = None
        """Tokens of prefill with which the step being composed keeps to the target; None without one."""

    def most_prefill_tokens(
        self, num_sequences: int, num_tokens: int, num_waiting_tokens: int, settings: EngineSettings
    ) -> int | None:
        """Return how many tokens of prefill the step that is being composed may have; None if nothing bounds it.

        Args:
            num_sequences: sequences that decode in it.
            num_tokens: their tokens.
            num_waiting_tokens: tokens of prompts that could be in it, known prefixes left out of account.
            settings: with both bounds.
        """
        self._num_decoding, self._num_in_target = num_sequences, None
        target, longest = settings.target_itl_seconds, settings.max_step_seconds
        most = self._pace.most_prefill_tokens(num_tokens, longest) if longest else None
        if not (target and num_sequences):
            return most
        in_target = self._pace.most_prefill_tokens(num_tokens, min(target, longest or target))
        self._num_in_target = in_target
        is_queue = num_waiting_tokens > QUEUE_STEPS * in_target
        return most if is_queue and num_sequences <= self.num_long_gaps_left else in_target

    def note_step(self, num_tokens: int, num_sequences: int, seconds: float) -> None:
        """Note the step that was composed last, when it is done. What only decodes need not have been asked about.

        Args:
            num_tokens: its tokens.
            num_sequences: its sequences.
            seconds: the model's time for it.
        """
        has_prefill = num_tokens > num_sequences
        self._pace.note_step(num_tokens, seconds, has_prefill=has_prefill)
        num_gaps = self._num_decoding if has_prefill else num_sequences
        left = min(self.num_long_gaps_left + LONG_GAP_SHARE * num_gaps, MOST_LONG_GAPS)
        is_long = has_prefill and self._num_in_target is not None and num_tokens - num_gaps > self._num_in_target
        self.num_long_gaps_left = left - num_gaps if is_long else left
