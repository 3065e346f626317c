"""Log-probabilities of the model itself, before penalties, temperature and filters."""

import numpy as np

from kvwatch_engine.contracts.request import PositionLogprobs, TokenLogprob
from kvwatch_engine.model.logit_changes import FloatArray


def position_logprobs(logits: FloatArray, chosen: int, num_top: int) -> PositionLogprobs:
    """Return the log-probability of the chosen token and of the most likely ones.

    Args:
        logits: f32[vocab_size], as the model gave them.
        chosen: token id.
        num_top: how many of the most likely tokens to add; equal ones in the order of their ids.
    """
    largest = float(logits.max())
    normaliser = largest + float(np.log(np.exp(logits - np.float32(largest)).sum(dtype=np.float64)))

    def of(token_id: int) -> TokenLogprob:
        return TokenLogprob(token_id, float(logits[token_id]) - normaliser)

    return PositionLogprobs(of(chosen), tuple(of(token_id) for token_id in _top(logits, num_top)))


def _top(logits: FloatArray, count: int) -> list[int]:
    """Return the ids of the `count` largest logits, largest first."""
    if count == 0:
        return []
    count = min(count, len(logits))
    border = np.partition(logits, len(logits) - count)[len(logits) - count]
    candidates = np.flatnonzero(logits >= border)
    order = np.argsort(-logits[candidates], kind="stable")
    return [int(token_id) for token_id in candidates[order][:count]]
