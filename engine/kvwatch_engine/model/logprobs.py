"""Log-probabilities of the model itself, before penalties, temperature and filters."""

from collections.abc import Sequence

import numpy as np

from kvwatch_engine.contracts.request import PositionLogprobs, TokenLogprob
from kvwatch_engine.model.logit_changes import FloatArray


def log_normaliser(logits: FloatArray) -> float:
    """Return what is subtracted from logits, f32[vocab_size], all finite, to make them log-probabilities."""
    largest = float(logits.max())
    return largest + float(np.log(np.exp(logits - np.float32(largest)).sum(dtype=np.float64)))


def position_logprobs(logits: FloatArray, choices: Sequence[int], num_top: int) -> list[PositionLogprobs]:
    """Return the log-probability of each token that may be chosen at a position, with those of the most likely ones.

    Args:
        logits: f32[vocab_size], as the model gave them.
        choices: token ids.
        num_top: how many of the most likely tokens to add; equal ones in the order of their ids.
    """
    normaliser = log_normaliser(logits)

    def of(token_id: int) -> TokenLogprob:
        return TokenLogprob(token_id, float(logits[token_id]) - normaliser)

    top = tuple(of(token_id) for token_id in most_likely(logits, num_top))
    return [PositionLogprobs(of(token_id), top) for token_id in choices]


def most_likely(logits: FloatArray, count: int) -> list[int]:
    """Return the ids of the `count` largest logits, largest first; equal ones in the order of their ids."""
    if count == 0:
        return []
    count = min(count, len(logits))
    border = np.partition(logits, len(logits) - count)[len(logits) - count]
    candidates = np.flatnonzero(logits >= border)
    order = np.argsort(-logits[candidates], kind="stable")
    return [int(token_id) for token_id in candidates[order][:count]]
