"""Offsets are 64-bit throughout the kernels in Triton: everything may lie 2 to the 31 elements from where it begins.

Runs in Triton's interpreter (see conftest.py), which overflows as a device does. The tensors are virtual memory, of
which only the pages in use exist.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from kernel_batches import PagedBatch, dense_sequence, paged_batch
from torch import Tensor
from triton_cases import attend_in_triton

from kvwatch_kernels.triton.copy import triton_block_copy, triton_gather_blocks, triton_scatter_blocks
from kvwatch_kernels.triton.store import triton_kv_store, triton_rotate_and_store

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")  # NumPy's, about NaN


def spread(tensor: Tensor, dim: int) -> Tensor:
    """A copy whose last row along `dim` lies more than 2 to the 31 elements from the first.

    With three rows or more the stride itself fits in 32 bits: only its product with an index does not.
    """
    assert tensor.shape[dim] > 2
    stride = 2**31 // (tensor.shape[dim] - 1) + 64
    inner = [size for place, size in enumerate(tensor.shape) if place != dim]
    strides = torch.empty(inner, device="meta").stride()
    storage = torch.empty((tensor.shape[dim] - 1) * stride + tensor.numel(), dtype=tensor.dtype)
    far = storage.as_strided(tensor.shape, [*strides[:dim], stride, *strides[dim:]])
    far.copy_(tensor)
    return far


@cache
def some_batch(*, has_whole_tiles: bool = False) -> PagedBatch:
    """A batch that reads the last block of its cache; all of its tiles are whole, or none is."""
    lengths = ((1, 128), (1, 64), (1, 192)) if has_whole_tiles else ((2, 20), (1, 17), (1, 5))
    batch = paged_batch([dense_sequence(*pair, heads=(6, 3), dtype=torch.float16) for pair in lengths])
    end = int(batch.block_tables.max()) + 1
    return replace(batch, key_cache=batch.key_cache[:end], value_cache=batch.value_cache[:end])


@cache
def expected(*, has_whole_tiles: bool = False) -> Tensor:
    return attend_in_triton(some_batch(has_whole_tiles=has_whole_tiles))


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["block", "head", "slot"])
@pytest.mark.parametrize("side", ["key_cache", "value_cache", "both"])
@pytest.mark.parametrize("has_whole_tiles", [False, True])
def test_a_cache_may_be_spread_wide(has_whole_tiles: bool, side: str, dim: int) -> None:
    batch = some_batch(has_whole_tiles=has_whole_tiles)
    keys, values = batch.key_cache, batch.value_cache
    if side in ("key_cache", "both"):
        keys = spread(keys, dim)
    if side in ("value_cache", "both"):
        values = spread(values, dim)

    out = attend_in_triton(replace(batch, key_cache=keys, value_cache=values))

    assert torch.equal(out, expected(has_whole_tiles=has_whole_tiles))


@pytest.mark.parametrize("dim", [0, 1], ids=["block", "head"])
def test_scales_may_be_spread_wide(dim: int) -> None:
    quantised = some_batch().quantised(torch.int8)
    assert quantised.key_scales is not None
    assert quantised.value_scales is not None
    far_keys, far_values = spread(quantised.key_scales, dim), spread(quantised.value_scales, dim)

    out = attend_in_triton(replace(quantised, key_scales=far_keys, value_scales=far_values))

    assert torch.equal(out, attend_in_triton(quantised))


@pytest.mark.parametrize("dim", [0, 1], ids=["token", "head"])
def test_queries_and_results_may_be_spread_wide(dim: int) -> None:
    batch = some_batch()
    out = spread(torch.zeros_like(batch.query), dim)

    attend_in_triton(replace(batch, query=spread(batch.query, dim)), out=out)

    assert torch.equal(out, expected())


@pytest.mark.parametrize("dim", [0, 1], ids=["token", "head"])
def test_results_of_splits_may_be_spread_wide(dim: int) -> None:
    batch = paged_batch([dense_sequence(*pair, heads=(3, 1)) for pair in ((1, 5), (1, 17), (1, 520))])
    out = spread(torch.zeros_like(batch.query), dim)

    attend_in_triton(batch, out=out, is_split=True)

    assert torch.equal(out, attend_in_triton(batch, is_split=True))


def test_block_tables_may_be_spread_wide() -> None:
    batch = some_batch()
    tables = spread(torch.from_numpy(batch.block_tables), 0).numpy()

    assert torch.equal(attend_in_triton(replace(batch, block_tables=tables)), expected())


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["block", "head", "slot"])
@pytest.mark.parametrize("is_rotated", [False, True])
def test_stores_reach_a_cache_that_is_spread_wide(is_rotated: bool, dim: int) -> None:
    near = [torch.zeros((3, 3, 8, 64), dtype=torch.int8) for _ in range(2)]
    near_scales = [torch.zeros((3, 3, 8)) for _ in range(2)]
    far = [spread(cache, dim) for cache in near]
    far_scales = [spread(scales, min(dim, 1)) for scales in near_scales]
    qkv, slots = torch.randn(3, 9, 64), torch.tensor([23, 9, 2])
    angles = torch.randn(3, 32)

    for caches, scales in ((near, near_scales), (far, far_scales)):
        sides = {"key_scales": scales[0], "value_scales": scales[1]}
        if is_rotated:
            triton_rotate_and_store(
                qkv.clone(), angles.cos(), angles.sin(), caches[0], caches[1], slots, norm_weight=None, eps=0.0, **sides
            )
        else:
            triton_kv_store(qkv[:, 3:6], qkv[:, 6:], caches[0], caches[1], slots, **sides)

    assert all(cache.any() for cache in near)
    assert all(torch.equal(*pair) for pair in zip((*near, *near_scales), (*far, *far_scales), strict=True))


@pytest.mark.parametrize("dim", [0, 1], ids=["token", "head"])
def test_what_is_stored_may_be_spread_wide(dim: int) -> None:
    qkv, slots = torch.randn(3, 9, 64), torch.tensor([23, 9, 2])
    far = spread(qkv, dim)
    angles = torch.randn(3, 32)
    stored = [[torch.zeros(3, 3, 8, 64) for _ in range(4)] for _ in range(2)]

    for source, caches in ((qkv, stored[0]), (far, stored[1])):
        triton_kv_store(source[:, 3:6], source[:, 6:], caches[0], caches[1], slots)
        triton_rotate_and_store(
            source, angles.cos(), angles.sin(), caches[2], caches[3], slots, norm_weight=None, eps=0.0
        )

    assert all(torch.equal(*pair) for pair in zip(*stored, strict=True))
    assert torch.equal(far[:, :3], qkv[:, :3])


def test_blocks_far_apart_are_copied() -> None:
    blocks = spread(torch.arange(3 * 255, dtype=torch.uint8).view(3, 255), 0)
    copied = blocks.clone()
    copied[2] = copied[1]

    triton_block_copy(blocks, torch.tensor([1]), torch.tensor([2]))

    assert torch.equal(blocks, copied)


def test_a_staging_buffer_may_be_spread_wide() -> None:
    """Blocks of an odd size are copied byte by byte: the smallest words, the largest offsets."""
    cache, blocks = torch.arange(5 * 255, dtype=torch.uint8).view(5, 255), torch.tensor([4, 0, 2])
    staging = spread(torch.zeros(3, 255, dtype=torch.uint8), 0)
    emptied = torch.zeros_like(cache)

    triton_gather_blocks(cache, blocks, staging)
    triton_scatter_blocks(staging, emptied, blocks)

    assert torch.equal(staging, cache[blocks])
    assert torch.equal(emptied[blocks], cache[blocks])


def test_only_the_pages_in_use_exist() -> None:
    """Else these tests would need many gigabytes."""
    far = spread(torch.ones(3, 64), 0)

    assert far.untyped_storage().nbytes() > 8 * 2**30
    assert np.asarray(far).nbytes == 3 * 64 * 4
