"""Compiled SiLU of one half of each row times the other half."""

from functools import cache

import numpy as np
import torch
from numba import types
from torch import Tensor

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
    rounded_like,
    store,
    store_some,
)
from kvwatch_kernels.cpu.rows import FIRST_ARGUMENT, call_on_rows, take_rows
from kvwatch_kernels.cpu.vectors import LANES, Vector, exp, is_less, select, splat

# Elements of a row of the output; then addresses of input and output, each with its row stride in bytes.
_WIDTH, _INPUT, _INPUT_STRIDE, _OUT, _OUT_STRIDE = range(FIRST_ARGUMENT, FIRST_ARGUMENT + 5)


@subroutine
def silu(x: Vector) -> Vector:
    """X / (1 + exp(-x)), with the exponential of a negative number on both sides of zero."""
    zero = splat(np.float32(0.0))
    is_negative = is_less(x, zero)
    power = exp(select(is_negative, x, zero - x))
    value: Vector = select(is_negative, x * power, x) / (splat(np.float32(1.0)) + power)
    return value


@inlined
def gate_row(row: Pointer, width: int, out: Pointer) -> None:
    """Out = silu(row[:width]) * row[width:], each of both operations rounded to the dtype."""
    whole = width // LANES * LANES
    for offset in range(0, whole, LANES):
        gate = rounded_like(row, silu(load(advance(row, offset))))
        store(advance(out, offset), gate * load(advance(row, width + offset)))
    if whole < width:
        rest = width - whole
        gate = rounded_like(row, silu(load_some(advance(row, whole), rest)))
        store_some(advance(out, whole), rest, gate * load_some(advance(row, width + whole), rest))


@inlined
def gate_rows(params: Pointer, like: Pointer) -> None:
    """What every thread does: gate rows until none is left; `like` is a pointer of their dtype."""
    first, end = take_rows(params)
    while first < end:
        for row in range(first, end):
            source = pointer_like(like, read(params, _INPUT) + row * read(params, _INPUT_STRIDE))
            target = pointer_like(like, read(params, _OUT) + row * read(params, _OUT_STRIDE))
            gate_row(source, read(params, _WIDTH), target)
        first, end = take_rows(params)


@cache
def silu_and_multiply_code(dtype: torch.dtype) -> int:
    """Address of the compiled activation for float32 or bfloat16 (compiled, or loaded, once in a process)."""
    digest = source_digest()

    def run_f32(address: int) -> None:
        digest  # noqa: B018  # part of the cache's key
        gate_rows(i64_at(address), f32_at(address))

    def run_bf16(address: int) -> None:
        digest  # noqa: B018
        gate_rows(i64_at(address), bf16_at(address))

    return entry_point(types.void(types.int64), run_f32 if dtype == torch.float32 else run_bf16)


def compiled_silu_and_multiply(gate_up: Tensor, out: Tensor) -> None:
    """Run the compiled activation on checked arguments; see `kvwatch_kernels.activation`.

    Args:
        gate_up: T[num_rows, 2 * width], CPU, last dim contiguous.
        out: T[num_rows, width], last dim contiguous; written.
    """
    num_rows, width = out.shape
    size = out.element_size()
    arguments = (
        *(width, gate_up.data_ptr(), gate_up.stride(0) * size),
        *(out.data_ptr(), out.stride(0) * size),
    )
    call_on_rows(silu_and_multiply_code(out.dtype), num_rows, 2 * width, arguments)
