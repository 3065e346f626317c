"""Chooses tokens from logits, row by row of a step.

Greedy rows whose logits nothing changes take what was found for all rows together. Every other row is computed on its
own, which costs little beside a forward pass and makes its token independent of the rest of the batch, bit by bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvwatch_engine.contracts.errors import GuideFailed
from kvwatch_engine.contracts.request import PositionLogprobs
from kvwatch_engine.contracts.step import Candidates, SampleRow
from kvwatch_engine.model.candidates import best_candidates
from kvwatch_engine.model.drawing import draw, uniform
from kvwatch_engine.model.logit_changes import FloatArray, changed_logits, changes_logits
from kvwatch_engine.model.logprobs import position_logprobs
from kvwatch_engine.model.step_logits import StepLogits

NO_TOKEN = -1
"""Stands in `Samples.token_ids` for a row that has an error."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Chosen tokens, row by row; the fields of `StepResult`."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs | None] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    candidates: dict[int, Candidates] = field(default_factory=dict)


def sample(logits: StepLogits, rows: Sequence[SampleRow], logits_rows: Sequence[int]) -> Samples:
    """Choose one token for each row.

    A row whose logits are not numbers, or which forbids every token, gets an error; the others are not affected.

    Args:
        logits: of the step.
        rows: how to choose; see `SamplingParams` for the order of application.
        logits_rows: of each row, which logits it chooses from; several may share them (`n` > 1).
    """
    samples = Samples()
    for index, (row, source) in enumerate(zip(rows, logits_rows, strict=True)):
        if not logits.are_finite[source]:
            token_id, error = NO_TOKEN, "the model's logits are not finite numbers"
        elif _takes_the_best(row):
            token_id, error = logits.best[source], ""
        else:
            token_id, error = _try(logits.row(source), logits.best[source], row, index, samples)
        samples.token_ids.append(token_id)
        wanted = row.params.logprobs
        if error:
            samples.errors[index] = error
        if error or wanted is None or row.num_candidates:
            samples.logprobs.append(None)
        else:
            samples.logprobs.append(position_logprobs(logits.row(source), [token_id], wanted)[0])
    return samples


def _takes_the_best(row: SampleRow) -> bool:
    """Whether a row's token is the most likely one, whatever the logits are."""
    return row.params.is_greedy and not row.num_candidates and not changes_logits(row)


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
