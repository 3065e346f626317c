"""The logits that a step samples from, and what all rows want to know of them."""

from typing import Self

import numpy as np
import torch

from kvwatch_engine.contracts.step import Int64Array
from kvwatch_engine.model.logit_changes import FloatArray


class StepLogits:
    """Logits by row, as the model computed them; a row becomes float32 only if somebody looks at it.

    Most rows of most steps are greedy and of these only the most likely token is wanted.
    """

    __slots__ = ("_values", "are_finite", "best")

    def __init__(self, values: torch.Tensor, best: Int64Array, are_finite: Int64Array) -> None:
        """Take over what is known.

        Args:
            values: `T[num_rows, vocab_size]`, CPU, float32 or bfloat16. Never written.
            best: i64[num_rows], the most likely token of each row, of equals the first.
            are_finite: i64[num_rows], not 0 where all of a row are finite numbers; elsewhere `best` means nothing.
        """
        self._values = values
        self.best: list[int] = best.tolist()
        """The most likely token of each row, of equals the first; means nothing where not all are finite."""
        self.are_finite: list[bool] = (are_finite != 0).tolist()
        """Whether all logits of each row are finite numbers."""

    @classmethod
    def of(cls, logits: torch.Tensor) -> Self:
        """Look through f32[num_rows, vocab_size], CPU, contiguous; never written."""
        values: FloatArray = logits.numpy()
        # NumPy's argmax takes the first of equals and finds NaN, and is several times faster than torch's on the CPU.
        best = values.argmax(axis=1)
        largest, smallest = values[np.arange(len(values)), best], values.min(axis=1)
        return cls(logits, best, (np.isfinite(largest) & np.isfinite(smallest)).astype(np.int64))

    def row(self, index: int) -> FloatArray:
        """Return f32[vocab_size], the logits of a row; never to be written."""
        values: FloatArray = self._values[index].float().numpy()
        return values
