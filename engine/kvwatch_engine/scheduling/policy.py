"""Small decisions of the scheduler, each readable alone. Pure: they look, and decide; others act."""

from dataclasses import dataclass

from kvwatch_engine.contracts.cache import most_window_blocks
from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.scheduling.request import Sequence

NS_PER_SECOND = 1_000_000_000
STEPS_UNTIL_RECOVERY = 8
"""Steps that must succeed before a step may be larger again after memory ran out."""


def rank_of(priority: int, queued_ns: int, arrival: int, aging_seconds: float) -> tuple[int, int]:
    """Return a request's place among all requests; the lowest is served first.

    A request of priority p is treated like one of priority 0 that arrived p times `aging_seconds` later. So order
    inside a priority is order of arrival, and whatever arrives later than that cannot overtake it: none starves. With
    0 priorities never age.
    """
    if aging_seconds <= 0:
        return priority, arrival
    return queued_ns + round(priority * aging_seconds * NS_PER_SECOND), arrival


def deadline_of(queued_ns: int, asked_seconds: float | None, limit_seconds: float | None) -> int | None:
    """Return the monotonic time at which a request ends: after the shorter of both times; None without any."""
    times = [seconds for seconds in (asked_seconds, limit_seconds) if seconds is not None]
    return queued_ns + round(min(times) * NS_PER_SECOND) if times else None


@dataclass(slots=True)
class TokenBudget:
    """Tokens that a step may still take."""

    remaining: int
    max_chunk: int
    """Most tokens of one sequence in one step."""

    def chunk_for(self, sequence: Sequence) -> int:
        """Return how many tokens of a sequence to compute now; 0 when the budget is used up."""
        return min(sequence.num_tokens - sequence.num_computed, self.max_chunk, self.remaining)

    @classmethod
    def for_step(cls, settings: EngineSettings, max_tokens: int | None = None) -> "TokenBudget":
        """Return the budget of a fresh step, of at most `max_tokens` tokens."""
        largest = settings.max_batch_tokens
        return cls(min(largest, max_tokens or largest), settings.max_prefill_chunk or largest)


class StepSize:
    """Most tokens of a step: fewer for a while after one was too much for the device's memory."""

    def __init__(self) -> None:
        self.max_tokens: int | None = None
        """None while there is no limit but the settings'."""
        self._num_successes = 0

    def halve(self, num_tokens: int) -> bool:
        """Note that a step of `num_tokens` tokens was too much; return whether a smaller one can be tried."""
        if num_tokens <= 1:
            return False
        self.max_tokens = num_tokens // 2
        self._num_successes = 0
        return True

    def succeed(self, settings: EngineSettings) -> None:
        """Note a step that fitted: every few of them the next may be an eighth larger."""
        if self.max_tokens is None:
            return
        self._num_successes += 1
        if self._num_successes % STEPS_UNTIL_RECOVERY == 0:
            self.max_tokens += max(1, self.max_tokens // 8)
            if self.max_tokens >= settings.max_batch_tokens:
                self.max_tokens = None


@dataclass(frozen=True, slots=True)
class WatermarkAdmission:
    """Admit a waiting request only if so many blocks stay free for those that run already.

    Without it a full pool admits a request, preempts it for a running one's next block, and admits it again.
    """

    watermark_blocks: int

    def blocks_available(self, num_free: int, *, is_idle: bool) -> int:
        """Return how many blocks a waiting request may take. An idle engine holds nothing back for others."""
        return num_free if is_idle else max(0, num_free - self.watermark_blocks)


def most_blocks(settings: EngineSettings, num_prompt_tokens: int, max_tokens: int, num_sequences: int) -> int:
    """Return the most blocks that a request can ever hold at once, over all KV groups.

    In groups with a window its sequences are counted as if they had nothing in common: so admission does, when it
    resumes them, and whoever was accepted must be admitted one day.
    """
    size, max_chunk = settings.block_size, settings.max_chunk
    each = -(-(num_prompt_tokens + max_tokens - 1) // size)
    return sum(
        worst_case_blocks(num_prompt_tokens, max_tokens, num_sequences, size)
        if window is None
        else num_sequences * min(each, most_window_blocks(window, max_chunk, size))
        for window in settings.windows
    )


def worst_case_blocks(num_prompt_tokens: int, max_tokens: int, num_sequences: int, block_size: int) -> int:
    """Return the most blocks that a request can ever hold at once in a KV group with full attention.

    Its sequences, beams or not, share the full blocks of the prompt; the rest each holds alone, of beams at worst. The
    newest token of a sequence is not stored, since nothing follows it that could look back at it. Before the last owner
    writes to a shared partial block, the copy and its source exist together, which this counts already: one partial
    block for each sequence.
    """
    full_prompt_blocks = num_prompt_tokens // block_size
    blocks_each = -(-(num_prompt_tokens + max_tokens - 1) // block_size)
    return full_prompt_blocks + num_sequences * (blocks_each - full_prompt_blocks)
