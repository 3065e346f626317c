"""Who gets a draft in a step, and how long it is. Knows nothing of what becomes of it.

Drafts are guests: they take what the step's budget and the pool have left when everybody else was served. There are
none for beams, whose next tokens are not one choice, for sequences that keep to a grammar, and for prompts with images.
"""

from dataclasses import replace

from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.memory.block_manager import BlockManager
from kvwatch_engine.scheduling.lifecycle import Lifecycle
from kvwatch_engine.scheduling.policy import TokenBudget
from kvwatch_engine.scheduling.prompt_lookup import TokenHistory, find_draft
from kvwatch_engine.scheduling.request import Sequence
from kvwatch_engine.scheduling.step_builder import Chunk


class Drafting:
    """Adds drafts to steps. Engine thread only."""

    def __init__(self, settings: EngineSettings, manager: BlockManager, lifecycle: Lifecycle) -> None:
        self.settings = settings
        self._manager = manager
        self._lifecycle = lifecycle

    def add_drafts(self, chunks: dict[Sequence, Chunk], budget: TokenBudget, *, can_grow: bool) -> None:
        """Let the decoding sequences of a step verify drafts, as far as budget and blocks go.

        Args:
            chunks: what the step computes; chunks with a draft are replaced.
            budget: what is left of the step.
            can_grow: whether drafts may take blocks; else they fill those that their sequences have.
        """
        for sequence, chunk in chunks.items():
            if budget.remaining <= 0:
                return
            if not sequence.is_decoding or not _may_speculate(sequence):
                continue
            draft = self._find(sequence, self._most(sequence, budget))
            if draft:
                draft = self._with_room(sequence, draft, can_grow=can_grow)
            if draft:
                budget.remaining -= len(draft)
                chunks[sequence] = replace(chunk, draft=draft)

    def _most(self, sequence: Sequence, budget: TokenBudget) -> int:
        """Return how long a draft may be: with the token that follows it, the sequence must not get too long."""
        settings = self.settings
        num_left = min(
            sequence.request.sampling.max_tokens - len(sequence.output_token_ids),
            settings.max_model_len - sequence.num_tokens,
        )
        return min(settings.num_speculative_tokens, num_left - 1, budget.remaining, budget.max_chunk - 1)

    def _find(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
        request, settings = sequence.request, self.settings
        history = sequence.history
        if history is None:
            history = sequence.history = TokenHistory(request.prompt_token_ids)
        history.extend(sequence.output_token_ids[len(history) - request.num_prompt_tokens :])
        draft = find_draft(history.newest(), max_tokens, settings.prompt_lookup_min, settings.prompt_lookup_max)
        ends = request.sampling.end_token_ids(settings.eos_token_ids)
        for place, token in enumerate(draft):
            if token in ends:
                return draft[: place + 1]  # nothing follows it, whatever did before
        return draft

    def _with_room(self, sequence: Sequence, draft: tuple[int, ...], *, can_grow: bool) -> tuple[int, ...]:
        """Make the places behind a sequence writable; return the part of its draft that has one."""
        manager, owner, end = self._manager, sequence.owner, sequence.num_tokens
        needed = manager.num_blocks_to_write(owner, end, end + len(draft))
        if needed:
            available = manager.pool.num_free - self.settings.watermark_blocks if can_grow else 0
            if needed > available or manager.prepare_write(owner, end, end + len(draft), "decode") is None:
                return draft[: -end % manager.block_size]
            self._lifecycle.note_blocks(sequence.request)
        return draft


def _may_speculate(sequence: Sequence) -> bool:
    request = sequence.request
    return request.search is None and sequence.guide is None and not request.images
