import re

import numpy as np
import pytest
import torch
from torch import Tensor

from kvwatch_kernels.block_copy import block_copy, gather_blocks, scatter_blocks
from kvwatch_kernels.errors import ShapeError
from kvwatch_kernels.reference import reference_block_copy, reference_gather_blocks, reference_scatter_blocks


def make_cache(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(40, 3, 2, 2, 5, 7).to(dtype)


def i64(*values: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    return np.array(values, dtype=np.int64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("num_copies", [1, 2, 3, 17])
def test_destinations_become_their_sources_over_all_layers_and_nothing_else_changes(
    num_copies: int, dtype: torch.dtype
) -> None:
    cache = make_cache(dtype)
    before = cache.clone()
    blocks = np.random.default_rng(num_copies).permutation(40)
    sources, destinations = blocks[:num_copies], blocks[20 : 20 + num_copies]

    block_copy(cache, sources, destinations)

    for block in range(40):
        copied_from = dict(zip(destinations.tolist(), sources.tolist(), strict=True)).get(block, block)
        assert torch.equal(cache[block], before[copied_from])


def test_one_block_may_be_copied_several_times() -> None:
    """Parallel sampling forks a partial block n - 1 times."""
    cache = make_cache()

    block_copy(cache, i64(4, 4, 4), torch.tensor([1, 2, 3]))

    for block in (1, 2, 3):
        assert torch.equal(cache[block], cache[4])


def test_the_reference_does_the_same() -> None:
    cache = make_cache()
    expected = cache.clone()

    reference_block_copy(expected, i64(4, 5, 4), i64(1, 2, 3))
    block_copy(cache, i64(4, 5, 4), i64(1, 2, 3))

    assert torch.equal(cache, expected)


def test_copying_nothing_changes_nothing() -> None:
    cache = make_cache()
    before = cache.clone()

    block_copy(cache, i64(), i64())

    assert torch.equal(cache, before)


def test_blocks_may_lie_apart_from_each_other() -> None:
    wide = torch.randn(6, 2, 10)
    before = wide.clone()

    block_copy(wide[:, 0], i64(1), i64(5))

    assert torch.equal(wide[5, 0], before[1, 0])
    assert torch.equal(wide[5, 1], before[5, 1])


@pytest.mark.parametrize(
    ("message", "sources", "destinations"),
    [
        ("sources has blocks 0 to 40: must be 0 to 39", i64(0, 40), i64(1, 2)),
        ("destinations has blocks -1 to 1: must be 0 to 39", i64(3, 4), i64(1, -1)),
        ("destinations has shape [1]: must be [2]", i64(3, 4), i64(1)),
        ("destinations is [1, 1]: none may occur twice", i64(3, 4), i64(1, 1)),
        ("destinations is [4, 5]: none may occur twice or among sources [3, 4]", i64(3, 4), i64(4, 5)),
        ("sources has dtype int32: must be int64", np.array([1], dtype=np.int32), i64(2)),
    ],
)
def test_arguments_that_do_not_fit_are_named_and_nothing_is_copied(
    message: str,
    sources: "np.ndarray[tuple[int], np.dtype[np.int64]]",
    destinations: "np.ndarray[tuple[int], np.dtype[np.int64]]",
) -> None:
    cache = make_cache()
    before = cache.clone()

    with pytest.raises(ShapeError, match=re.escape(message)):
        block_copy(cache, sources, destinations)

    assert torch.equal(cache, before)


def test_a_cache_whose_blocks_are_not_contiguous_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"cache has shape \[40, 3, 2, 2, 5, 3\] and strides"):
        block_copy(make_cache()[..., :3], i64(1), i64(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("num_copies", [1, 2, 9])
def test_gathered_blocks_come_back_to_other_places(num_copies: int, dtype: torch.dtype) -> None:
    """Swap: out of some blocks, later into others."""
    cache = make_cache(dtype)
    before = cache.clone()
    blocks = np.random.default_rng(num_copies).permutation(40)
    sources, destinations = blocks[:num_copies], blocks[20 : 20 + num_copies]
    staging = torch.empty(num_copies, *cache.shape[1:], dtype=dtype)

    gather_blocks(cache, sources, staging)

    assert torch.equal(staging, before[sources])
    assert torch.equal(cache, before)

    scatter_blocks(staging, cache, torch.from_numpy(destinations))

    assert torch.equal(cache[destinations], before[sources])
    others = np.setdiff1d(np.arange(40), destinations)
    assert torch.equal(cache[others], before[others])


def test_one_block_may_be_gathered_several_times() -> None:
    cache = make_cache()
    staging = torch.empty(3, *cache.shape[1:])

    gather_blocks(cache, i64(4, 7, 4), staging)

    assert torch.equal(staging, cache[[4, 7, 4]])


def test_the_references_of_gather_and_scatter_do_the_same() -> None:
    cache, staging, expected = make_cache(), torch.empty(2, 3, 2, 2, 5, 7), torch.empty(2, 3, 2, 2, 5, 7)
    other = cache.clone()

    reference_gather_blocks(cache, i64(4, 5), expected)
    gather_blocks(cache, i64(4, 5), staging)
    reference_scatter_blocks(expected, other, i64(1, 2))
    scatter_blocks(staging, cache, i64(1, 2))

    assert torch.equal(staging, expected)
    assert torch.equal(cache, other)


def test_no_blocks_are_gathered_and_scattered_too() -> None:
    cache = make_cache()
    before = cache.clone()
    staging = cache[:0].clone()

    gather_blocks(cache, i64(), staging)
    scatter_blocks(staging, cache, i64())

    assert torch.equal(cache, before)


@pytest.mark.parametrize(
    ("message", "staging", "block_ids"),
    [
        ("block_ids has blocks 3 to 40: must be 0 to 39", torch.zeros(2, 3, 2, 2, 5, 7), i64(3, 40)),
        ("block_ids has blocks -1 to 3", torch.zeros(2, 3, 2, 2, 5, 7), i64(3, -1)),
        ("staging has shape [3, 3, 2, 2, 5, 7]: must be [2, 3, 2, 2, 5, 7]", torch.zeros(3, 3, 2, 2, 5, 7), i64(3, 4)),
        ("staging is torch.float64 on cpu, the cache torch.float32", torch.zeros(2, 3, 2, 2, 5, 7).double(), i64(3, 4)),
        ("staging has strides", torch.zeros(2, 3, 2, 2, 5, 8)[..., :7], i64(3, 4)),
    ],
)
def test_staging_that_does_not_fit_is_named_and_nothing_is_copied(
    message: str, staging: Tensor, block_ids: "np.ndarray[tuple[int], np.dtype[np.int64]]"
) -> None:
    cache = make_cache()
    before, staged_before = cache.clone(), staging.clone()

    with pytest.raises(ShapeError, match=re.escape(message)):
        gather_blocks(cache, block_ids, staging)
    with pytest.raises(ShapeError, match=re.escape(message)):
        scatter_blocks(staging, cache, block_ids)

    assert torch.equal(cache, before)
    assert torch.equal(staging, staged_before)


def test_a_block_cannot_be_scattered_to_twice() -> None:
    cache = make_cache()

    with pytest.raises(ShapeError, match=r"block_ids is \[3, 3\]: none may occur twice"):
        scatter_blocks(torch.zeros(2, 3, 2, 2, 5, 7), cache, i64(3, 3))
