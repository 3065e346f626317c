"""Draws one token from logits: temperature, top_k, top_p, min_p.

A draw is the inverse of the cumulative distribution over the tokens in order of falling probability (ties by token
id). Numerical noise of the logits therefore moves the borders between tokens a little, instead of choosing any other
token; and the uniform number depends on (seed, position) only, so that the rest of the batch, chunking and preemption
never change a text.

Nearly all of the probability lies in few tokens, so only those within a window below the best logit are sorted, and
the window is widened in the rare case that this does not settle the draw. The result is that of a full sort.
"""

import hashlib
import math
import struct

import numpy as np
import numpy.typing as npt

from kvwatch_engine.contracts.sampling import SamplingParams
from kvwatch_engine.model.logit_changes import FloatArray

_WINDOWS = (8.0, 16.0, math.inf)
"""Distances below the best scaled logit within which tokens are sorted."""

_SMALLEST_TEMPERATURE = 1e-30
"""float32 would round a smaller one to zero; it is greedy already: a difference of 1e-7 becomes e^-1e23."""


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) that depends on nothing but its arguments (53 random bits).

    Args:
        seed: of the sequence; its lowest 64 bits count.
        position: number of tokens generated so far.
    """
    key = struct.pack("<QQ", seed & 0xFFFF_FFFF_FFFF_FFFF, position)
    bits = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
    return (bits >> 11) * 2.0**-53


def draw(logits: FloatArray, params: SamplingParams, number: float) -> int:
    """Return the token that a uniform number falls on.

    Args:
        logits: f32[vocab_size], all penalties applied; the largest is finite.
        params: temperature above 0, top_k, top_p, min_p.
        number: in [0, 1), see `uniform`.
    """
    temperature = np.float32(max(params.temperature, _SMALLEST_TEMPERATURE))
    with np.errstate(over="ignore"):  # far below the best token the quotient may become -inf: probability 0
        scaled = (logits - logits.max()) / temperature
    weights = np.exp(scaled)
    total = float(weights.sum(dtype=np.float64))
    for window in _WINDOWS:
        # Sorted by the logits themselves: subtracting and dividing may have made neighbours equal.
        token_ids = _most_likely_first(logits, np.flatnonzero(scaled >= -window))
        is_whole = len(token_ids) == len(logits)
        token_id = _draw_among(token_ids, weights[token_ids], None if is_whole else total, params, number)
        if token_id is not None:
            return token_id
    raise AssertionError("the last window holds every token")


def _most_likely_first(logits: FloatArray, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return token ids sorted by falling logit, equal ones by rising id.

    Each (logit, id) becomes one integer, since sorting integers is some ten times faster than a stable argsort: the
    bits of a float, those of negative ones flipped, rise with its value.
    """
    bits = (0 - logits[token_ids]).view(np.int32)  # subtracted, not negated: there must be only one zero
    keys = (bits ^ ((bits >> 31) & 0x7FFF_FFFF)).astype(np.int64) << 32 | token_ids
    keys.sort()
    return keys & 0xFFFF_FFFF


def _draw_among(
    token_ids: npt.NDArray[np.int64],
    weights: FloatArray,
    total: float | None,
    params: SamplingParams,
    number: float,
) -> int | None:
    """Draw among the most likely tokens if they settle it; none if more tokens have to be looked at.

    Args:
        token_ids: i64[num_tokens], most likely first.
        weights: f32[num_tokens], their probabilities up to a common factor.
        total: sum of the weights of the whole vocabulary; none if these tokens are the whole vocabulary.
        params: top_k, top_p, min_p.
        number: in [0, 1).
    """
    if params.top_k:
        if len(token_ids) < params.top_k and total is not None:
            return None
        token_ids, weights, total = token_ids[: params.top_k], weights[: params.top_k], None
    cumulative = np.cumsum(weights, dtype=np.float64)
    kept = _num_kept(weights, cumulative, float(cumulative[-1]) if total is None else total, params)
    if kept < len(token_ids) or total is None:
        return _at(token_ids, cumulative[:kept], number * float(cumulative[kept - 1]))
    # No border of a filter was met, so it lies beyond these tokens. Without filters the draw itself may be among them.
    if params.top_p >= 1 and params.min_p == 0 and number * total < cumulative[-1]:
        return _at(token_ids, cumulative, number * total)
    return None


def _num_kept(weights: FloatArray, cumulative: npt.NDArray[np.float64], total: float, params: SamplingParams) -> int:
    """Return how many of the sorted tokens top_p and min_p keep, at least 1; all of them if the border lies beyond."""
    kept = len(weights)
    if params.top_p < 1:
        # The first token at which the sum reaches top_p is still kept.
        kept = min(kept, int(np.searchsorted(cumulative, params.top_p * total, side="left")) + 1)
    if params.min_p > 0:
        kept = min(kept, int(np.searchsorted(-weights, -params.min_p * weights[0], side="right")))
    return max(kept, 1)


def _at(token_ids: npt.NDArray[np.int64], cumulative: npt.NDArray[np.float64], target: float) -> int:
    """Return the token in whose share of the cumulative weight the target falls."""
    index = int(np.searchsorted(cumulative, target, side="right"))
    return int(token_ids[min(index, len(cumulative) - 1)])
