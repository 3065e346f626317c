"""What a query may not see has no effect on it; what it sees and is NaN shows. The attention kernel in Triton.

Runs in Triton's interpreter (see conftest.py).
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from kernel_batches import DenseSequence, dense_sequence, paged_batch
from triton_cases import QUANTISED, attend_by_reference, attend_in_triton, relative_error

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")  # NumPy's, about NaN

NAN = float("nan")


@pytest.mark.parametrize("fill", [NAN, float("inf"), -float("inf"), 3e38, 0.0])
@pytest.mark.parametrize("is_split", [False, True])
def test_recycled_slots_have_no_effect(fill: float, is_split: bool) -> None:
    sequences = [dense_sequence(queries, context) for queries, context in ((1, 3), (6, 130), (40, 41))]

    out = attend_in_triton(paged_batch(sequences, fill=fill), is_split=is_split)

    assert torch.equal(out, attend_in_triton(paged_batch(sequences, fill=1.0), is_split=is_split))
    assert out.isfinite().all()


@pytest.mark.parametrize("broken", [NAN, float("inf"), -float("inf")])
@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("group", [1, 3])
def test_a_later_token_of_the_same_chunk_has_no_effect_on_an_earlier_query(
    group: int, side: str, broken: float
) -> None:
    clean = dense_sequence(20, 90, heads=(2 * group, 2))
    keys, values = clean.keys.clone(), clean.values.clone()
    (keys if side == "keys" else values)[80] = broken

    out = attend_in_triton(paged_batch([DenseSequence(clean.query, keys, values)]))

    # Queries are positions 70 to 89.
    assert torch.equal(out[:10], attend_in_triton(paged_batch([clean]))[:10])
    if side == "values" or broken != broken:
        assert not out[10:].isfinite().any()


@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("is_split", [False, True])
def test_a_token_that_left_the_window_has_no_effect(side: str, is_split: bool) -> None:
    clean = dense_sequence(20, 90)
    keys, values = clean.keys.clone(), clean.values.clone()
    (keys if side == "keys" else values)[60] = NAN

    out = attend_in_triton(paged_batch([DenseSequence(clean.query, keys, values)]), 20, is_split=is_split)

    # Queries are positions 70 to 89; the one at 80 is the first that does not see position 60.
    assert torch.equal(out[10:], attend_in_triton(paged_batch([clean]), 20, is_split=is_split)[10:])
    assert out[:10].isnan().all()


@pytest.mark.parametrize("stored", QUANTISED, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("side", ["key_scales", "value_scales"])
def test_a_scale_of_nan_reaches_the_queries_that_see_its_token_and_no_others(
    side: str, dtype: torch.dtype, stored: torch.dtype
) -> None:
    batch = paged_batch([dense_sequence(20, 90, dtype=dtype)]).quantised(stored)
    clean = attend_in_triton(batch)
    scales = {"key_scales": batch.key_scales, "value_scales": batch.value_scales}[side]
    assert scales is not None
    scales[batch.block_tables[0, 80 // 16], 0, 80 % 16] = NAN

    out = attend_in_triton(batch)

    assert torch.equal(out[:10], clean[:10])
    assert out[10:, :2].isnan().all()
    assert torch.equal(out[10:, 2:], clean[10:, 2:])


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("position", [3, 17, 299])
def test_a_visible_nan_reaches_the_output(position: int, side: str, is_split: bool) -> None:
    """Whoever samples must be able to tell that the numbers are broken."""
    sequence = dense_sequence(1, 300)
    getattr(sequence, side)[position, 0] = NAN

    out = attend_in_triton(paged_batch([sequence]), is_split=is_split)

    assert out[0, :2].isnan().all()
    assert out[0, 2:].isfinite().all()


@pytest.mark.parametrize("context", [120, 700])
def test_blocks_that_left_the_window_may_be_nulled(context: int) -> None:
    batch = paged_batch([dense_sequence(4, context)])
    tables = batch.block_tables.copy()
    tables[0, : (context - 4 - 50 + 1) // 16] = 0

    out = attend_in_triton(replace(batch, block_tables=tables), 50)

    assert (tables != batch.block_tables).any()
    assert relative_error(out, attend_by_reference(batch, 50)) <= 1e-5


def test_table_entries_behind_the_context_are_not_read() -> None:
    batch = paged_batch([dense_sequence(1, 20), dense_sequence(6, 100)])
    tables = batch.block_tables.copy()
    tables[0, 2:] = np.iinfo(np.int32).max
    tables = np.concatenate((tables, np.full((2, 3), np.iinfo(np.int32).max, dtype=np.int32)), axis=1)

    out = attend_in_triton(replace(batch, block_tables=tables))

    assert torch.equal(out, attend_in_triton(batch))


def test_sequences_may_share_blocks() -> None:
    shared = dense_sequence(1, 64)
    batch = paged_batch([shared, DenseSequence(shared.query * 2, shared.keys, shared.values)])
    tables = batch.block_tables.copy()
    tables[1] = tables[0]

    out = attend_in_triton(replace(batch, block_tables=tables))

    assert torch.equal(out, attend_in_triton(batch))
