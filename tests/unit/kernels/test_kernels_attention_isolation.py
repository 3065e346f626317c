"""What a query may not see has no effect on it, whatever is there: 0 * NaN is NaN, so it must never be multiplied."""

import numpy as np
import pytest
import torch
from kernel_batches import DenseSequence, PagedBatch, dense_sequence, naive_attention, paged_batch

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("fill", [float("nan"), float("inf"), -float("inf"), 3e38, 0.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_recycled_slots_have_no_effect(dtype: torch.dtype, fill: float) -> None:
    """The rest of the last block, other blocks and the null block may hold anything (vllm#35138, flash-attn#1745)."""
    sequences = [dense_sequence(queries, context, dtype=dtype) for queries, context in ((1, 3), (6, 130), (40, 41))]

    out = paged_batch(sequences, fill=fill).attend()

    assert torch.equal(out, paged_batch(sequences, fill=1.0).attend())
    assert out.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 3])
def test_a_later_token_of_the_same_chunk_has_no_effect_on_an_earlier_query(group: int, dtype: torch.dtype) -> None:
    clean = dense_sequence(20, 90, heads=(2 * group, 2), dtype=dtype)
    keys, values = clean.keys.clone(), clean.values.clone()
    keys[80], values[80] = float("nan"), float("nan")

    out = paged_batch([DenseSequence(clean.query, keys, values)]).attend()

    # Queries are positions 70 to 89.
    assert torch.equal(out[:10], paged_batch([clean]).attend()[:10])
    assert out[10:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 3])
def test_a_token_that_left_the_window_has_no_effect(group: int, dtype: torch.dtype) -> None:
    """Even where queries of the same tile still see it."""
    clean = dense_sequence(20, 90, heads=(2 * group, 2), dtype=dtype)
    keys, values = clean.keys.clone(), clean.values.clone()
    keys[60], values[60] = float("nan"), float("nan")

    out = paged_batch([DenseSequence(clean.query, keys, values)]).attend(20)

    # Queries are positions 70 to 89; the one at 80 is the first that does not see position 60.
    assert torch.equal(out[10:], paged_batch([clean]).attend(20)[10:])
    assert out[:10].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_queries", "context_len"), [(1, 5), (1, 600), (40, 600)])
def test_where_every_score_is_minus_infinity_the_output_is_nan(
    num_queries: int, context_len: int, dtype: torch.dtype
) -> None:
    """As the softmax in the reference; what the threads' scratch held before must not show."""
    sequence = dense_sequence(num_queries, context_len, dtype=dtype)
    paged_batch([sequence]).attend()
    sequence.query.fill_(1.0)
    sequence.keys.fill_(-float("inf"))
    batch = paged_batch([sequence])

    assert batch.attend().isnan().all()
    assert batch.attend_by_reference().isnan().all()


def test_a_visible_nan_reaches_the_output() -> None:
    """Whoever samples must be able to tell that the numbers are broken."""
    sequence = dense_sequence(1, 300)
    sequence.keys[17, 0, 5] = float("nan")

    out = paged_batch([sequence]).attend()

    assert out[0, :2].isnan().all()
    assert out[0, 2:].isfinite().all()


@pytest.mark.parametrize("context", [120, 700])
def test_blocks_that_left_the_window_may_be_nulled(context: int) -> None:
    """A sliding group releases them and nulls the table's entries (vllm#42273)."""
    sequences = [dense_sequence(4, context)]
    batch = paged_batch(sequences)
    tables = batch.block_tables.copy()
    tables[0, : (context - 4 - 50 + 1) // 16] = 0

    out = PagedBatch(**{**vars(batch), "block_tables": tables}).attend(50)

    assert (tables != batch.block_tables).any()
    torch.testing.assert_close(out.double(), naive_attention(sequences, 50), rtol=2e-6, atol=2e-6)


def test_table_entries_behind_the_context_are_not_read() -> None:
    batch = paged_batch([dense_sequence(1, 20), dense_sequence(1, 100)])
    tables = batch.block_tables.copy()
    tables[0, 2:] = np.iinfo(np.int32).max

    out = PagedBatch(**{**vars(batch), "block_tables": tables}).attend()

    assert torch.equal(out, batch.attend())


def test_sequences_may_share_blocks() -> None:
    shared = dense_sequence(1, 64)
    batch = paged_batch([shared, DenseSequence(shared.query * 2, shared.keys, shared.values)])
    tables = batch.block_tables.copy()
    tables[1] = tables[0]

    out = PagedBatch(**{**vars(batch), "block_tables": tables}).attend()

    assert torch.equal(out, batch.attend())


def test_offsets_past_two_to_the_31_elements_are_right() -> None:
    """Offsets are 64-bit (vllm#1486, #47671). The cache is virtual memory: only the blocks in use are touched."""
    sequence = dense_sequence(1, 40, heads=(2, 1), dtype=torch.bfloat16)
    small = paged_batch([sequence])
    num_blocks = 2**31 // (16 * 64) + 8
    cache = torch.empty((num_blocks, 1, 16, 64), dtype=torch.bfloat16)
    cache_of_values = torch.empty_like(cache)
    tables = np.arange(num_blocks - 3, num_blocks, dtype=np.int32)[None]
    cache[tables[0]] = small.key_cache[small.block_tables[0]]
    cache_of_values[tables[0]] = small.value_cache[small.block_tables[0]]

    changed = {"key_cache": cache, "value_cache": cache_of_values, "block_tables": tables}
    out = PagedBatch(**{**vars(small), **changed}).attend()

    assert torch.equal(out, small.attend())
