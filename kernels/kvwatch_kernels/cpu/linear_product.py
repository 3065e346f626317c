"""The matrix product of linear layers: a few rows of x times one panel of the packed weight.

A panel is `PANEL` output features, interleaved so that one step of the depth is one stretch of memory. The sums of up
to `MAX_ROWS` rows, two vectors each, stay in registers while the depth is walked, so that each weight is loaded once
for all of them; where a processor has fewer registers than AVX-512, in parts (`registers.py`). Each element is one
chain of fused multiply-adds in ascending depth that starts at the bias: its bits do not depend on the number of rows.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.typing.templates import signature

from kvwatch_kernels.cpu.compiled import subroutine
from kvwatch_kernels.cpu.elements import F32_POINTER, I32_POINTER
from kvwatch_kernels.cpu.loops import rolled_range
from kvwatch_kernels.cpu.memory import Pointer, prefetch
from kvwatch_kernels.cpu.registers import Part, host_registers, product_parts
from kvwatch_kernels.cpu.vectors import F32_LANES, I32_LANES, I64, LANES, Emitter, broadcast, emitted, emitted_for, fma

PANEL = 2 * LANES
"""Output features of one panel: two vectors of float32, or one of pairs of bfloat16."""
MAX_ROWS = 12
"""Rows of one product: their sums, one step of the panel and a factor take 27 of AVX-512's 32 registers."""
LINE_BYTES = 64
"""One prefetch."""

PanelLoader: TypeAlias = Callable[[ir.Value], list[ir.Value]]
"""Emits vectors of weights of one step of the depth."""

_ROW_OF = {F32_POINTER: PANEL, I32_POINTER: LANES}
"""Elements (float32, or pairs of bfloat16 in 32 bits) in one step of the depth."""


def _vectors_at(builder: ir.IRBuilder, pointer: ir.Value, vector: ir.Type, indices: range) -> list[ir.Value]:
    places = builder.bitcast(pointer, vector.as_pointer())
    return [builder.load(builder.gep(places, [ir.Constant(I64, index)]), align=4) for index in indices]


def split_pairs(builder: ir.IRBuilder, pairs: ir.Value) -> list[ir.Value]:
    """Emit the float32 lanes of sixteen pairs of bfloat16: the lower halves, then the upper ones. Exact."""
    shift = ir.Constant(I32_LANES, [16] * LANES)
    mask = ir.Constant(I32_LANES, [-(1 << 16)] * LANES)
    return [builder.bitcast(bits, F32_LANES) for bits in (builder.shl(pairs, shift), builder.and_(pairs, mask))]


def _panel_loader(builder: ir.IRBuilder, panel: ir.Value, pointer_type: Any, vectors: range) -> PanelLoader:
    row = ir.Constant(I64, _ROW_OF[pointer_type])

    def load(depth: ir.Value) -> list[ir.Value]:
        place = builder.gep(panel, [builder.mul(depth, row)])
        if pointer_type == F32_POINTER:
            return _vectors_at(builder, place, F32_LANES, vectors)
        halves = split_pairs(builder, _vectors_at(builder, place, I32_LANES, range(1))[0])
        return [halves[index] for index in vectors]

    return load


def _emit_prefetch(builder: ir.IRBuilder, first: ir.Value, step: ir.Value, depth: ir.Value, num_lines: int) -> None:
    address = builder.add(first, builder.mul(step, depth))
    for line in range(num_lines):
        prefetch(builder, builder.add(address, ir.Constant(I64, line * LINE_BYTES)))


def _emit_part(
    builder: ir.IRBuilder, part: Part, panel_type: Any, operands: tuple[ir.Value, ...], num_lines: int
) -> None:
    """Emit a part of a product, which asks for `num_lines` lines of memory in each step of the depth."""
    x, x_stride, panel, depth, start, y, y_stride, ahead, ahead_step = operands
    numbers = [ir.Constant(I64, row) for row in part.rows]
    x_rows = [builder.gep(x, [builder.mul(x_stride, number)]) for number in numbers]
    sums = [[cgutils.alloca_once(builder, F32_LANES) for _ in part.vectors] for _ in numbers]
    starts = _vectors_at(builder, start, F32_LANES, part.vectors)
    for row_sums in sums:
        for place, value in zip(row_sums, starts, strict=True):
            builder.store(value, place)
    load = _panel_loader(builder, panel, panel_type, part.vectors)
    with rolled_range(builder, depth) as step:
        weights = load(step)
        _emit_prefetch(builder, ahead, ahead_step, step, num_lines)
        for x_row, row_sums in zip(x_rows, sums, strict=True):
            factor = broadcast(builder, builder.load(builder.gep(x_row, [step])))
            for vector, place in zip(weights, row_sums, strict=True):
                builder.store(fma(builder, factor, vector, builder.load(place)), place)
    for number, row_sums in zip(numbers, sums, strict=True):
        y_row = builder.bitcast(builder.gep(y, [builder.mul(y_stride, number)]), F32_LANES.as_pointer())
        for index, place in zip(part.vectors, row_sums, strict=True):
            builder.store(builder.load(place), builder.gep(y_row, [ir.Constant(I64, index)]), align=4)


def _product(rows: int) -> Emitter:
    """An emitter of the product of `rows` rows; operands as in `multiply_panel`."""

    def product(builder: ir.IRBuilder, sig: Any, *operands: ir.Value) -> None:
        lines = _ROW_OF[sig.args[2]] // LANES
        for place, part in enumerate(product_parts(rows, PANEL // LANES, host_registers())):
            _emit_part(builder, part, sig.args[2], operands, lines if place == 0 else 0)

    product.__name__ = f"linear_product_{rows}"
    before = (F32_POINTER, types.int64)
    after = (types.int64, F32_POINTER, F32_POINTER, types.int64, types.int64, types.int64)
    return emitted_for(*(signature(types.void, *before, panel, *after) for panel in _ROW_OF))(product)


_1, _2, _3, _4, _5, _6, _7, _8, _9, _10, _11, _12 = map(_product, range(1, MAX_ROWS + 1))


@subroutine
def multiply_panel(
    x: Pointer,
    x_stride: int,
    panel: Pointer,
    depth: int,
    start: Pointer,
    y: Pointer,
    y_stride: int,
    ahead: int,
    ahead_step: int,
    rows: int,
) -> None:
    """Compute y = start + x panel over the panel's output features.

    Args:
        x: f32[rows, depth], rows `x_stride` apart.
        x_stride: in elements, as `y_stride`.
        panel: f32[depth, PANEL], or i32[depth, PANEL / 2] pairs of bfloat16.
        depth: input features.
        start: f32[PANEL], where the sums start: the bias.
        y: f32[rows, PANEL], rows `y_stride` apart; overwritten.
        y_stride: see `x_stride`.
        ahead: address from which memory is asked for on the way, since it is needed next.
        ahead_step: bytes of it for each step of the depth.
        rows: 1 to `MAX_ROWS`.
    """
    if rows == 12:
        _12(x, x_stride, panel, depth, start, y, y_stride, ahead, ahead_step)
    elif rows == 11:
        _11(x, x_stride, panel, depth, start, y, y_stride, ahead, ahead_step)
    elif rows == 10:
        _10(x, x_stride, panel, depth, start, y, y_stride, ahead, ahead_step)
    elif rows == 9:
        _9(x, x_stride, panel, depth, start, y, y_stride, ahead, ahead_step)
    elif rows == 8:
        _8(x, x_stride, panel, depth, start, y, y_stride, ahead, ahead_step)
    elif rows == 7:
        _7(x, x_stride, panel, depth, start, y, y_stride, ahead, ahead_step)
    elif rows == 6:
        _6(x, x_stride, panel, depth, start, y, y_stride, ahead, ahead_step)
    elif rows == 5:
        _5(x, x_stride, panel, depth, start, y, y_stride, ahead, ahead_step)
    elif rows == 4:
        _4(x, x_stride, panel, depth, start, y, y_stride, ahead, ahead_step)
    elif rows == 3:
        _3(x, x_stride, panel, depth, start, y, y_stride, ahead, ahead_step)
    elif rows == 2:
        _2(x, x_stride, panel, depth, start, y, y_stride, ahead, ahead_step)
    else:
        _1(x, x_stride, panel, depth, start, y, y_stride, ahead, ahead_step)


@emitted(types.void, I32_POINTER, types.int64, F32_POINTER)
def widen_panel(builder: ir.IRBuilder, panel: ir.Value, depth: ir.Value, target: ir.Value) -> None:
    """`widen_panel(panel, depth, target)`: write a panel of pairs of bfloat16 as f32[depth, PANEL]."""
    load = _panel_loader(builder, panel, I32_POINTER, range(PANEL // LANES))
    places = builder.bitcast(target, F32_LANES.as_pointer())
    with cgutils.for_range(builder, depth) as loop:
        for index, vector in enumerate(load(loop.index)):
            place = builder.add(builder.mul(loop.index, ir.Constant(I64, 2)), ir.Constant(I64, index))
            builder.store(vector, builder.gep(places, [place]), align=4)
