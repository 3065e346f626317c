"""A batch that is checked once serves every layer."""

import re
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from kernel_batches import PagedBatch, dense_sequence, paged_batch

from kvwatch_kernels.errors import ShapeError
from kvwatch_kernels.paged_attention import AttentionBatch


@pytest.fixture(autouse=True)
def _restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def mixed_batch(dtype: torch.dtype = torch.float32) -> PagedBatch:
    """Decodes of one and of several splits, and a prefill chunk."""
    parts = ((1, 40), (1, 700), (90, 300), (1, 257))
    return paged_batch([dense_sequence(q, n, heads=(6, 2), dtype=dtype) for q, n in parts])


def prepared(batch: PagedBatch) -> AttentionBatch:
    return AttentionBatch(
        batch.key_cache,
        batch.value_cache,
        block_tables=batch.block_tables,
        query_starts=batch.query_starts,
        context_lens=batch.context_lens,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_layers_attend_one_after_the_other_as_if_each_were_alone(dtype: torch.dtype) -> None:
    batch = mixed_batch(dtype)
    layers = prepared(batch)
    # Queries and caches change from layer to layer; here keys and values change places.
    sides = (batch.key_cache, batch.value_cache)
    for query, caches in ((batch.query, sides), (batch.query * 2, sides), (batch.query, sides[::-1])):
        for window in (None, 50, 300):
            attended = layers.attend(query, *caches, scale=batch.scale, sliding_window=window)

            alone = PagedBatch(
                query, *caches, batch.block_tables, batch.query_starts, batch.context_lens, batch.scale
            ).attend(window)
            assert torch.equal(attended, alone)


def test_the_number_of_threads_may_change_between_layers() -> None:
    batch = mixed_batch()
    layers, expected = prepared(batch), batch.attend()

    for num_threads in (1, 4, 2, 1):
        torch.set_num_threads(num_threads)
        attended = layers.attend(batch.query, batch.key_cache, batch.value_cache, scale=batch.scale)
        assert torch.equal(attended, expected)


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_more_threads_than_work_and_empty_sequences_are_no_trouble(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    sequences = [dense_sequence(q, n, heads=(2, 1)) for q, n in ((1, 1), (0, 5), (1, 64), (0, 1), (2, 65))]
    expected = torch.cat([paged_batch([sequence]).attend() for sequence in sequences if len(sequence.query)])

    assert torch.equal(paged_batch(sequences).attend(), expected)


def test_a_cache_of_another_shape_or_layout_is_refused() -> None:
    batch = mixed_batch()
    layers = prepared(batch)

    for other in (batch.key_cache[:5], batch.key_cache.contiguous(), batch.key_cache.double()):
        with pytest.raises(ShapeError, match=re.escape("must be those that the batch was made for")):
            layers.attend(batch.query, other, batch.value_cache, scale=1.0)


def test_queries_that_contradict_the_batch_are_refused_and_the_batch_serves_on() -> None:
    batch = mixed_batch()
    layers = prepared(batch)

    with pytest.raises(ShapeError, match=r"query_starts\[4\] is 93: must start at 0, never fall, and end at 92"):
        layers.attend(batch.query[:92], batch.key_cache, batch.value_cache, scale=batch.scale)

    attended = layers.attend(batch.query, batch.key_cache, batch.value_cache, scale=batch.scale)
    assert torch.equal(attended, batch.attend())


def test_a_wrong_block_is_named_at_every_call() -> None:
    batch = mixed_batch()
    batch.block_tables[1, 3] = np.int32(9999)
    layers = prepared(batch)

    for _ in range(3):
        with pytest.raises(ShapeError, match="block_tables names block 9999"):
            layers.attend(batch.query, batch.key_cache, batch.value_cache, scale=batch.scale)
