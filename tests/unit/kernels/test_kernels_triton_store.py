"""The kernels in Triton that write to the cache and copy blocks, against the reference, bit for bit.

Runs in Triton's interpreter (see conftest.py), in float32 and float16: bfloat16 is silently wrong there.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvwatch_kernels.dims import PAD_SLOT
from kvwatch_kernels.quant import SMALLEST_MAGNITUDE, quantise
from kvwatch_kernels.reference import reference_kv_store, reference_rotate_and_store
from kvwatch_kernels.triton.copy import triton_block_copy, triton_gather_blocks, triton_scatter_blocks
from kvwatch_kernels.triton.store import triton_kv_store, triton_rotate_and_store

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")  # NumPy's, about NaN

QUANTISED = [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]
NUM_BLOCKS, BLOCK_SIZE = 9, 8


@dataclass(frozen=True)
class Caches:
    """One layer of a cache: views of a whole cache of three layers, as the engine's are."""

    key_cache: Tensor
    value_cache: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None

    @property
    def scales(self) -> dict[str, Tensor | None]:
        return {"key_scales": self.key_scales, "value_scales": self.value_scales}

    def assert_same_bytes(self, other: "Caches") -> None:
        for one, two in zip(vars(self).values(), vars(other).values(), strict=True):
            if one is not None:
                assert torch.equal(_bytes(one), _bytes(two))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def empty_caches(dtype: torch.dtype, *, num_kv_heads: int = 2, head_dim: int = 64) -> Caches:
    shape = (NUM_BLOCKS, 3, 2, num_kv_heads, BLOCK_SIZE)
    whole = torch.zeros((*shape, head_dim), dtype=dtype)
    scales = torch.zeros(shape) if dtype in QUANTISED else None
    return Caches(
        whole[:, 1, 0],
        whole[:, 1, 1],
        None if scales is None else scales[:, 1, 0],
        None if scales is None else scales[:, 1, 1],
    )


def some_slots(num_tokens: int) -> Tensor:
    """Slots in random order, the second one a pad."""
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[:num_tokens]
    slots[1] = PAD_SLOT
    return slots


@pytest.mark.parametrize("stored", [None, *QUANTISED], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_keys_and_values_are_stored_as_the_reference_stores_them(
    head_dim: int, dtype: torch.dtype, stored: torch.dtype | None
) -> None:
    torch.manual_seed(1)
    qkv = torch.randn(21, 5, head_dim).to(dtype)
    key, value, slots = qkv[:, 1:3], qkv[:, 3:], some_slots(21)
    ours, theirs = (empty_caches(stored or dtype, head_dim=head_dim) for _ in range(2))

    triton_kv_store(key, value, ours.key_cache, ours.value_cache, slots, **ours.scales)

    reference_kv_store(key, value, theirs.key_cache, theirs.value_cache, slots.numpy(), **theirs.scales)
    ours.assert_same_bytes(theirs)
    assert _bytes(ours.key_cache).any()


@pytest.mark.parametrize("stored", QUANTISED, ids=str)
def test_every_kind_of_number_is_quantised_as_the_definition_says(stored: torch.dtype) -> None:
    """Ties, subnormals, huge and tiny heads, signed zeros; NaN and infinity break their own token only."""
    nan, inf = float("nan"), float("inf")
    ramp = torch.linspace(-1, 1, 64)
    ties = torch.arange(-32, 32) + 0.5
    powers = torch.logspace(-38, 0, 64, base=2) * torch.tensor([1.0, -1.0]).repeat(32)
    heads = torch.stack(
        [
            *(ramp * 2.0**power for power in (-149, -126, -101, -100, -99, -20, 0, 60, 127)),
            *(ties / ties.abs().max() * limit for limit in (127.0, 448.0, 57344.0)),
            *(ties.clamp(max=limit).index_fill(0, torch.tensor([0]), limit) for limit in (127.0, 448.0, 57344.0)),
            *(powers * limit for limit in (127.0, 448.0, 57344.0)),
            torch.zeros(64),
            -torch.zeros(64),
            torch.full((64,), SMALLEST_MAGNITUDE),
            *(ramp.index_fill(0, torch.tensor([7]), broken) for broken in (nan, inf, -inf)),
            *torch.randn(24, 64, generator=torch.Generator().manual_seed(3)).mul(3),
        ]
    )
    key = heads[:, None].repeat(1, 2, 1)
    caches = empty_caches(stored)
    slots = torch.arange(len(heads))

    triton_kv_store(key, -key, caches.key_cache, caches.value_cache, slots, **caches.scales)

    blocks, offsets = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    for cache, scales, source in (
        (caches.key_cache, caches.key_scales, key),
        (caches.value_cache, caches.value_scales, -key),
    ):
        expected, expected_scales = quantise(source, stored)
        assert scales is not None
        assert torch.equal(_bytes(cache[blocks, :, offsets]), _bytes(expected))
        torch.testing.assert_close(scales[blocks, :, offsets], expected_scales, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("stored", [None, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_rotating_and_storing_gives_what_the_reference_gives(
    head_dim: int, dtype: torch.dtype, has_norm: bool, stored: torch.dtype | None
) -> None:
    torch.manual_seed(2)
    num_heads, num_kv_heads, num_tokens = 3, 1, 9
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    angles = torch.rand(num_tokens, head_dim // 2) * 6
    cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)
    weight = torch.rand(num_heads + num_kv_heads, head_dim).to(dtype) + 0.5 if has_norm else None
    slots = some_slots(num_tokens)
    ours, theirs = (empty_caches(stored or dtype, num_kv_heads=1, head_dim=head_dim) for _ in range(2))
    rotated, expected = qkv.clone(), qkv.clone()

    triton_rotate_and_store(
        rotated, cosine, sine, ours.key_cache, ours.value_cache, slots, norm_weight=weight, eps=1e-6, **ours.scales
    )

    reference_rotate_and_store(
        expected,
        cosine,
        sine,
        theirs.key_cache,
        theirs.value_cache,
        slots.numpy(),
        norm_weight=weight,
        eps=1e-6,
        **theirs.scales,
    )
    unit = 1e-6 if dtype == torch.float32 else 1e-3  # the last bit: sums are in another order
    torch.testing.assert_close(rotated[:, :num_heads], expected[:, :num_heads], rtol=unit, atol=unit)
    assert not torch.equal(rotated[:, :num_heads], qkv[:, :num_heads])
    assert torch.equal(_bytes(ours.value_cache), _bytes(theirs.value_cache))
    if ours.key_scales is None or theirs.key_scales is None:
        torch.testing.assert_close(ours.key_cache, theirs.key_cache, rtol=unit, atol=unit)
    else:
        torch.testing.assert_close(ours.key_scales, theirs.key_scales, rtol=unit, atol=0)
        one_code = 1.0 if stored == torch.int8 else 0.13
        torch.testing.assert_close(ours.key_cache.float(), theirs.key_cache.float(), rtol=0.13, atol=one_code)
    assert _bytes(ours.key_cache).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("shape", [(2, 2, 16, 64), (3, 5), (1, 2500)], ids=str)
def test_blocks_are_copied_gathered_and_scattered_bit_for_bit(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Of odd sizes too, and of bfloat16: nothing is computed."""
    generator = torch.Generator().manual_seed(5)
    cache = torch.randint(-100 if dtype.is_signed else 0, 100, (12, *shape), generator=generator).to(dtype)
    before = cache.clone()
    sources, destinations = torch.tensor([3, 3, 11]), torch.tensor([0, 7, 5])

    triton_block_copy(cache, sources, destinations)

    expected = before.clone()
    expected[destinations] = before[sources]
    assert torch.equal(cache, expected)

    staging = torch.zeros((3, *shape), dtype=dtype)
    triton_gather_blocks(cache, torch.tensor([5, 1, 9]), staging)
    assert torch.equal(staging, expected[[5, 1, 9]])

    triton_scatter_blocks(staging, cache, torch.tensor([2, 4, 6]))
    expected[[2, 4, 6]] = staging
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("first", [0, 1])
def test_only_blocks_are_copied_not_what_lies_between_them(first: int) -> None:
    """Blocks may be padded, and need not be aligned to words."""
    buffer = torch.arange(6 * 70 + 1, dtype=torch.uint8)[first : first + 6 * 70].view(6, 70)
    before = buffer.clone()

    triton_block_copy(buffer[:, :64], torch.tensor([1]), torch.tensor([4]))

    before[4, :64] = before[1, :64]
    assert torch.equal(buffer, before)


def test_nothing_to_copy_or_to_store_is_nothing_to_do() -> None:
    caches, none = empty_caches(torch.float32), torch.empty(0, dtype=torch.int64)

    triton_block_copy(caches.key_cache, none, none)
    triton_kv_store(torch.empty(0, 2, 64), torch.empty(0, 2, 64), caches.key_cache, caches.value_cache, none)

    assert not caches.key_cache.any()
