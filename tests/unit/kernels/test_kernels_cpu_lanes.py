"""The building blocks of compiled code, against torch and NumPy."""

from collections.abc import Callable

import numba
import numpy as np
import pytest
import torch
from numba import types
from numpy.typing import NDArray

from kvwatch_kernels.cpu.memory import (
    advance,
    bf16_at,
    e4m3_at,
    e5m2_at,
    f32_at,
    i64_at,
    int8_at,
    load,
    load_some,
    store,
    store_some,
    unit_of,
)
from kvwatch_kernels.cpu.packing import load_transposed
from kvwatch_kernels.cpu.pairs import multiplies_pairs
from kvwatch_kernels.cpu.vectors import exp, exp2, largest_size, max_lanes, splat, sum_lanes, tanh
from kvwatch_kernels.quant import QUANTISED_LIMITS

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
    # A processor that rounds by itself takes denormals for zero, as it does in products.
    is_lost = torch.from_numpy(np.abs(values) < np.finfo(np.float32).tiny) & multiplies_pairs()
    assert not actual[is_lost].any()
    is_kept = ~is_nan & ~is_lost
    assert torch.equal(actual.view(torch.int16)[is_kept], expected.view(torch.int16)[is_kept])


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


def widen_int8(source: int, target: int, count: int) -> None:
    for index in range(0, count, 16):
        store(advance(f32_at(target), index), load(advance(int8_at(source), index)) * splat(unit_of(int8_at(source))))


def widen_e4m3(source: int, target: int, count: int) -> None:
    for index in range(0, count, 16):
        store(advance(f32_at(target), index), load(advance(e4m3_at(source), index)) * splat(unit_of(e4m3_at(source))))


def widen_e5m2(source: int, target: int, count: int) -> None:
    for index in range(0, count, 16):
        store(advance(f32_at(target), index), load(advance(e5m2_at(source), index)) * splat(unit_of(e5m2_at(source))))


def narrow_int8(source: int, target: int, count: int) -> None:
    for index in range(0, count, 16):
        store(advance(int8_at(target), index), load(advance(f32_at(source), index)))


def narrow_e4m3(source: int, target: int, count: int) -> None:
    for index in range(0, count, 16):
        store(advance(e4m3_at(target), index), load(advance(f32_at(source), index)))


def narrow_e5m2(source: int, target: int, count: int) -> None:
    for index in range(0, count, 16):
        store(advance(e5m2_at(target), index), load(advance(f32_at(source), index)))


def transpose_int8(source: int, target: int, _count: int) -> None:
    load_transposed(int8_at(0), i64_at(source), 0, f32_at(target))


def transpose_e4m3(source: int, target: int, _count: int) -> None:
    load_transposed(e4m3_at(0), i64_at(source), 0, f32_at(target))


def transpose_e5m2(source: int, target: int, _count: int) -> None:
    load_transposed(e5m2_at(0), i64_at(source), 0, f32_at(target))


def same_numbers(actual: NDArray[np.generic], expected: NDArray[np.generic]) -> bool:
    """Bit by bit, where any NaN equals any other."""
    is_nan = np.isnan(expected)
    same = np.array_equal(np.isnan(actual), is_nan)
    return same and np.array_equal(actual[~is_nan].view(np.int32), expected[~is_nan].view(np.int32))


@pytest.mark.parametrize(
    ("dtype", "widen", "transpose", "unit"),
    [
        (torch.int8, widen_int8, transpose_int8, 1.0),
        (torch.float8_e4m3fn, widen_e4m3, transpose_e4m3, 256.0),
        (torch.float8_e5m2, widen_e5m2, transpose_e5m2, 1.0),
    ],
    ids=str,
)
def test_every_byte_of_a_quantised_cache_is_read_as_torch_reads_it(
    dtype: torch.dtype, widen: Compiled, transpose: Compiled, unit: float
) -> None:
    every_byte = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(every_byte.copy()).view(dtype).float().numpy()

    values = apply(widen, every_byte, np.float32, 256)
    rows = every_byte.ctypes.data + 16 * np.arange(16)
    columns = np.zeros((16, 64), dtype=np.float32)  # one column of a tile of 64 for each element
    compiled(transpose)(rows.ctypes.data, columns.ctypes.data, 0)

    assert same_numbers(values, expected)
    assert same_numbers((columns[:, :16].T * np.float32(unit)).ravel(), expected)
    assert (columns[:, 16:] == 0).all()


@pytest.mark.parametrize(
    ("dtype", "narrow"),
    [(torch.int8, narrow_int8), (torch.float8_e4m3fn, narrow_e4m3), (torch.float8_e5m2, narrow_e5m2)],
    ids=str,
)
def test_rounding_to_a_byte_equals_torch_bit_for_bit(dtype: torch.dtype, narrow: Compiled) -> None:
    limit = QUANTISED_LIMITS[dtype]
    random = np.random.default_rng(0)
    spread = random.standard_normal(1 << 16) * limit * np.exp2(random.uniform(-30, 0, 1 << 16))
    stored = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype).double()
    numbers = stored[stored.isfinite()].sort().values.numpy()
    ties = (numbers[1:] + numbers[:-1]) / 2
    values = np.clip(np.concatenate([spread, numbers, ties]), -limit, limit).astype(np.float32)
    values = np.concatenate([values, np.nextafter(values, np.float32(0)), np.nextafter(values, np.float32(1e9))])
    values = np.concatenate([values, np.zeros(-len(values) % 16, dtype=np.float32)])

    stored_bytes = apply(narrow, values, np.uint8, len(values))

    wanted = torch.from_numpy(values)
    expected = (wanted.round().clamp(-limit, limit) if dtype == torch.int8 else wanted).to(dtype)
    assert np.array_equal(stored_bytes, expected.view(torch.uint8).numpy())


def tanh_all(source: int, target: int, count: int) -> None:
    for index in range(0, count, 16):
        store(advance(f32_at(target), index), tanh(load(advance(f32_at(source), index))))


def test_tanh_is_within_five_units_in_the_last_place_over_its_whole_range() -> None:
    sizes = np.concatenate([np.linspace(0, 12, 1 << 20), np.logspace(-30, 38, 1 << 12), [0.65, np.inf]])
    arguments = np.concatenate([sizes, -sizes]).astype(np.float32)
    arguments = np.concatenate([arguments, np.zeros(-len(arguments) % 16, dtype=np.float32)])

    values = apply(tanh_all, arguments, np.float32, len(arguments))

    truth = np.tanh(arguments.astype(np.float64))
    assert np.abs(values - truth).max() < 3e-7
    is_large = np.abs(truth) > 1e-37
    assert np.abs(values[is_large] / truth[is_large] - 1).max() < 3e-7
    assert np.isnan(apply(tanh_all, np.full(16, np.nan, dtype=np.float32), np.float32, 16)).all()


def test_the_largest_size_counts_nan_above_infinity_above_numbers() -> None:
    def largest(source: int, target: int, _count: int) -> None:
        store_some(f32_at(target), 1, splat(largest_size(load(f32_at(source)))))

    values = np.linspace(-3, 2, 16).astype(np.float32)
    for lane, value, expected in ((5, -7.5, 7.5), (9, -np.inf, np.inf), (0, np.nan, np.nan)):
        values[lane] = value
        assert np.array_equal(apply(largest, values, np.float32, 0)[:1], [np.float32(expected)], equal_nan=True)
