"""What follows a decoder's last layer on a CPU, as one call: the last norm, the logits and the most likely tokens."""

import numpy as np
import torch
from torch import Tensor

from kvwatch_kernels.cpu.gather import GATHER_FAULT, GATHER_INDICES, gather_call
from kvwatch_kernels.cpu.largest import LARGEST_WIDTH_LIMIT, largest_call
from kvwatch_kernels.cpu.linear import PackedWeight, linear_call
from kvwatch_kernels.cpu.linear_body import NUM_ROWS as LINEAR_NUM_ROWS
from kvwatch_kernels.cpu.linear_product import MAX_ROWS, PANEL
from kvwatch_kernels.cpu.program import Program
from kvwatch_kernels.cpu.rms_norm import rms_norm_call
from kvwatch_kernels.cpu.rows import AWAKE_ELEMENTS_PER_ITEM, NUM_ROWS
from kvwatch_kernels.cpu.vectors import LANES
from kvwatch_kernels.dims import Int64Array

_GATHER_HIDDEN, _GATHER_ADDED, _NORM, _PRODUCT, _SEARCH = range(5)
_COUNT_FIELDS = {
    _GATHER_HIDDEN: NUM_ROWS,
    _GATHER_ADDED: NUM_ROWS,
    _NORM: NUM_ROWS,
    _PRODUCT: LINEAR_NUM_ROWS,
    _SEARCH: NUM_ROWS,
}


def can_run_output(packed: PackedWeight) -> bool:
    """Whether `OutputProgram` computes the logits of a layer."""
    return packed.out_features <= LARGEST_WIDTH_LIMIT


class OutputProgram:
    """Logits of some of a step's tokens, for up to `max_rows` of them. One run at a time.

    Results stay where they are until the next run.
    """

    def __init__(
        self, hidden: Tensor, added: Tensor, norm_weight: Tensor, eps: float, packed: PackedWeight, max_rows: int
    ) -> None:
        """Lay out the calls.

        Args:
            hidden: T[max_tokens, hidden_size], see `ForwardProgram`; stays where it is. Never written.
            added: likewise.
            norm_weight: T[hidden_size], of the last norm.
            eps: of it.
            packed: the layer that gives logits; `can_run_output` holds.
            max_rows: most rows of a run.
        """
        dtype, width = hidden.dtype, hidden.shape[1]
        self.max_rows = max_rows
        self.num_threads = torch.get_num_threads()
        """Threads that it was laid out for: a run with more has no room."""
        self._picked, self._added = (torch.empty((max_rows, width), dtype=dtype) for _ in range(2))
        self._normed = torch.empty((max_rows, width), dtype=dtype)
        self._scratch = torch.empty((self.num_threads, MAX_ROWS + packed.in_features, PANEL), dtype=torch.float32)
        self._lanes = torch.empty((max_rows, 2 * LANES), dtype=torch.float32)
        self.logits = torch.empty((max_rows, packed.out_features), dtype=dtype)
        """T[max_rows, vocab_size]"""
        self.best = np.zeros(max_rows, dtype=np.int64)
        """i64[max_rows]: the most likely token of each row, of equals the first."""
        self.are_finite = np.zeros(max_rows, dtype=np.int64)
        """i64[max_rows]: 1 where all logits of a row are finite numbers; `best` means nothing where it is 0."""
        # What the calls point to.
        self._kept = (hidden, added, norm_weight, packed)
        calls = {
            _GATHER_HIDDEN: gather_call(hidden, self._picked),
            _GATHER_ADDED: gather_call(added, self._added),
            _NORM: rms_norm_call(self._picked, norm_weight, eps, self._added, self._normed, AWAKE_ELEMENTS_PER_ITEM),
            _PRODUCT: linear_call(self._normed, width, packed, self.logits, max_rows, self._scratch),
            _SEARCH: largest_call(self.logits, self.best, self.are_finite, self._lanes),
        }
        self._program = Program([calls[index] for index in range(len(calls))], [0] * len(calls))
        self._counts = np.array(
            [self._program.rows([call], field + 1)[0, field] for call, field in _COUNT_FIELDS.items()]
        )
        self._indices = self._program.rows([_GATHER_HIDDEN, _GATHER_ADDED], GATHER_INDICES + 1)[:, GATHER_INDICES]
        self._fault = int(self._program.rows([_GATHER_HIDDEN], GATHER_FAULT + 1)[0, GATHER_FAULT])

    def run(self, rows: Int64Array) -> None:
        """Compute the logits of some rows of `hidden` plus `added`.

        Args:
            rows: i64[1 to max_rows], contiguous, numbers of rows.
        """
        assert len(rows) <= self.max_rows, "more rows than the buffers hold"
        assert torch.get_num_threads() <= self.num_threads, "more threads than there is scratch for"
        program = self._program
        program.begin()
        program.params[self._counts] = len(rows)
        program.params[self._indices] = rows.ctypes.data
        program.run()
        assert not program.params[self._fault], "a row that the step does not have"
