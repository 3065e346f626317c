"""Compiled search for each row's largest element, and whether all of a row are finite numbers."""

from functools import cache

import numpy as np
import numpy.typing as npt
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
    pointer_like,
    read,
    read_float,
    store,
    write,
)
from kvwatch_kernels.cpu.rows import FIRST_ARGUMENT, rows_call, take_rows
from kvwatch_kernels.cpu.vectors import LANES, fma, is_less, lane_numbers, select, splat, sum_lanes

# Elements of a row; address and row stride in bytes of the rows; addresses of i64[num_rows] for the places and for
# whether all is finite, and of f32[num_rows, 2 * LANES], scratch.
_WIDTH, _ROWS, _ROW_STRIDE, _PLACES, _ARE_FINITE, _SCRATCH = range(FIRST_ARGUMENT, FIRST_ARGUMENT + 6)

LARGEST_WIDTH_LIMIT = 1 << 24
"""Wider rows have places that no float32 counts."""

Int64Array = npt.NDArray[np.int64]


@subroutine
def search_row(row: Pointer, width: int, scratch: Pointer) -> tuple[int, int]:
    """Find the first of the largest elements.

    Args:
        row: T[width].
        width: at least 1.
        scratch: f32[2 * LANES].

    Returns:
        Its place, and 1 if all elements are finite, else 0; the place then means nothing.
    """
    zero, step = splat(np.float32(0.0)), splat(np.float32(LANES))
    best = splat(np.float32(-np.inf))
    place, places, rest = zero, lane_numbers(), zero
    whole = width // LANES * LANES
    for offset in range(0, whole, LANES):
        lanes = load(advance(row, offset))
        is_better = is_less(best, lanes)
        best, place = select(is_better, lanes, best), select(is_better, places, place)
        # A number times zero is zero, and nothing else is.
        rest = fma(lanes, zero, rest)
        places = places + step
    store(scratch, best)
    store(advance(scratch, LANES), place)
    largest, found, trace = np.float32(-np.inf), 0, sum_lanes(rest)
    for lane in range(LANES):
        value, at = read(scratch, lane), int(read(scratch, LANES + lane))
        if value > largest or (value == largest and at < found):
            largest, found = value, at
    for index in range(whole, width):
        value = read_float(row, index)
        trace += value * np.float32(0.0)
        if value > largest:
            largest, found = value, index
    return found, 1 if trace == np.float32(0.0) else 0


@inlined
def search_rows(params: Pointer, like: Pointer) -> None:
    """What every thread does: search rows until none is left; `like` is a pointer of their dtype."""
    places, are_finite = i64_at(read(params, _PLACES)), i64_at(read(params, _ARE_FINITE))
    first, end = take_rows(params)
    while first < end:
        for row in range(first, end):
            source = pointer_like(like, read(params, _ROWS) + row * read(params, _ROW_STRIDE))
            scratch = advance(f32_at(read(params, _SCRATCH)), row * 2 * LANES)
            place, is_finite = search_row(source, read(params, _WIDTH), scratch)
            write(places, row, place)
            write(are_finite, row, is_finite)
        first, end = take_rows(params)


@cache
def largest_code(dtype: torch.dtype) -> int:
    """Address of the compiled search in float32 or bfloat16 (compiled, or loaded, once in a process)."""
    digest = source_digest()

    def run_f32(address: int) -> None:
        digest  # noqa: B018  # part of the cache's key
        search_rows(i64_at(address), f32_at(address))

    def run_bf16(address: int) -> None:
        digest  # noqa: B018
        search_rows(i64_at(address), bf16_at(address))

    return entry_point(types.void(types.int64), run_f32 if dtype == torch.float32 else run_bf16)


def largest_call(rows: Tensor, places: Int64Array, are_finite: Int64Array, scratch: Tensor) -> KernelCall:
    """Lay out the search.

    Args:
        rows: T[num_rows, width], CPU, last dim contiguous, 1 to `LARGEST_WIDTH_LIMIT` wide.
        places: i64[num_rows], receives the place of the first of each row's largest elements.
        are_finite: i64[num_rows], receives 1 where all of a row are finite, else 0: its place then means nothing.
        scratch: f32[num_rows, 2 * LANES].
    """
    num_rows, width = rows.shape
    arguments = (
        *(width, rows.data_ptr(), rows.stride(0) * rows.element_size()),
        *(places.ctypes.data, are_finite.ctypes.data, scratch.data_ptr()),
    )
    return rows_call(largest_code(rows.dtype), num_rows, width, arguments)
