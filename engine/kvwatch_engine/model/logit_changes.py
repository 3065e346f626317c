"""What a request changes on the logits before anything is drawn: penalties, bias, forbidden tokens, a grammar."""

import numpy as np
import numpy.typing as npt

from kvwatch_engine.contracts.sampling import SamplingParams
from kvwatch_engine.contracts.step import SampleRow

FloatArray = npt.NDArray[np.float32]


def changes_logits(row: SampleRow) -> bool:
    """Whether a row's token is chosen from other logits than the model's."""
    params = row.params
    return bool(params.has_penalties or params.logit_bias or row.forbidden_token_ids or row.guide is not None)


def changed_logits(logits: FloatArray, row: SampleRow) -> FloatArray:
    """Return the logits that a row's token is chosen from.

    Args:
        logits: f32[vocab_size]. The model's; never written.
        row: whose penalties, bias, forbidden tokens and guide to apply, in this order.

    Returns:
        f32[vocab_size]: the same array if nothing changes, else a copy.

    Raises:
        GuideFailed: its guide cannot say what is allowed.
    """
    if not changes_logits(row):
        return logits
    params = row.params
    changed = logits.copy()
    if params.has_penalties:
        _penalise(changed, params, row)
    for token_id, bias in params.logit_bias:
        if 0 <= token_id < len(changed):
            changed[token_id] += bias
    # A caller may forbid a stop token that this model does not have.
    changed[[t for t in row.forbidden_token_ids if 0 <= t < len(changed)]] = -np.inf
    if row.guide is not None:
        np.copyto(changed, -np.inf, where=~row.guide.allowed())
    return changed


def _penalise(logits: FloatArray, params: SamplingParams, row: SampleRow) -> None:
    """Lower the logits of tokens seen before, in place."""
    generated = np.asarray(row.output_token_ids[: row.position], dtype=np.int64)
    if params.repetition_penalty != 1:
        prompt = np.asarray(row.prompt_token_ids, dtype=np.int64)
        seen = np.unique(np.concatenate([prompt, generated]))
        values = logits[seen]
        penalty = np.float32(params.repetition_penalty)
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    if params.presence_penalty != 0 or params.frequency_penalty != 0:
        tokens, counts = np.unique(generated, return_counts=True)
        penalties = params.presence_penalty + params.frequency_penalty * counts
        logits[tokens] -= penalties.astype(np.float32)
