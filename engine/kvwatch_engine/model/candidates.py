"""The most likely continuations of one beam, row by row. Knows nothing of the other beams."""

import numpy as np

from kvwatch_engine.contracts.step import Candidates, SampleRow
from kvwatch_engine.model.logit_changes import FloatArray, changed_logits
from kvwatch_engine.model.logprobs import log_normaliser, most_likely, position_logprobs


def best_candidates(logits: FloatArray, row: SampleRow) -> Candidates | None:
    """Return the most likely continuations.

    Penalties, bias and forbidden tokens change log-probabilities here, not logits, as transformers does it for beams:
    what they leave does not sum to one.

    Args:
        logits: f32[vocab_size], all finite. Never written.
        row: how many candidates it wants, and what changes their scores.

    Returns:
        At most `row.num_candidates`, of equal ones those of lower ids; None if every token is forbidden.
    """
    log_probs = logits - np.float32(log_normaliser(logits))
    changed = changed_logits(log_probs, row)
    token_ids = [token_id for token_id in most_likely(changed, row.num_candidates) if np.isfinite(changed[token_id])]
    if not token_ids:
        return None
    num_top = row.params.logprobs
    logprobs = None if num_top is None else position_logprobs(logits, token_ids, num_top)
    return Candidates(token_ids, [float(changed[token_id]) for token_id in token_ids], logprobs)
