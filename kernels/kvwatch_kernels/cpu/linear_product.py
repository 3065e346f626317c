"""The matrix product of linear layers: a few rows of x times one panel of the packed weight.

A panel is `PANEL` output features, interleaved so that one step of the depth is one stretch of memory. The sums of up
to `MAX_ROWS` rows, two vectors each, stay in registers while the depth is walked, so that each weight is loaded once
for all of them; where a processor has fewer registers than AVX-512, in parts (`registers.py`). Each element is one
chain of fused multiply-adds in ascending depth that starts at the bias: its bits do not depend on the number of rows.

Where x is bfloat16 too and the processor multiplies pairs of it (AVX512-BF16), a step of the depth is two elements: the
products of a pair are summed by one instruction, in its own rounding, and the chain is one of pairs.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.typing.templates import signature

from kvwatch_kernels.cpu.bf16 import narrow_to_bf16
from kvwatch_kernels.cpu.compiled import subroutine
from kvwatch_kernels.cpu.elements import BF16_POINTER, F32_POINTER, I32_POINTER
from kvwatch_kernels.cpu.loops import rolled_range
from kvwatch_kernels.cpu.memory import Pointer, prefetch
from kvwatch_kernels.cpu.pairs import add_pairs
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

Operands: TypeAlias = tuple[Any, Any, Any]
"""Numba types of x, panel and y."""

_CASES: tuple[Operands, ...] = (
    (F32_POINTER, F32_POINTER, F32_POINTER),
    (F32_POINTER, I32_POINTER, F32_POINTER),
    (I32_POINTER, I32_POINTER, F32_POINTER),
    (I32_POINTER, I32_POINTER, BF16_POINTER),
)


def _is_paired(case: Operands) -> bool:
    """Whether x is pairs of bfloat16 in 32 bits, as the panel then is: one pair of features' neighbours a lane."""
    return bool(case[0] == I32_POINTER)


def _row_of(case: Operands) -> int:
    """Elements of a panel (float32, or pairs of bfloat16 in 32 bits) in one step of the depth."""
    return LANES if case[1] == I32_POINTER and not _is_paired(case) else PANEL


def _vectors_at(builder: ir.IRBuilder, pointer: ir.Value, vector: ir.Type, indices: range) -> list[ir.Value]:
    places = builder.bitcast(pointer, vector.as_pointer())
    return [builder.load(builder.gep(places, [ir.Constant(I64, index)]), align=4) for index in indices]


def split_pairs(builder: ir.IRBuilder, pairs: ir.Value) -> list[ir.Value]:
    """Emit the float32 lanes of sixteen pairs of bfloat16: the lower halves, then the upper ones. Exact."""
    shift = ir.Constant(I32_LANES, [16] * LANES)
    mask = ir.Constant(I32_LANES, [-(1 << 16)] * LANES)
    return [builder.bitcast(bits, F32_LANES) for bits in (builder.shl(pairs, shift), builder.and_(pairs, mask))]


def _panel_loader(builder: ir.IRBuilder, panel: ir.Value, case: Operands, vectors: range) -> PanelLoader:
    row = ir.Constant(I64, _row_of(case))

    def load(depth: ir.Value) -> list[ir.Value]:
        place = builder.gep(panel, [builder.mul(depth, row)])
        if case[1] == F32_POINTER or _is_paired(case):
            return _vectors_at(builder, place, I32_LANES if _is_paired(case) else F32_LANES, vectors)
        halves = split_pairs(builder, _vectors_at(builder, place, I32_LANES, range(1))[0])
        return [halves[index] for index in vectors]

    return load


def _emit_prefetch(builder: ir.IRBuilder, first: ir.Value, step: ir.Value, depth: ir.Value, num_lines: int) -> None:
    address = builder.add(first, builder.mul(step, depth))
    for line in range(num_lines):
        prefetch(builder, builder.add(address, ir.Constant(I64, line * LINE_BYTES)))


def _emit_part(
    builder: ir.IRBuilder, part: Part, case: Operands, operands: tuple[ir.Value, ...], num_lines: int
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
    load = _panel_loader(builder, panel, case, part.vectors)
    add = add_pairs if _is_paired(case) else _add_product
    with rolled_range(builder, depth) as step:
        weights = load(step)
        _emit_prefetch(builder, ahead, ahead_step, step, num_lines)
        for x_row, row_sums in zip(x_rows, sums, strict=True):
            factor = broadcast(builder, builder.load(builder.gep(x_row, [step])))
            for vector, place in zip(weights, row_sums, strict=True):
                builder.store(add(builder, builder.load(place), factor, vector), place)
    for number, row_sums in zip(numbers, sums, strict=True):
        y_row = builder.gep(y, [builder.mul(y_stride, number)])
        for index, place in zip(part.vectors, row_sums, strict=True):
            _store_sums(builder, builder.load(place), y_row, index, is_narrow=case[2] == BF16_POINTER)


def _add_product(builder: ir.IRBuilder, sums: ir.Value, factor: ir.Value, vector: ir.Value) -> ir.Value:
    return fma(builder, factor, vector, sums)


def _store_sums(builder: ir.IRBuilder, sums: ir.Value, y_row: ir.Value, index: int, *, is_narrow: bool) -> None:
    """Emit the store of vector `index` of a row."""
    values = narrow_to_bf16(builder, sums) if is_narrow else sums
    places = builder.bitcast(y_row, values.type.as_pointer())
    builder.store(values, builder.gep(places, [ir.Constant(I64, index)]), align=2 if is_narrow else 4)


def _product(rows: int) -> Emitter:
    """An emitter of the product of `rows` rows; operands as in `multiply_panel`."""

    def product(builder: ir.IRBuilder, sig: Any, *operands: ir.Value) -> None:
        case = (sig.args[0], sig.args[2], sig.args[5])
        lines = _row_of(case) // LANES
        for place, part in enumerate(product_parts(rows, PANEL // LANES, host_registers())):
            _emit_part(builder, part, case, operands, lines if place == 0 else 0)

    product.__name__ = f"linear_product_{rows}"
    number = types.int64
    signatures = (
        signature(types.void, x, number, panel, number, F32_POINTER, y, number, number, number)
        for x, panel, y in _CASES
    )
    return emitted_for(*signatures)(product)


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
        x: f32[rows, depth], rows `x_stride` apart; or i32[rows, depth] pairs of bfloat16.
        x_stride: in elements, as `y_stride`.
        panel: f32[depth, PANEL], or i32[depth, PANEL / 2] pairs of bfloat16, of features of both halves; where x is
            pairs, i32[depth, PANEL] pairs of neighbours in the depth.
        depth: input features, or pairs of them.
        start: f32[PANEL], where the sums start: the bias.
        y: f32[rows, PANEL], or bfloat16 where x is; rows `y_stride` apart; overwritten.
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
    load = _panel_loader(builder, panel, (F32_POINTER, I32_POINTER, F32_POINTER), range(PANEL // LANES))
    places = builder.bitcast(target, F32_LANES.as_pointer())
    with cgutils.for_range(builder, depth) as loop:
        for index, vector in enumerate(load(loop.index)):
            place = builder.add(builder.mul(loop.index, ir.Constant(I64, 2)), ir.Constant(I64, index))
            builder.store(vector, builder.gep(places, [place]), align=4)
