import re

import numpy as np
import pytest
import torch
from torch import Tensor

from kvwatch_kernels.dims import PAD_SLOT
from kvwatch_kernels.errors import ShapeError
from kvwatch_kernels.kv_store import kv_store
from kvwatch_kernels.reference import reference_kv_store

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make_cache(
    dtype: torch.dtype = torch.float32, *, num_blocks: int = 7, block_size: int = 16, head_dim: int = 24
) -> Tensor:
    """A cache of two layers that holds 7 everywhere."""
    return torch.full((num_blocks, 2, 2, 3, block_size, head_dim), 7.0, dtype=dtype)


def make_rows(num_tokens: int, dtype: torch.dtype = torch.float32, head_dim: int = 24) -> tuple[Tensor, Tensor]:
    rows = torch.randn(2, num_tokens, 3, head_dim).to(dtype)
    return rows[0], rows[1]


def random_slots(num_tokens: int, num_slots: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    slots = np.random.default_rng(num_tokens).permutation(num_slots)[:num_tokens].astype(np.int64)
    slots[::5] = PAD_SLOT
    return slots


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 8, 16, 33])
@pytest.mark.parametrize("num_tokens", [1, 6, 63, 64, 65, 200])
def test_each_token_lands_in_its_slot_and_nothing_else_changes(
    num_tokens: int, block_size: int, dtype: torch.dtype
) -> None:
    cache = make_cache(dtype, num_blocks=256 // block_size + 2, block_size=block_size)
    expected = cache.clone()
    key, value = make_rows(num_tokens, dtype)
    slots = random_slots(num_tokens, len(cache) * block_size)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // block_size, 1, 0, :, slot % block_size] = key[token]
            expected[slot // block_size, 1, 1, :, slot % block_size] = value[token]

    kv_store(key, value, cache[:, 1, 0], cache[:, 1, 1], slots)

    assert torch.equal(cache, expected)


def test_the_reference_does_the_same() -> None:
    cache, expected = make_cache(), make_cache()
    key, value = make_rows(50)
    slots = random_slots(50, 7 * 16)

    reference_kv_store(key, value, expected[:, 0, 0], expected[:, 0, 1], slots)
    kv_store(key, value, cache[:, 0, 0], cache[:, 0, 1], slots)

    assert torch.equal(cache, expected)


def test_keys_and_values_may_be_slices_of_a_fused_projection() -> None:
    cache, expected = make_cache(), make_cache()
    fused = torch.randn(5, 9 + 3 + 3, 24)
    slots = np.array([0, 17, 111, 3, 50])

    kv_store(fused[:, 9:12], fused[:, 12:], cache[:, 0, 0], cache[:, 0, 1], slots)
    kv_store(
        fused[:, 9:12].contiguous(),
        fused[:, 12:].contiguous(),
        expected[:, 0, 0],
        expected[:, 0, 1],
        torch.from_numpy(slots),
    )

    assert torch.equal(cache, expected)


def test_a_nan_keeps_all_its_bits() -> None:
    cache = make_cache()
    key, value = make_rows(1)
    key.view(torch.int32)[0, 1, 2] = 0x7FC12345

    kv_store(key, value, cache[:, 0, 0], cache[:, 0, 1], np.array([20]))

    assert cache.view(torch.int32)[1, 0, 0, 1, 4, 2] == 0x7FC12345


def test_storing_no_tokens_changes_nothing() -> None:
    cache = make_cache()
    key, value = make_rows(0)

    kv_store(key, value, cache[:, 0, 0], cache[:, 0, 1], np.zeros(0, dtype=np.int64))

    assert (cache == 7.0).all()


def test_slots_past_two_to_the_31_elements_are_reached() -> None:
    """Virtual memory: only the written block is touched."""
    num_blocks = 2**31 // (16 * 64) + 2
    cache = torch.empty((num_blocks, 1, 16, 64), dtype=torch.bfloat16)
    key = torch.randn(1, 1, 64).bfloat16()

    kv_store(key, key, cache, cache, np.array([num_blocks * 16 - 1]))

    assert torch.equal(cache[-1, 0, -1], key[0, 0])


@pytest.mark.parametrize(
    ("message", "key_shape", "value_shape", "slots"),
    [
        ("key has shape [2, 3, 20]: must be [num_tokens, heads, 24]", (2, 3, 20), (2, 3, 20), [0, 1]),
        (
            "key has shape [2, 2, 24], value [2, 2, 24]: must agree and have the cache's 3",
            (2, 2, 24),
            (2, 2, 24),
            [0, 1],
        ),
        ("key has shape [2, 3, 24], value [3, 3, 24]", (2, 3, 24), (3, 3, 24), [0, 1]),
        ("slot_mapping has shape [3]: must be [2]", (2, 3, 24), (2, 3, 24), [0, 1, 2]),
        ("slot_mapping has slots 0 to 112: must be 0 to 111, or -1", (2, 3, 24), (2, 3, 24), [0, 112]),
        ("slot_mapping has slots -2 to 1", (2, 3, 24), (2, 3, 24), [1, -2]),
    ],
)
def test_arguments_that_do_not_fit_are_named_and_nothing_is_written(
    message: str, key_shape: tuple[int, ...], value_shape: tuple[int, ...], slots: list[int]
) -> None:
    cache = make_cache()

    with pytest.raises(ShapeError, match=re.escape(message)):
        kv_store(
            torch.zeros(key_shape),
            torch.zeros(value_shape),
            cache[:, 0, 0],
            cache[:, 0, 1],
            np.array(slots, dtype=np.int64),
        )

    assert (cache == 7.0).all()
