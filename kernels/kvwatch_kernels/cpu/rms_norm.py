"""Compiled RMS norm of rows, with the residual sum that comes before it."""

from functools import cache, lru_cache

import numpy as np
import torch
from numba import types
from torch import Tensor

from kvwatch_kernels.cpu.call import KernelCall
from kvwatch_kernels.cpu.compiled import entry_point, inlined, source_digest, subroutine
from kvwatch_kernels.cpu.memory import (
    Pointer,
    advance,
    bf16_at,
    f32_at,
    i64_at,
    load,
    load_some,
    pointer_like,
    read,
    store,
    store_some,
)
from kvwatch_kernels.cpu.rows import ELEMENTS_PER_ITEM, FIRST_ARGUMENT, float_bits, rows_call, take_rows
from kvwatch_kernels.cpu.vectors import LANES, Vector, float_of_bits, fma, splat, sum_lanes

(
    _WIDTH,
    _EPS,  # the bits of a float32
    _X,  # address of x [num_rows, width], then its row stride in bytes
    _X_STRIDE,
    _ADDED,  # address of added, 0 for none; then its row stride in bytes
    _ADDED_STRIDE,
    _WEIGHT,  # address of weight [width]
    _OUT,  # address of out [num_rows, width]; then its row stride in bytes
    _OUT_STRIDE,
) = range(FIRST_ARGUMENT, FIRST_ARGUMENT + 9)


@subroutine
def add_row(x: Pointer, added: Pointer, width: int) -> None:
    """X += added, rounded to the dtype of x."""
    whole = width // LANES * LANES
    for offset in range(0, whole, LANES):
        store(advance(x, offset), load(advance(x, offset)) + load(advance(added, offset)))
    if whole < width:
        rest = width - whole
        total = load_some(advance(x, whole), rest) + load_some(advance(added, whole), rest)
        store_some(advance(x, whole), rest, total)


@subroutine
def inverse_rms(x: Pointer, width: int, eps: float) -> Vector:
    """1 / sqrt(mean of squares + eps) in every lane.

    Four sums run beside each other: one alone would wait for each multiplication before the next.
    """
    sums_0 = sums_1 = sums_2 = sums_3 = splat(np.float32(0.0))
    whole = width // LANES * LANES
    wide = width // (4 * LANES) * (4 * LANES)
    for offset in range(0, wide, 4 * LANES):
        part_0, part_1 = load(advance(x, offset)), load(advance(x, offset + LANES))
        part_2, part_3 = load(advance(x, offset + 2 * LANES)), load(advance(x, offset + 3 * LANES))
        sums_0, sums_1 = fma(part_0, part_0, sums_0), fma(part_1, part_1, sums_1)
        sums_2, sums_3 = fma(part_2, part_2, sums_2), fma(part_3, part_3, sums_3)
    for offset in range(wide, whole, LANES):
        part = load(advance(x, offset))
        sums_0 = fma(part, part, sums_0)
    if whole < width:
        part = load_some(advance(x, whole), width - whole)
        sums_1 = fma(part, part, sums_1)
    mean = sum_lanes((sums_0 + sums_1) + (sums_2 + sums_3)) / np.float32(width)
    inverse: Vector = splat(np.float32(1.0) / np.sqrt(mean + eps))
    return inverse


@subroutine
def scale_row(x: Pointer, scale: Vector, weight: Pointer, width: int, out: Pointer) -> None:
    """Out = x * scale * weight, rounded once."""
    whole = width // LANES * LANES
    for offset in range(0, whole, LANES):
        store(advance(out, offset), load(advance(x, offset)) * scale * load(advance(weight, offset)))
    if whole < width:
        rest = width - whole
        last = load_some(advance(x, whole), rest) * scale * load_some(advance(weight, whole), rest)
        store_some(advance(out, whole), rest, last)


@inlined
def normalise_rows(params: Pointer, like: Pointer) -> None:
    """What every thread does: normalise rows until none is left; `like` is a pointer of their dtype."""
    width = read(params, _WIDTH)
    eps = float_of_bits(read(params, _EPS))
    weight = pointer_like(like, read(params, _WEIGHT))
    first, end = take_rows(params)
    while first < end:
        for row in range(first, end):
            x = pointer_like(like, read(params, _X) + row * read(params, _X_STRIDE))
            out = pointer_like(like, read(params, _OUT) + row * read(params, _OUT_STRIDE))
            if read(params, _ADDED) != 0:
                add_row(x, pointer_like(like, read(params, _ADDED) + row * read(params, _ADDED_STRIDE)), width)
            scale_row(x, inverse_rms(x, width, eps), weight, width, out)
        first, end = take_rows(params)


@cache
def rms_norm_code(dtype: torch.dtype) -> int:
    """Address of the compiled norm for float32 or bfloat16 (compiled, or loaded, once in a process)."""
    digest = source_digest()

    def run_f32(address: int) -> None:
        digest  # noqa: B018  # part of the cache's key
        normalise_rows(i64_at(address), f32_at(address))

    def run_bf16(address: int) -> None:
        digest  # noqa: B018
        normalise_rows(i64_at(address), bf16_at(address))

    return entry_point(types.void(types.int64), run_f32 if dtype == torch.float32 else run_bf16)


_eps_bits = lru_cache(maxsize=64)(float_bits)


def rms_norm_call(
    x: Tensor,
    weight: Tensor,
    eps: float,
    added: Tensor | None,
    out: Tensor,
    elements_per_item: int = ELEMENTS_PER_ITEM,
) -> KernelCall:
    """Lay out the norm of checked arguments; see `kvwatch_kernels.rms_norm`.

    Args:
        x: T[num_rows, width], CPU, last dim contiguous; `added` is added to it.
        weight: T[width], contiguous.
        eps: added to the mean of squares.
        added: T[num_rows, width], last dim contiguous, or none.
        out: T[num_rows, width], last dim contiguous; written.
        elements_per_item: see `rows_call`.
    """
    num_rows, width = x.shape
    size = x.element_size()
    arguments = (
        *(width, _eps_bits(eps)),
        *(x.data_ptr(), x.stride(0) * size),
        *((0, 0) if added is None else (added.data_ptr(), added.stride(0) * size)),
        weight.data_ptr(),
        *(out.data_ptr(), out.stride(0) * size),
    )
    return rows_call(rms_norm_code(x.dtype), num_rows, width, arguments, elements_per_item)


def compiled_rms_norm(x: Tensor, weight: Tensor, eps: float, added: Tensor | None, out: Tensor) -> None:
    """Run the compiled norm on checked arguments; see `rms_norm_call`."""
    rms_norm_call(x, weight, eps, added, out).run()
