"""Small decisions of the scheduler, each readable alone. Pure: they look, and decide; others act."""

from collections.abc import Sequence as ReadOnlySequence
from dataclasses import dataclass

from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.scheduling.request import Request, Sequence


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
    def for_step(cls, settings: EngineSettings) -> "TokenBudget":
        """Return the budget of a fresh step."""
        return cls(settings.max_batch_tokens, settings.max_prefill_chunk or settings.max_batch_tokens)


@dataclass(frozen=True, slots=True)
class WatermarkAdmission:
    """Admit a waiting request only if so many blocks stay free for those that run already.

    Without it a full pool admits a request, preempts it for a running one's next block, and admits it again.
    """

    watermark_blocks: int

    def blocks_available(self, num_free: int, *, is_idle: bool) -> int:
        """Return how many blocks a waiting request may take. An idle engine holds nothing back for others."""
        return num_free if is_idle else max(0, num_free - self.watermark_blocks)


def newest_first_victim(running: ReadOnlySequence[Request]) -> Request:
    """Return the running request that must yield its blocks: the last to arrive, which has lost the least turn."""
    return max(running, key=lambda request: request.arrival)


def worst_case_blocks(num_prompt_tokens: int, max_tokens: int, n: int, block_size: int) -> int:
    """Return the most blocks that a request can ever hold at once.

    Its sequences share the full blocks of the prompt; the rest each holds alone. The newest token of a sequence is not
    stored, since nothing follows it that could look back at it. Before the last owner writes to a shared partial block,
    the copy and its source exist together, which this counts already: n partial blocks for n sequences.
    """
    full_prompt_blocks = num_prompt_tokens // block_size
    blocks_each = -(-(num_prompt_tokens + max_tokens - 1) // block_size)
    return full_prompt_blocks + n * (blocks_each - full_prompt_blocks)
