"""The search for each row's largest element against NumPy's."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvwatch_kernels.cpu.largest import largest_call
from kvwatch_kernels.cpu.vectors import LANES


def search(rows: torch.Tensor) -> tuple[list[int], list[int]]:
    """Places and whether all is finite, of each row."""
    places, are_finite = np.full(len(rows), -1), np.full(len(rows), -1)
    scratch = torch.empty((len(rows), 2 * LANES))
    largest_call(rows, places, are_finite, scratch).run()
    return places.tolist(), are_finite.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@given(
    # Few different numbers: ties are what is hard.
    values=st.lists(st.sampled_from([-3.0, -0.0, 0.0, 1.5, 2.0, 3e38, -3e38, 1e-40]), min_size=1, max_size=90),
    num_rows=st.integers(1, 3),
)
def test_the_first_of_the_largest_is_found(dtype: torch.dtype, values: list[float], num_rows: int) -> None:
    rows = torch.tensor([values[row:] + values[:row] for row in range(num_rows)]).to(dtype)
    places, are_finite = search(rows)
    assert places == rows.float().numpy().argmax(axis=1).tolist()
    assert are_finite == [1] * num_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@given(width=st.integers(1, 70), data=st.data())
def test_what_is_not_finite_is_told_wherever_it_is(
    dtype: torch.dtype, bad: float, width: int, data: st.DataObject
) -> None:
    rows = torch.zeros((2, width), dtype=dtype)
    rows[1, data.draw(st.integers(0, width - 1))] = bad
    assert search(rows)[1] == [1, 0]


def test_many_rows_of_a_vocabulary_are_searched_by_all_threads() -> None:
    rows = torch.randn((37, 49_152), generator=torch.Generator().manual_seed(3)).bfloat16()
    places, are_finite = search(rows)
    assert places == rows.float().numpy().argmax(axis=1).tolist()
    assert are_finite == [1] * 37
