"""The building blocks of compiled code, against torch and NumPy."""

from collections.abc import Callable

import numba
import numpy as np
import pytest
import torch
from numba import types
from numpy.typing import NDArray

from kvwatch_kernels.cpu.memory import advance, bf16_at, f32_at, load, load_some, store, store_some
from kvwatch_kernels.cpu.vectors import exp, exp2, max_lanes, splat, sum_lanes

Compiled = Callable[[int, int, int], None]


def compiled(body: Compiled) -> Compiled:
    """Compile `body(source address, target address, count)`, where the addresses are of NumPy arrays."""
    function: Compiled = numba.cfunc(types.void(types.int64, types.int64, types.int64))(body).ctypes
    return function


def apply(body: Compiled, values: NDArray[np.generic], dtype: type[np.generic], count: int) -> NDArray[np.generic]:
    result = np.zeros(len(values), dtype=dtype)
    compiled(body)(values.ctypes.data, result.ctypes.data, count)
    return result


def all_kinds_of_floats() -> NDArray[np.float32]:
    """Random bit patterns (every sign and exponent, NaNs, subnormals) and the ties of rounding to bfloat16."""
    bits = np.random.default_rng(0).integers(0, 2**32, 1 << 16, dtype=np.uint64).astype(np.uint32)
    ties = (np.arange(1 << 16, dtype=np.uint32) << 16) | 0x8000
    return np.concatenate([bits, ties, ties - 1, ties + 1]).view(np.float32)


def narrow_all(source: int, target: int, count: int) -> None:
    for index in range(0, count, 16):
        store(advance(bf16_at(target), index), load(advance(f32_at(source), index)))


def widen_all(source: int, target: int, count: int) -> None:
    for index in range(0, count, 16):
        store(advance(f32_at(target), index), load(advance(bf16_at(source), index)))


def test_rounding_to_bfloat16_equals_torch_bit_for_bit() -> None:
    values = all_kinds_of_floats()

    bits = apply(narrow_all, values, np.uint16, len(values))

    expected = torch.from_numpy(values).bfloat16()
    actual = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    is_nan = expected.isnan()
    assert torch.equal(actual.isnan(), is_nan)
    assert torch.equal(actual.view(torch.int16)[~is_nan], expected.view(torch.int16)[~is_nan])


def test_widening_bfloat16_equals_torch_bit_for_bit() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)

    values = apply(widen_all, bits, np.float32, len(bits))

    expected = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float()
    assert torch.equal(torch.from_numpy(values.view(np.int32)), expected.view(torch.int32))


@pytest.mark.parametrize("count", [0, 1, 7, 15, 16])
def test_partial_loads_and_stores_touch_only_their_elements(count: int) -> None:
    def copy_some(source: int, target: int, count: int) -> None:
        store_some(advance(f32_at(target), 16), count, load_some(f32_at(source), count))

    values = np.arange(1, 49, dtype=np.float32)

    result = apply(copy_some, values, np.float32, count)

    expected = np.zeros(48, dtype=np.float32)
    expected[16 : 16 + count] = values[:count]
    assert np.array_equal(result, expected)


def exp2_all(source: int, target: int, count: int) -> None:
    for index in range(0, count, 16):
        store(advance(f32_at(target), index), exp2(load(advance(f32_at(source), index))))


def test_exp2_is_within_two_units_in_the_last_place_for_every_exponent() -> None:
    exponents = -np.concatenate([np.linspace(0, 126, 1 << 20), np.logspace(-30, 2, 1 << 12)]).astype(np.float32)

    values = apply(exp2_all, exponents, np.float32, len(exponents))

    truth = np.exp2(exponents.astype(np.float64))
    assert np.abs(values / truth - 1).max() < 2 * 2**-24 * 1.01


def test_exp2_is_exact_at_integers_zero_for_minus_infinity_and_nan_for_nan() -> None:
    exponents = np.array([0, -0.0, -1, -2, -3, -126, -126.5, -200, -1e30, -np.inf, np.nan] + [0] * 5, dtype=np.float32)

    values = apply(exp2_all, exponents, np.float32, 16)

    assert values[:11].tolist()[:-1] == [1, 1, 0.5, 0.25, 0.125, 2**-126, 0, 0, 0, 0]
    assert np.isnan(values[10])


def exp_all(source: int, target: int, count: int) -> None:
    for index in range(0, count, 16):
        store(advance(f32_at(target), index), exp(load(advance(f32_at(source), index))))


def test_exp_is_within_three_units_in_the_last_place_over_its_whole_range() -> None:
    exponents = -np.concatenate([np.linspace(0, 87.3, 1 << 20), np.logspace(-30, 1.9, 1 << 12)]).astype(np.float32)

    values = apply(exp_all, exponents, np.float32, len(exponents))

    truth = np.exp(exponents.astype(np.float64))
    assert np.abs(values / truth - 1).max() < 1.5e-7


def test_exp_is_one_at_zero_zero_far_below_and_nan_for_nan() -> None:
    exponents = np.array([0, -0.0, -87.4, -200, -1e30, -np.inf, np.nan] + [0] * 9, dtype=np.float32)

    values = apply(exp_all, exponents, np.float32, 16)

    assert values[:6].tolist() == [1, 1, 0, 0, 0, 0]
    assert np.isnan(values[6])


def test_sums_and_maxima_cover_all_lanes() -> None:
    def sum_and_max(source: int, target: int, _count: int) -> None:
        store_some(f32_at(target), 1, splat(sum_lanes(load(f32_at(source)))))
        store_some(advance(f32_at(target), 1), 1, splat(max_lanes(load(f32_at(source)))))

    for lane in range(16):
        values = np.full(16, -1, dtype=np.float32)
        values[lane] = 100

        result = apply(sum_and_max, values, np.float32, 0)

        assert result[:2].tolist() == [85, 100]
