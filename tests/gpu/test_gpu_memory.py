"""Cache writes and block copies on a device, bit for bit as the reference on the CPU."""

import pytest
import torch
from torch import Tensor

from kvwatch_kernels.quant import QUANTISED_LIMITS
from kvwatch_kernels.reference import reference_kv_store, reference_rotate_and_store
from kvwatch_kernels.triton.copy import triton_block_copy, triton_gather_blocks, triton_scatter_blocks
from kvwatch_kernels.triton.store import triton_kv_store, triton_rotate_and_store

DEVICE = "cuda"
NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE = 9, 3, 16
SLOTS = [17, -1, 143, 16, 80, -1, 33]
STORED = [None, *QUANTISED_LIMITS]


def empty_cache(stored: torch.dtype, head_dim: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return keys, values and, for quantised dtypes, their scales, all zero, on the CPU."""
    keys, values = (
        torch.zeros((NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, head_dim), dtype=torch.float32).to(stored) for _ in range(2)
    )
    if stored not in QUANTISED_LIMITS:
        return keys, values, None, None
    return keys, values, *torch.zeros((2, NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE))


def there(tensors: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    return [None if tensor is None else tensor.to(DEVICE) for tensor in tensors]


def assert_same_bytes(found: Tensor | None, expected: Tensor | None) -> None:
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert torch.equal(found.cpu().view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_a_store_writes_the_references_bytes(stored: torch.dtype | None, dtype: torch.dtype, head_dim: int) -> None:
    key, value = torch.randn((2, len(SLOTS), NUM_KV_HEADS, head_dim)).to(dtype)
    slots = torch.tensor(SLOTS)
    expected = empty_cache(stored or dtype, head_dim)
    found = there(expected)
    reference_kv_store(
        key, value, expected[0], expected[1], slots.numpy(), key_scales=expected[2], value_scales=expected[3]
    )

    key_cache, value_cache, key_scales, value_scales = found
    assert key_cache is not None
    assert value_cache is not None
    triton_kv_store(
        key.to(DEVICE),
        value.to(DEVICE),
        key_cache,
        value_cache,
        slots.to(DEVICE),
        key_scales=key_scales,
        value_scales=value_scales,
    )

    for mine, truth in zip(found, expected, strict=True):
        assert_same_bytes(mine, truth)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rotating_and_storing_gives_the_references_numbers(dtype: torch.dtype, has_norm: bool) -> None:
    """Not bit for bit: a device may fuse a product and a sum. One unit in the last place of the dtype is allowed."""
    num_heads, head_dim = 6, 64
    qkv = torch.randn(len(SLOTS), num_heads + 2 * NUM_KV_HEADS, head_dim).to(dtype)
    angles = torch.randn(len(SLOTS), head_dim // 2) * 3
    cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)
    weight = (1 + torch.randn(num_heads + NUM_KV_HEADS, head_dim) / 4).to(dtype) if has_norm else None
    slots = torch.tensor(SLOTS)
    expected, found_qkv = qkv.clone(), qkv.to(DEVICE)
    keys, values, _, _ = empty_cache(dtype, head_dim)
    found_keys, found_values = keys.to(DEVICE), values.to(DEVICE)
    reference_rotate_and_store(
        expected, cosine, sine, keys, values, slots.numpy(), norm_weight=weight, eps=1e-6
    )  # fmt: skip

    triton_rotate_and_store(
        found_qkv,
        cosine.to(DEVICE),
        sine.to(DEVICE),
        found_keys,
        found_values,
        slots.to(DEVICE),
        norm_weight=None if weight is None else weight.to(DEVICE),
        eps=1e-6,
    )

    bar = 4 * torch.finfo(dtype).eps
    pairs = [(found_qkv[:, :num_heads], expected[:, :num_heads]), (found_keys, keys)]
    for mine, truth in pairs:
        assert (mine.cpu().float() - truth.float()).abs().max() <= bar * truth.float().abs().max()
    assert_same_bytes(found_values, values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float32], ids=str)
@pytest.mark.parametrize("width", [5, 64, 4096])
def test_blocks_are_copied_gathered_and_scattered_bit_for_bit(dtype: torch.dtype, width: int) -> None:
    cache = torch.randint(0, 255, (11, 3, width)).to(dtype)
    sources, destinations = torch.tensor([1, 1, 7]), torch.tensor([4, 9, 2])
    expected = cache.clone()
    expected[destinations] = cache[sources]

    found = cache.to(DEVICE)
    triton_block_copy(found, sources.to(DEVICE), destinations.to(DEVICE))
    assert torch.equal(found.cpu(), expected)

    staging = torch.empty((3, 3, width), dtype=dtype, device=DEVICE)
    triton_gather_blocks(found, destinations.to(DEVICE), staging)
    assert torch.equal(staging.cpu(), expected[destinations])

    other = torch.zeros_like(found)
    triton_scatter_blocks(staging, other, sources.to(DEVICE)[1:].contiguous().new_tensor([3, 0, 10]))
    assert torch.equal(other.cpu()[[3, 0, 10]], expected[destinations])
    assert not other.cpu()[[1, 2, 4, 5, 6, 7, 8, 9]].any()
