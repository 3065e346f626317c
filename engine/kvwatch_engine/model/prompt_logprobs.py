"""Log-probabilities of the tokens of prompts, from the hidden states of a step. Knows neither requests nor chunks.

The logits of a long prompt would take gigabytes, so they are made and given up slice by slice. Only what is told of
them leaves the device.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from kvwatch_engine.contracts.model import ModelInfo
from kvwatch_engine.contracts.request import PromptLogprobs
from kvwatch_engine.contracts.step import Int64Array, ScoredSpan
from kvwatch_engine.model.causal_model import CausalModel
from kvwatch_engine.model.logprobs import most_likely

NEVER: Final = -1e30
"""Logit of a token that is never chosen; a finite number, as all logits of a sound model."""

_SLICE_BYTES: Final = 64 << 20
"""Most memory of logits that exist at once."""


class PromptScorer:
    """Tells how likely the tokens of prompts are. Engine thread only; keeps nothing from step to step."""

    def __init__(self, decoder: CausalModel, model: ModelInfo, *, slice_bytes: int = _SLICE_BYTES) -> None:
        """Score with a decoder's logits, of which at most `slice_bytes` bytes exist at once."""
        self._decoder = decoder
        self._num_rows = max(1, slice_bytes // (4 * model.vocab_size))
        self._never = None if model.images is None else model.images.placeholder_id

    def score(self, hidden: torch.Tensor, spans: Sequence[ScoredSpan]) -> tuple[PromptLogprobs, ...]:
        """Return the log-probabilities of each span's tokens.

        Args:
            hidden: `dtype[num_tokens, hidden_size]`, of all tokens of the step.
            spans: tokens of prompts, at least one.
        """
        rows = np.concatenate([np.arange(span.start, span.start + len(span.token_ids)) for span in spans])
        token_ids = np.concatenate([np.array(span.token_ids, dtype=np.int64) for span in spans])
        whole = _empty(token_ids, max(span.num_top for span in spans))
        for start in range(0, len(rows), self._num_rows):
            end = min(start + self._num_rows, len(rows))
            _fill(_part(whole, start, end), self._logits(hidden[torch.tensor(rows[start:end], device=hidden.device)]))
        ends = np.cumsum([len(span.token_ids) for span in spans]).tolist()
        return tuple(
            _part(whole, end - len(span.token_ids), end, span.num_top) for span, end in zip(spans, ends, strict=True)
        )

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._decoder.logits(hidden)
        if self._never is not None:
            logits[:, self._never] = NEVER
        return logits


def _empty(token_ids: Int64Array, num_top: int) -> PromptLogprobs:
    """Return columns to be filled."""
    count = len(token_ids)
    return PromptLogprobs(
        token_ids=token_ids,
        logprobs=np.empty(count, np.float64),
        ranks=np.empty(count, np.int64),
        top_token_ids=np.empty((count, num_top), np.int64),
        top_logprobs=np.empty((count, num_top), np.float64),
    )


def _part(whole: PromptLogprobs, start: int, end: int, num_top: int | None = None) -> PromptLogprobs:
    """Return some of the tokens, with the first `num_top` of the most likely ones; views of the same arrays."""
    return PromptLogprobs(
        token_ids=whole.token_ids[start:end],
        logprobs=whole.logprobs[start:end],
        ranks=whole.ranks[start:end],
        top_token_ids=whole.top_token_ids[start:end, :num_top],
        top_logprobs=whole.top_logprobs[start:end, :num_top],
    )


def _fill(part: PromptLogprobs, logits: torch.Tensor) -> None:
    """Write what logits, f32[num_tokens, vocab_size] on any device, say of tokens."""
    chosen = logits.gather(1, torch.tensor(part.token_ids, device=logits.device)[:, None])
    largest = logits.amax(1, keepdim=True)
    normalisers = largest[:, 0] + (logits - largest).exp_().sum(1, dtype=torch.float64).log_()
    part.logprobs[:] = (chosen[:, 0] - normalisers).cpu().numpy()
    part.ranks[:] = (logits > chosen).sum(1).cpu().numpy() + 1
    num_top = part.top_token_ids.shape[1]
    if num_top:
        part.top_token_ids[:] = _most_likely(logits, num_top)
        top = torch.tensor(part.top_token_ids, device=logits.device)
        part.top_logprobs[:] = (logits.gather(1, top) - normalisers[:, None]).cpu().numpy()


def _most_likely(logits: torch.Tensor, count: int) -> Int64Array:
    """Return i64[num_tokens, count], the ids of the largest logits; equal ones in the order of their ids."""
    found = logits.topk(min(count, logits.shape[1]))
    values, token_ids = found.values.cpu().numpy(), found.indices.cpu().numpy()
    token_ids = np.take_along_axis(token_ids, np.lexsort((token_ids, -values)), 1)
    # Which of several equal ones come in last is left to chance by the search for the largest.
    is_tied = (logits >= found.values[:, -1:]).sum(1) > found.values.shape[1]
    for row in is_tied.nonzero()[:, 0].tolist():
        token_ids[row] = most_likely(logits[row].cpu().numpy(), count)
    return token_ids
