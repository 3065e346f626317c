"""The tensor behind the blocks."""

from dataclasses import replace

import numpy as np
import psutil
import pytest
import torch

from kvwatch_engine.contracts.cache import BLOCK_ALIGNMENT, QUANTISED_DTYPES, KVCacheSpec
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.memory.sizing import default_num_blocks

SPEC = KVCacheSpec(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")


def test_a_block_is_contiguous_over_all_layers() -> None:
    cache = KVCache(SPEC, 5)

    assert cache.data.shape == (5, 3, 2, 2, 4, 8)
    assert cache.data[3].is_contiguous()
    assert cache.data[3].nbytes == SPEC.block_bytes
    assert cache.num_bytes == 5 * SPEC.block_bytes


def test_layers_are_views_of_the_one_tensor() -> None:
    cache = KVCache(SPEC, 5)

    for layer in range(SPEC.num_layers):
        keys, values = cache.layer(layer)
        keys[2], values[2] = 10.0 + layer, 20.0 + layer

    assert keys.shape == values.shape == (5, 2, 4, 8)
    for layer in range(SPEC.num_layers):
        assert (cache.data[2, layer, 0] == 10.0 + layer).all()
        assert (cache.data[2, layer, 1] == 20.0 + layer).all()
    assert (cache.data[[0, 1, 3, 4]] == 0).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_copies_move_whole_blocks_over_all_layers_bit_by_bit(dtype: str) -> None:
    spec = KVCacheSpec(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype=dtype)
    cache = KVCache(spec, 6)
    cache.data.copy_(torch.randn(cache.data.shape, generator=torch.Generator().manual_seed(0)))
    before = cache.data.clone()

    cache.copy_blocks(np.array([1, 1, 3], dtype=np.int64), np.array([2, 5, 4], dtype=np.int64))

    assert torch.equal(cache.data, before[[0, 1, 1, 3, 3, 1]])


def test_a_pool_without_a_usable_block_is_refused() -> None:
    with pytest.raises(ValueError, match="give at least 2"):
        KVCache(SPEC, 1)


QUANTISED = list(QUANTISED_DTYPES.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", *QUANTISED])
@pytest.mark.parametrize(("block_size", "head_dim"), [(4, 8), (1, 5), (16, 64), (3, 7)])
def test_no_two_elements_share_a_byte_and_none_lies_outside_of_its_block(
    block_size: int, head_dim: int, dtype: str
) -> None:
    spec = replace(SPEC, block_size=block_size, head_dim=head_dim, dtype=dtype)
    cache = KVCache(spec, 3)
    views = [side for layer in range(3) for side in (*cache.layer(layer), *cache.layer_scales(layer))]
    start, num_used = cache.blocks.data_ptr(), 0
    owners = torch.zeros(spec.block_bytes, dtype=torch.int32)

    for view in views:
        if view is None:
            continue
        assert view.stride(0) * view.element_size() == spec.block_bytes
        offset = view.data_ptr() - start
        part = view[1:2].contiguous().nbytes
        owners[offset : offset + part] += 1
        num_used += part

    assert owners.max() == 1
    assert owners.sum() == num_used
    assert spec.block_bytes - num_used < 2 * BLOCK_ALIGNMENT, "padding only"
    assert start % BLOCK_ALIGNMENT == spec.block_bytes % BLOCK_ALIGNMENT == 0


@pytest.mark.parametrize("dtype", QUANTISED)
def test_copies_take_the_scales_along(dtype: str) -> None:
    cache = KVCache(replace(SPEC, dtype=dtype), 6)
    cache.blocks.copy_(torch.randint(256, cache.blocks.shape, generator=torch.Generator().manual_seed(0)))
    before = cache.blocks.clone()

    cache.copy_blocks(np.array([1, 1, 3], dtype=np.int64), np.array([2, 5, 4], dtype=np.int64))

    assert torch.equal(cache.blocks, before[[0, 1, 1, 3, 3, 1]])
    assert cache.scales is not None
    assert torch.equal(cache.scales[2].view(torch.int32), cache.scales[1].view(torch.int32))
    keys, _ = cache.layer_scales(1)
    assert keys is not None
    assert keys.shape == (6, 2, 4)


def test_a_cache_that_is_not_quantised_has_no_scales() -> None:
    cache = KVCache(SPEC, 3)

    assert cache.scales is None
    assert cache.layer_scales(0) == (None, None)


@pytest.mark.parametrize("dtype", QUANTISED)
def test_the_same_memory_holds_nearly_four_times_the_tokens_of_float32(dtype: str) -> None:
    """One byte for an element and four for the scale of a head of 64, instead of four bytes for an element."""
    plain = KVCacheSpec(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="float32")
    memory = 10_000 * plain.block_bytes

    blocks = [default_num_blocks(replace(plain, dtype=d), 2**20, 2**10, 4 * memory) - 1 for d in ("float32", dtype)]

    assert blocks == [10_000, int(10_000 * 4 * 64 / 68)]


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_large_pool_takes_no_memory_before_it_is_written(dtype: str) -> None:
    spec = KVCacheSpec(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype=dtype)
    process = psutil.Process()
    before = process.memory_info().rss

    cache = KVCache(spec, 2**30 // spec.block_bytes)
    cache.data[1] = 1.0

    assert cache.num_bytes > 1e9
    assert process.memory_info().rss - before < 100e6
