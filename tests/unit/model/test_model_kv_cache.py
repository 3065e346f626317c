"""The tensor behind the blocks."""

import numpy as np
import pytest
import torch

from kvwatch_engine.contracts.cache import KVCacheSpec
from kvwatch_engine.memory.kv_cache import KVCache

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
