"""Where a thread keeps what it works on: one stretch of memory, cut into arrays.

`padded` is the head size rounded up to a multiple of `NARROW`; `rows` is the call's `TILE_ROWS`, a multiple of 16.
"""

from typing import NamedTuple

import numpy as np
from numba.extending import register_jitable

from kvwatch_kernels.cpu.compiled import subroutine
from kvwatch_kernels.cpu.items import CURSOR_FIELDS
from kvwatch_kernels.cpu.memory import Pointer, f32_at, i64_at, write
from kvwatch_kernels.cpu.micro_gemm import NARROW, TILE
from kvwatch_kernels.cpu.vectors import LANES

_ADDRESS_BYTES = 8
_FLOAT_BYTES = 4
_INTEGER_BYTES = 4 * TILE * _ADDRESS_BYTES + 64
"""The addresses, then the cursor in a cache line of its own."""
assert CURSOR_FIELDS * _ADDRESS_BYTES <= 64


class Scratch(NamedTuple):
    """One thread's arrays."""

    addresses: Pointer
    """i64[2, 2, TILE]: (tile is even or odd, key or value, token)."""
    cursor: Pointer
    """i64[CURSOR_FIELDS]: the work item that this thread took; see `items.py`."""
    keys: Pointer
    """f32[padded, TILE]: the tile's keys, transposed."""
    values: Pointer
    """f32[TILE, padded]"""
    scales: Pointer
    """f32[2, TILE + LANES]: of the tile's keys, then of its values; the last vector of each is room to write beyond."""
    queries: Pointer
    """f32[rows, padded], scaled."""
    scores: Pointer
    """f32[rows, TILE], then weights."""
    sums: Pointer
    """f32[rows, padded]: values weighted and summed up over this split."""
    largest: Pointer
    """f32[rows]: largest score of this split."""
    total: Pointer
    """f32[rows]: sum of this split's weights."""
    merged_sums: Pointer
    """f32[rows, padded]: over the splits before this one."""
    merged_largest: Pointer
    """f32[rows]"""
    merged_total: Pointer
    """f32[rows]"""
    rescale: Pointer
    """f32[rows]: factor for what was summed up before this tile."""
    ones: Pointer
    """f32[rows], all one."""


class Worker(NamedTuple):
    """What one thread works with throughout a call."""

    params: Pointer
    """The call's arguments; see `fields.py`."""
    like: Pointer
    """Pointer of the cache's kind of element; only its type is used."""
    padded: int
    """Padded head size."""
    scratch: Scratch


@register_jitable
def padded_head_dim(head_dim: int) -> int:
    """Return the head size rounded up to whole narrow strips."""
    return -(-head_dim // NARROW) * NARROW


def scratch_bytes(rows: int, padded: int) -> int:
    """Bytes of one thread's scratch, a multiple of 64. Must agree with `cut_scratch`."""
    floats = 2 * TILE * padded + 2 * (TILE + LANES) + 3 * rows * padded + rows * TILE + 6 * rows
    return _INTEGER_BYTES + floats * _FLOAT_BYTES


@subroutine
def cut_scratch(base: int, rows: int, padded: int) -> Scratch:
    """Cut the scratch at address `base` into arrays; fill the ones and set the cursor to the start."""
    cursor = i64_at(base + 4 * TILE * _ADDRESS_BYTES)
    for field in range(CURSOR_FIELDS):
        write(cursor, field, 0)
    keys = base + _INTEGER_BYTES
    values = keys + TILE * padded * _FLOAT_BYTES
    scales = values + TILE * padded * _FLOAT_BYTES
    queries = scales + 2 * (TILE + LANES) * _FLOAT_BYTES
    matrix = rows * padded * _FLOAT_BYTES
    sums = queries + matrix
    merged = sums + matrix
    scores = merged + matrix
    column = rows * _FLOAT_BYTES
    largest = scores + rows * TILE * _FLOAT_BYTES
    ones = f32_at(largest + 5 * column)
    for row in range(rows):
        write(ones, row, np.float32(1.0))
    return Scratch(
        i64_at(base),
        cursor,
        f32_at(keys),
        f32_at(values),
        f32_at(scales),
        f32_at(queries),
        f32_at(scores),
        f32_at(sums),
        f32_at(largest),
        f32_at(largest + column),
        f32_at(merged),
        f32_at(largest + 2 * column),
        f32_at(largest + 3 * column),
        f32_at(largest + 4 * column),
        ones,
    )
