"""The compiled attention and the reference against naive float64 attention, in caches that are NaN elsewhere."""

from collections.abc import Callable

import pytest
import torch
from kernel_batches import DenseSequence, PagedBatch, dense_sequence, naive_attention, paged_batch
from torch import Tensor

Attend = Callable[[PagedBatch, int | None], Tensor]


def attend_compiled(batch: PagedBatch, window: int | None) -> Tensor:
    return batch.attend(window)


def attend_by_reference(batch: PagedBatch, window: int | None) -> Tensor:
    return batch.attend_by_reference(window)


def mixed_sequences(block_size: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> list[DenseSequence]:
    """Decodes and prefill chunks with contexts around the borders of blocks, tiles and splits."""
    lengths = [
        (1, 1),
        (1, max(block_size - 1, 1)),
        (1, block_size),
        (1, block_size + 1),
        (5, 5),
        (7, 65),
        (1, 256),
        (1, 257),
        (40, 300),
        (3, 600),
    ]
    return [
        dense_sequence(queries, context, heads=heads, head_dim=head_dim, dtype=dtype, seed=seed)
        for seed, (queries, context) in enumerate(lengths)
    ]


def assert_close(actual: Tensor, truth: Tensor) -> None:
    assert actual.isfinite().all()
    if actual.dtype == torch.float32:
        torch.testing.assert_close(actual.double(), truth, rtol=2e-6, atol=2e-6)
    else:
        # One rounding of the result to bfloat16: half of 2**-7 relative, at most.
        torch.testing.assert_close(actual.double(), truth, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
@pytest.mark.parametrize(
    ("heads", "head_dim"),
    [((9, 3), 64), ((4, 2), 128), ((4, 4), 32), ((5, 1), 80), ((2, 1), 8), ((3, 3), 40), ((4, 2), 256)],
    ids=str,
)
def test_a_mixed_batch_equals_naive_attention(
    heads: tuple[int, int], head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    sequences = mixed_sequences(block_size, heads, head_dim, dtype)

    out = paged_batch(sequences, block_size=block_size).attend()

    assert_close(out, naive_attention(sequences))


@pytest.mark.parametrize("attend", [attend_compiled, attend_by_reference])
@pytest.mark.parametrize("window", [None, 1, 16, 50, 64, 300])
def test_a_query_sees_no_more_than_its_sliding_window(attend: Attend, window: int | None) -> None:
    sequences = mixed_sequences(16, (6, 2), 64, torch.float32)

    out = attend(paged_batch(sequences), window)

    assert_close(out, naive_attention(sequences, window))


def test_many_query_heads_of_one_kv_head_fit_in_one_tile() -> None:
    sequences = [dense_sequence(2, 70, heads=(130, 1), head_dim=16)]

    out = paged_batch(sequences).attend()

    assert_close(out, naive_attention(sequences))


def test_a_long_prefill_equals_naive_attention() -> None:
    sequences = [dense_sequence(200, 700, heads=(3, 1), head_dim=64)]

    out = paged_batch(sequences).attend()

    assert_close(out, naive_attention(sequences))


def test_huge_and_tiny_scores_neither_overflow_nor_vanish() -> None:
    sequence = dense_sequence(1, 100)
    sequences = [
        DenseSequence(sequence.query * 1e4, sequence.keys, sequence.values),
        DenseSequence(sequence.query * 1e-30, sequence.keys, sequence.values),
        DenseSequence(sequence.query, sequence.keys.sign() * -1e4, sequence.values),
    ]

    out = paged_batch(sequences).attend()

    # Scores of 1e5 are exact to 1e-2 only: compare where one key wins by far, else loosely.
    torch.testing.assert_close(out.double(), naive_attention(sequences), rtol=2e-2, atol=2e-2)


def test_the_query_may_be_a_slice_of_a_fused_projection() -> None:
    sequences = [dense_sequence(3, 20), dense_sequence(1, 33)]
    batch = paged_batch(sequences)
    fused = torch.full((4, 4 + 2 + 2, 64), float("nan"))
    fused[:, :4] = batch.query

    out = PagedBatch(**{**vars(batch), "query": fused[:, :4]}).attend()

    assert torch.equal(out, batch.attend())


def test_the_output_may_be_a_slice_too_and_nothing_beside_it_is_written() -> None:
    batch = paged_batch([dense_sequence(3, 20)])
    wide = torch.full((3, 6, 70), 7.0)

    returned = batch.attend(out=wide[:, 1:5, 3:67])

    assert torch.equal(wide[:, 1:5, 3:67], batch.attend())
    assert returned.data_ptr() == wide[:, 1:5, 3:67].data_ptr()
    wide[:, 1:5, 3:67] = 7.0
    assert (wide == 7.0).all()


def test_caches_may_be_strided_in_any_dim_but_the_last() -> None:
    batch = paged_batch([dense_sequence(3, 50), dense_sequence(1, 90)])
    # Token before head, as other engines lay caches out; and keys in a tensor of their own.
    key_cache = batch.key_cache.transpose(1, 2).contiguous().transpose(1, 2)

    out = PagedBatch(**{**vars(batch), "key_cache": key_cache}).attend()

    assert torch.equal(out, batch.attend())


def test_index_arrays_may_be_tensors() -> None:
    batch = paged_batch([dense_sequence(3, 50)])
    names = ("block_tables", "query_starts", "context_lens")

    out = PagedBatch(**{**vars(batch), **{name: torch.from_numpy(getattr(batch, name)) for name in names}}).attend()

    assert torch.equal(out, batch.attend())


def test_a_dtype_without_compiled_code_takes_the_reference() -> None:
    sequences = [dense_sequence(3, 50, dtype=torch.float16)]

    out = paged_batch(sequences).attend()

    torch.testing.assert_close(out.double(), naive_attention(sequences), rtol=2**-10, atol=1e-4)


def test_a_step_without_tokens_returns_nothing() -> None:
    batch = paged_batch([dense_sequence(0, 5)])

    assert batch.attend().shape == (0, 4, 64)
