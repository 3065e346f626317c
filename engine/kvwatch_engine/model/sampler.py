"""Chooses tokens from logits, row by row of a step.

Greedy rows whose logits nothing changes take one pass over all of them together. Every other row is computed on its
own, which costs little beside a forward pass and makes its token independent of the rest of the batch, bit by bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kvwatch_engine.contracts.errors import GuideFailed
from kvwatch_engine.contracts.request import PositionLogprobs
from kvwatch_engine.contracts.step import Candidates, SampleRow
from kvwatch_engine.model.candidates import best_candidates
from kvwatch_engine.model.drawing import draw, uniform
from kvwatch_engine.model.logit_changes import FloatArray, changed_logits
from kvwatch_engine.model.logprobs import position_logprobs

NO_TOKEN = -1
"""Stands in `Samples.token_ids` for a row that has an error."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Chosen tokens, row by row; the fields of `StepResult`."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs | None] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    candidates: dict[int, Candidates] = field(default_factory=dict)


def sample(logits: torch.Tensor, rows: Sequence[SampleRow], logits_rows: Sequence[int]) -> Samples:
    """Choose one token for each row.

    A row whose logits are not numbers, or which forbids every token, gets an error; the others are not affected.

    Args:
        logits: f32[num_logits, vocab_size], CPU, contiguous. Never written.
        rows: how to choose; see `SamplingParams` for the order of application.
        logits_rows: of each row, which logits it chooses from; several may share them (`n` > 1).
    """
    if not rows:
        return Samples()
    values: FloatArray = logits.numpy()
    # NumPy's argmax takes the first of equals and finds NaN, and is several times faster than torch's on the CPU.
    best = values.argmax(axis=1)
    largest, smallest = values[np.arange(len(values)), best], values.min(axis=1)
    is_finite = np.isfinite(largest) & np.isfinite(smallest)
    samples = Samples()
    for index, (row, source) in enumerate(zip(rows, logits_rows, strict=True)):
        if not is_finite[source]:
            token_id, error = NO_TOKEN, "the model's logits are not finite numbers"
        else:
            token_id, error = _try(values[source], int(best[source]), row, index, samples)
        samples.token_ids.append(token_id)
        wanted = row.params.logprobs
        if error:
            samples.errors[index] = error
        if error or wanted is None or row.num_candidates:
            samples.logprobs.append(None)
        else:
            samples.logprobs.append(position_logprobs(values[source], [token_id], wanted)[0])
    return samples


def _try(logits: FloatArray, best: int, row: SampleRow, index: int, samples: Samples) -> tuple[int, str]:
    """Return the token of one row, or `NO_TOKEN` and why there is none."""
    try:
        token_id = _continue(logits, best, row, index, samples)
    except GuideFailed as error:
        return NO_TOKEN, str(error)
    return token_id, "" if token_id != NO_TOKEN else "every token of the vocabulary is forbidden"


def _continue(logits: FloatArray, best: int, row: SampleRow, index: int, samples: Samples) -> int:
    """Return the token of one row; of a beam note all its candidates, and return the best."""
    if not row.num_candidates:
        return _choose(logits, best, row)
    candidates = best_candidates(logits, row)
    if candidates is None:
        return NO_TOKEN
    samples.candidates[index] = candidates
    return candidates.token_ids[0]


def _choose(logits: FloatArray, best: int, row: SampleRow) -> int:
    """Return the token of one row.

    Args:
        logits: f32[vocab_size], all finite.
        best: the most likely token.
        row: how to choose.

    Returns:
        A token id, or `NO_TOKEN` if none may be chosen.
    """
    changed = changed_logits(logits, row)
    if changed is not logits:
        best = int(changed.argmax())
        if not np.isfinite(changed[best]):
            return NO_TOKEN
    if row.params.is_greedy:
        return best
    return draw(changed, row.params, uniform(row.seed, row.position))
