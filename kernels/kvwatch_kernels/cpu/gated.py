"""Compiled SiLU, or GELU by its tanh formula, of one half of each row times the other half."""

import math
from functools import cache

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
    rounded_like,
    store,
    store_some,
)
from kvwatch_kernels.cpu.rows import ELEMENTS_PER_ITEM, FIRST_ARGUMENT, rows_call, take_rows
from kvwatch_kernels.cpu.vectors import LANES, Vector, exp, is_less, select, splat

# Elements of a row of the output; then addresses of input and output, each with its row stride in bytes.
# The last says which activation: 0 is SiLU, 1 GELU.
_WIDTH, _INPUT, _INPUT_STRIDE, _OUT, _OUT_STRIDE, _IS_GELU = range(FIRST_ARGUMENT, FIRST_ARGUMENT + 6)

_GELU_LINEAR = np.float32(2 * math.sqrt(2 / math.pi))
_GELU_CUBIC = np.float32(0.044715)


@subroutine
def times_sigmoid(x: Vector, t: Vector) -> Vector:
    """X / (1 + exp(-t)), with the exponential of a negative number on both sides of zero."""
    zero = splat(np.float32(0.0))
    is_negative = is_less(t, zero)
    power = exp(select(is_negative, t, zero - t))
    value: Vector = select(is_negative, x * power, x) / (splat(np.float32(1.0)) + power)
    return value


@subroutine
def activation(x: Vector, is_gelu: int) -> Vector:
    """SiLU, or x / 2 * (1 + tanh(u)), which is x times the sigmoid of 2 u."""
    t = x
    if is_gelu:
        t = splat(_GELU_LINEAR) * (x + splat(_GELU_CUBIC) * x * x * x)
    value: Vector = times_sigmoid(x, t)
    return value


@inlined
def gate_row(row: Pointer, width: int, out: Pointer, is_gelu: int) -> None:
    """Out = activation(row[:width]) * row[width:], each of both operations rounded to the dtype."""
    whole = width // LANES * LANES
    for offset in range(0, whole, LANES):
        gate = rounded_like(row, activation(load(advance(row, offset)), is_gelu))
        store(advance(out, offset), gate * load(advance(row, width + offset)))
    if whole < width:
        rest = width - whole
        gate = rounded_like(row, activation(load_some(advance(row, whole), rest), is_gelu))
        store_some(advance(out, whole), rest, gate * load_some(advance(row, width + whole), rest))


@inlined
def gate_rows(params: Pointer, like: Pointer) -> None:
    """What every thread does: gate rows until none is left; `like` is a pointer of their dtype."""
    first, end = take_rows(params)
    while first < end:
        for row in range(first, end):
            source = pointer_like(like, read(params, _INPUT) + row * read(params, _INPUT_STRIDE))
            target = pointer_like(like, read(params, _OUT) + row * read(params, _OUT_STRIDE))
            gate_row(source, read(params, _WIDTH), target, read(params, _IS_GELU))
        first, end = take_rows(params)


@cache
def gated_code(dtype: torch.dtype) -> int:
    """Address of the compiled activations for float32 or bfloat16 (compiled, or loaded, once in a process)."""
    digest = source_digest()

    def run_f32(address: int) -> None:
        digest  # noqa: B018  # part of the cache's key
        gate_rows(i64_at(address), f32_at(address))

    def run_bf16(address: int) -> None:
        digest  # noqa: B018
        gate_rows(i64_at(address), bf16_at(address))

    return entry_point(types.void(types.int64), run_f32 if dtype == torch.float32 else run_bf16)


def compiled_silu_and_multiply(gate_up: Tensor, out: Tensor) -> None:
    """Run the compiled SiLU; see `gated_call`."""
    gated_call(gate_up, out, is_gelu=False).run()


def compiled_gelu_tanh_and_multiply(gate_up: Tensor, out: Tensor) -> None:
    """Run the compiled GELU; see `gated_call`."""
    gated_call(gate_up, out, is_gelu=True).run()


def gated_call(
    gate_up: Tensor, out: Tensor, *, is_gelu: bool, elements_per_item: int = ELEMENTS_PER_ITEM
) -> KernelCall:
    """Lay out an activation of checked arguments; see `kvwatch_kernels.activation`.

    Args:
        gate_up: T[num_rows, 2 * width], CPU, last dim contiguous.
        out: T[num_rows, width], last dim contiguous; written.
        is_gelu: GELU instead of SiLU.
        elements_per_item: see `rows_call`.
    """
    num_rows, width = out.shape
    size = out.element_size()
    arguments = (
        *(width, gate_up.data_ptr(), gate_up.stride(0) * size),
        *(out.data_ptr(), out.stride(0) * size),
        int(is_gelu),
    )
    return rows_call(gated_code(out.dtype), num_rows, 2 * width, arguments, elements_per_item)
