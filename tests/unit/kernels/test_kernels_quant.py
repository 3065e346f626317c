"""The definition of quantised heads, and that the compiled stores follow it bit for bit."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from kvwatch_kernels.dims import PAD_SLOT, Int64Array
from kvwatch_kernels.errors import ShapeError
from kvwatch_kernels.kv_store import kv_store
from kvwatch_kernels.quant import QUANTISED_LIMITS, SMALLEST_MAGNITUDE, dequantise, quantise
from kvwatch_kernels.reference import reference_kv_store, reference_rotate_and_store
from kvwatch_kernels.rotary import rotate_and_store

STORED = list(QUANTISED_LIMITS)
LARGEST_ERROR = {torch.int8: 0.5 / 127, torch.float8_e4m3fn: 2**-4, torch.float8_e5m2: 2**-3}
"""Of an element, relative to the largest of its head (int8), or to itself where it is not much smaller (FP8)."""
NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS = 40, 8, 3


def heads_of_all_sizes(num_tokens: int = 300, head_dim: int = 64, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random heads over forty powers of ten, and some that are zero, tiny, huge, or broken."""
    generator = torch.Generator().manual_seed(head_dim)
    heads = torch.randn(num_tokens, NUM_KV_HEADS, head_dim, generator=generator)
    heads *= 10.0 ** (torch.rand(num_tokens, NUM_KV_HEADS, 1, generator=generator) * 40 - 20)
    heads[1] = 0.0
    heads[2] = -0.0
    heads[3] = 1e-44
    heads[4], heads[4, 1, 0] = 0.0, SMALLEST_MAGNITUDE
    heads[5], heads[5, 1, 1] = 0.0, SMALLEST_MAGNITUDE * (1 - 2**-20)
    heads[6, :, 0] = 3.0e38
    heads[7, 1, 3] = float("nan")
    heads[8, 0, 2] = float("inf")
    heads[9, 2, 1] = -float("inf")
    return heads.to(dtype)


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    """Bit by bit, but for which NaN it is."""
    if actual.dtype == torch.float32:
        is_nan = actual.isnan()
        same_nan = torch.equal(is_nan, expected.isnan())
        return same_nan and torch.equal(actual.view(torch.int32)[~is_nan], expected.view(torch.int32)[~is_nan])
    return torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_what_is_read_back_is_as_near_as_the_format_allows(dtype: torch.dtype) -> None:
    heads = heads_of_all_sizes()[10:].double()

    back = dequantise(*quantise(heads, dtype)).double()

    largest = heads.abs().amax(dim=-1, keepdim=True)
    # An element far below the largest of its head is rounded to a multiple of the format's smallest number.
    size = largest if dtype == torch.int8 else heads.abs().clamp_min(largest * 2**-13)
    assert ((back - heads).abs() / size).max() <= LARGEST_ERROR[dtype] * (1 + 1e-6)
    torch.testing.assert_close(back.abs().amax(dim=-1), largest[..., 0], rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_zero_tiny_and_broken_heads_read_as_zero_zero_and_nan(dtype: torch.dtype) -> None:
    heads = heads_of_all_sizes()

    stored, scales = quantise(heads, dtype)

    back = dequantise(stored, scales)
    assert (scales[[1, 2, 3]] == 0).all()
    assert scales[4].tolist() == [0.0, np.float32(SMALLEST_MAGNITUDE) / np.float32(QUANTISED_LIMITS[dtype]), 0.0]
    assert (scales[5] == 0).all()
    assert (back[[1, 2, 3, 5]] == 0).all()
    assert back[6].isfinite().all()
    for token, head in ((7, 1), (8, 0), (9, 2)):
        assert back[token, head].isnan().all()
        assert (stored.view(torch.uint8)[token, head] == 0).all()
    assert back.isnan().sum() == 3 * 64, "no other head is touched"


@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_ties_round_to_even(dtype: torch.dtype) -> None:
    limit = QUANTISED_LIMITS[dtype]
    ties = {torch.int8: [0.5, 1.5, 2.5, -0.5, -1.5], torch.float8_e4m3fn: [17.0, 19.0, -17.0, -19.0]}
    ties[torch.float8_e5m2] = [9.0, 11.0, -9.0, -11.0]
    rounded = {torch.int8: [0.0, 2.0, 2.0, 0.0, -2.0], torch.float8_e4m3fn: [16.0, 20.0, -16.0, -20.0]}
    rounded[torch.float8_e5m2] = [8.0, 12.0, -8.0, -12.0]

    stored, scales = quantise(torch.tensor([limit, *ties[dtype]]), dtype)

    assert scales.item() == 1.0
    assert stored.float().tolist() == [limit, *rounded[dtype]]


Store = Callable[..., None]


def stored_by(store: Store, key: Tensor, value: Tensor, slots: Int64Array, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What a store leaves in a cache of two layers that was full of sevens."""
    cache = torch.full((NUM_BLOCKS, 2, 2, NUM_KV_HEADS, BLOCK_SIZE, key.shape[-1]), 7.0).to(dtype)
    scales = torch.full(cache.shape[:-1], 7.0)
    sides = (cache[:, 1, 0], cache[:, 1, 1])
    store(key, value, *sides, slots, key_scales=scales[:, 1, 0], value_scales=scales[:, 1, 1])
    return cache, scales


def some_slots(num_tokens: int) -> Int64Array:
    slots = np.random.default_rng(num_tokens).permutation(NUM_BLOCKS * BLOCK_SIZE)[:num_tokens].astype(np.int64)
    slots[11::5] = PAD_SLOT
    return slots


@pytest.mark.parametrize("dtype", STORED, ids=str)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [5, 8, 20, 64, 80, 128])
def test_kv_store_gives_the_definitions_bits(head_dim: int, source: torch.dtype, dtype: torch.dtype) -> None:
    key, value = heads_of_all_sizes(300, head_dim + 3, source)[..., 3:], heads_of_all_sizes(300, head_dim, source)
    slots = some_slots(300)

    cache, scales = stored_by(kv_store, key, value, slots, dtype)

    expected_cache, expected_scales = stored_by(reference_kv_store, key, value, slots, dtype)
    assert same_bits(cache, expected_cache)
    assert same_bits(scales, expected_scales)
    for token, slot in enumerate(slots.tolist()):
        if slot != PAD_SLOT:
            stored, scale = quantise(key[token], dtype)
            assert same_bits(cache[slot // BLOCK_SIZE, 1, 0, :, slot % BLOCK_SIZE], stored)
            assert same_bits(scales[slot // BLOCK_SIZE, 1, 0, :, slot % BLOCK_SIZE], scale)
    assert (scales[:, 0] == 7.0).all(), "the other layer is not touched"


@pytest.mark.parametrize("dtype", STORED, ids=str)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rotated_keys_are_quantised_on_their_way(source: torch.dtype, has_norm: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(100, 6 + 2 * NUM_KV_HEADS, 64, generator=generator).to(source)
    angles = torch.rand(100, 32, generator=generator) * 100
    cosine, sine = angles.cos().to(source), angles.sin().to(source)
    weight = torch.randn(6 + NUM_KV_HEADS, 64, generator=generator).to(source) if has_norm else None
    slots = some_slots(100)
    results = []
    for rotate in (rotate_and_store, reference_rotate_and_store):
        cache = torch.full((NUM_BLOCKS, 2, NUM_KV_HEADS, BLOCK_SIZE, 64), 7.0).to(dtype)
        scales = torch.full(cache.shape[:-1], 7.0)
        own = qkv.clone()
        sides = {"key_scales": scales[:, 0], "value_scales": scales[:, 1]}
        rotate(own, cosine, sine, cache[:, 0], cache[:, 1], slots, norm_weight=weight, eps=1e-6, **sides)
        results.append((own[:, :6], dequantise(cache, scales)))
    (queries, contents), (expected_queries, expected_contents) = results

    torch.testing.assert_close(queries, expected_queries, rtol=2**-7, atol=1e-5)
    # Keys that differ in a last bit may round to neighbouring numbers, now and then.
    assert (contents != expected_contents)[:, 0].float().mean() < (0.7 if source == torch.float32 else 0.05)
    torch.testing.assert_close(contents, expected_contents, rtol=2.1 * LARGEST_ERROR[dtype], atol=0.05)
    assert torch.equal(contents[:, 1], expected_contents[:, 1]), "values are not turned"


def test_keys_and_values_of_two_dtypes_are_refused() -> None:
    cache, scales = torch.zeros(2, 2, 1, 4, 8, dtype=torch.int8), torch.zeros(2, 2, 1, 4)
    key = torch.zeros(1, 1, 8)

    with pytest.raises(ShapeError, match=r"key has dtype torch.float32, value torch.bfloat16: must agree"):
        kv_store(
            key,
            key.bfloat16(),
            cache[:, 0],
            cache[:, 1],
            np.array([0]),
            key_scales=scales[:, 0],
            value_scales=scales[:, 1],
        )


@pytest.mark.parametrize("name", ["key_scales", "value_scales"])
def test_a_store_without_scales_is_refused_and_writes_nothing(name: str) -> None:
    cache, scales = torch.zeros(2, 2, 1, 4, 8, dtype=torch.int8), torch.zeros(2, 2, 1, 4)
    given = {"key_scales": scales[:, 0], "value_scales": scales[:, 1]}
    del given[name]

    with pytest.raises(ShapeError, match=f"{name} is None: must be given"):
        kv_store(torch.ones(1, 1, 8), torch.ones(1, 1, 8), cache[:, 0], cache[:, 1], np.array([0]), **given)

    assert (cache == 0).all()
