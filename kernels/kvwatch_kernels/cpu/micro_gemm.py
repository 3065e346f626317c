"""The small matrix product that both halves of attention are made of: scores = Q K and sums = P V.

Up to four rows of A times a strip of B, two or four vectors wide, stay in registers while the depth is walked: in
parts, where a processor has fewer of them than AVX-512 (`registers.py`). Each element is one chain of fused
multiply-adds in ascending depth, so its bits depend neither on the number of rows nor on the width of the strip. All
operands are float32 scratch; scores of bfloat16 may be made of pairs instead (`pairs.py`).
"""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.typing.templates import signature

from kvwatch_kernels.cpu.compiled import subroutine
from kvwatch_kernels.cpu.elements import ELEMENT_POINTERS, ELEMENTS, F32_POINTER, I32_POINTER, I64_POINTER
from kvwatch_kernels.cpu.memory import CACHE_LINE_BYTES, Pointer, emit_load, prefetch
from kvwatch_kernels.cpu.pairs import add_pairs
from kvwatch_kernels.cpu.registers import Part, host_registers, product_parts
from kvwatch_kernels.cpu.vectors import (
    F32_LANES,
    I32_LANES,
    I64,
    LANES,
    Emitter,
    broadcast,
    emitted,
    emitted_for,
    fma,
    lanes_of,
)

TILE = 4 * LANES
"""Token positions in one tile. Part of the reduction order: changing it changes bits."""
NARROW, WIDE = 2 * LANES, 4 * LANES
"""Floats in one row of a strip. Four rows of a wide one, the strip and a factor take 21 of AVX-512's 32 registers."""
MAX_ROWS = 4
"""Rows that one product computes."""


def _vector_at(builder: ir.IRBuilder, pointer: ir.Value, index: int) -> ir.Value:
    return builder.gep(builder.bitcast(pointer, F32_LANES.as_pointer()), [ir.Constant(I64, index)])


def _emit_chains(
    builder: ir.IRBuilder, a_rows: list[ir.Value], load_b: Any, vectors: range, depth: ir.Value, sums: Any
) -> None:
    """Emit `sums[row][vector] += A[row, k] * B[k, vector]` for k = 0 to depth - 1; `load_b(k, vector)` emits B.

    A and B are float32, or pairs of bfloat16 in 32 bits.
    """
    with cgutils.for_range(builder, depth) as loop:
        strip = [load_b(loop.index, index) for index in vectors]
        for a_row, row_sums in zip(a_rows, sums, strict=True):
            factor = broadcast(builder, builder.load(builder.gep(a_row, [loop.index])))
            for vector, place in zip(strip, row_sums, strict=True):
                before = builder.load(place)
                is_paired = vector.type == I32_LANES
                after = (
                    add_pairs(builder, before, factor, vector) if is_paired else fma(builder, factor, vector, before)
                )
                builder.store(after, place)


_OPERANDS = (F32_POINTER, types.int64, F32_POINTER, types.int64, types.int64, F32_POINTER, types.int64)


def _emit_product(
    builder: ir.IRBuilder, rows: int, width: int, operands: tuple[Any, ...], scales: ir.Value | None
) -> None:
    """Emit C = A B, or C = diag(scales) C + A B; operands as in `multiply_onto_wide`."""
    # One copy of each product is enough: inlining them into every caller costs seconds of compile time.
    builder.function.attributes.add("noinline")
    for part in product_parts(rows, width // LANES, host_registers()):
        _emit_part(builder, part, operands, scales)


def _emit_part(builder: ir.IRBuilder, part: Part, operands: tuple[Any, ...], scales: ir.Value | None) -> None:
    a, a_stride, load_b, depth, c, c_stride = operands
    numbers = [ir.Constant(I64, row) for row in part.rows]
    a_rows = [builder.gep(a, [builder.mul(a_stride, number)]) for number in numbers]
    c_rows = [builder.gep(c, [builder.mul(c_stride, number)]) for number in numbers]
    sums = [[cgutils.alloca_once(builder, F32_LANES) for _ in part.vectors] for _ in numbers]
    for number, c_row, row_sums in zip(numbers, c_rows, sums, strict=True):
        for index, place in zip(part.vectors, row_sums, strict=True):
            start = lanes_of(0.0)
            if scales is not None:
                scale = broadcast(builder, builder.load(builder.gep(scales, [number])))
                start = builder.fmul(builder.load(_vector_at(builder, c_row, index), align=4), scale)
            builder.store(start, place)
    _emit_chains(builder, a_rows, load_b, part.vectors, depth, sums)
    for c_row, row_sums in zip(c_rows, sums, strict=True):
        for index, place in zip(part.vectors, row_sums, strict=True):
            builder.store(builder.load(place), _vector_at(builder, c_row, index), align=4)


def _strided_rows(builder: ir.IRBuilder, b: ir.Value, stride: ir.Value, lanes: ir.Type = F32_LANES) -> Any:
    """Loader of B from rows `stride` apart, of float32 or of pairs."""

    def load_b(depth: ir.Value, index: int) -> ir.Value:
        row = builder.bitcast(builder.gep(b, [builder.mul(depth, stride)]), lanes.as_pointer())
        return builder.load(builder.gep(row, [ir.Constant(I64, index)]), align=4)

    return load_b


def _rows_at(
    builder: ir.IRBuilder, addresses: ir.Value, ahead: ir.Value, offset: ir.Value, like: ir.Value, like_type: Any
) -> Any:
    """Loader of B from rows of `like`'s type at the given addresses, `offset` elements on.

    With each row it asks for one that is needed later, so that memory is never idle and never asked for much at once.
    """
    row_lines = WIDE * ELEMENTS[like_type].num_bytes // CACHE_LINE_BYTES

    def load_b(depth: ir.Value, index: int) -> ir.Value:
        if index == 0:
            later = builder.inttoptr(builder.load(builder.gep(ahead, [depth])), like.type)
            first = builder.ptrtoint(builder.gep(later, [offset]), I64)
            for line in range(row_lines):
                prefetch(builder, builder.add(first, ir.Constant(I64, line * CACHE_LINE_BYTES)))
        address = builder.load(builder.gep(addresses, [depth]))
        row = builder.gep(builder.inttoptr(address, like.type), [offset])
        return emit_load(builder, builder.gep(row, [ir.Constant(I64, index * LANES)]), like_type)

    return load_b


def _product_from_zero(rows: int) -> Emitter:
    def product(builder: ir.IRBuilder, sig: Any, *operands: ir.Value) -> None:
        a, a_stride, b, b_stride, depth, c, c_stride = operands
        load_b = _strided_rows(builder, b, b_stride, I32_LANES if sig.args[2] == I32_POINTER else F32_LANES)
        _emit_product(builder, rows, WIDE, (a, a_stride, load_b, depth, c, c_stride), None)

    product.__name__ = f"product_from_zero_{rows}"
    number = types.int64
    pairs = (I32_POINTER, number, I32_POINTER, number, number, F32_POINTER, number)
    return emitted_for(*(signature(types.void, *operands) for operands in (_OPERANDS, pairs)))(product)


def _product_onto(rows: int, width: int) -> Emitter:
    def product(builder: ir.IRBuilder, *operands: ir.Value) -> None:
        a, a_stride, b, b_stride, depth, c, c_stride, scales = operands
        load_b = _strided_rows(builder, b, b_stride)
        _emit_product(builder, rows, width, (a, a_stride, load_b, depth, c, c_stride), scales)

    product.__name__ = f"product_onto_{rows}_by_{width}"
    return emitted(types.void, *_OPERANDS, F32_POINTER)(product)


def _product_in_place(rows: int) -> Emitter:
    def product(builder: ir.IRBuilder, sig: Any, *operands: ir.Value) -> None:
        a, a_stride, like, addresses, ahead, offset, depth, c, c_stride, scales = operands
        load_b = _rows_at(builder, addresses, ahead, offset, like, sig.args[2])
        _emit_product(builder, rows, WIDE, (a, a_stride, load_b, depth, c, c_stride), scales)

    product.__name__ = f"product_in_place_{rows}"
    cases = [
        signature(
            types.void,
            *(F32_POINTER, types.int64, like, I64_POINTER, I64_POINTER, types.int64),
            *(types.int64, F32_POINTER, types.int64, F32_POINTER),
        )
        for like in ELEMENT_POINTERS
    ]
    return emitted_for(*cases)(product)


_from_zero_1, _from_zero_2, _from_zero_3, _from_zero_4 = map(_product_from_zero, (1, 2, 3, 4))
_narrow_1, _narrow_2, _narrow_3, _narrow_4 = (_product_onto(rows, NARROW) for rows in (1, 2, 3, 4))
_wide_1, _wide_2, _wide_3, _wide_4 = (_product_onto(rows, WIDE) for rows in (1, 2, 3, 4))
_in_place_1, _in_place_2, _in_place_3, _in_place_4 = map(_product_in_place, (1, 2, 3, 4))


@subroutine
def multiply(
    a: Pointer, a_stride: int, b: Pointer, b_stride: int, depth: int, c: Pointer, c_stride: int, rows: int
) -> None:
    """C = A B over one wide strip of B.

    Args:
        a: f32[rows, depth], rows `a_stride` apart; or i32[rows, depth], pairs of bfloat16.
        a_stride: in elements, as the other strides.
        b: f32[depth, WIDE], rows `b_stride` apart; or pairs as `a`.
        b_stride: see `a_stride`.
        depth: number of products, or of pairs of them, summed up in each element.
        c: f32[rows, WIDE], rows `c_stride` apart; overwritten.
        c_stride: see `a_stride`.
        rows: 1 to `MAX_ROWS`.
    """
    if rows == 4:
        _from_zero_4(a, a_stride, b, b_stride, depth, c, c_stride)
    elif rows == 3:
        _from_zero_3(a, a_stride, b, b_stride, depth, c, c_stride)
    elif rows == 2:
        _from_zero_2(a, a_stride, b, b_stride, depth, c, c_stride)
    else:
        _from_zero_1(a, a_stride, b, b_stride, depth, c, c_stride)


@subroutine
def multiply_onto_narrow(
    a: Pointer,
    a_stride: int,
    b: Pointer,
    b_stride: int,
    depth: int,
    c: Pointer,
    c_stride: int,
    scales: Pointer,
    rows: int,
) -> None:
    """`multiply_onto_wide` for a strip of `NARROW` floats."""
    if rows == 4:
        _narrow_4(a, a_stride, b, b_stride, depth, c, c_stride, scales)
    elif rows == 3:
        _narrow_3(a, a_stride, b, b_stride, depth, c, c_stride, scales)
    elif rows == 2:
        _narrow_2(a, a_stride, b, b_stride, depth, c, c_stride, scales)
    else:
        _narrow_1(a, a_stride, b, b_stride, depth, c, c_stride, scales)


@subroutine
def multiply_onto_wide(
    a: Pointer,
    a_stride: int,
    b: Pointer,
    b_stride: int,
    depth: int,
    c: Pointer,
    c_stride: int,
    scales: Pointer,
    rows: int,
) -> None:
    """C = diag(scales) C + A B over one strip of `WIDE` floats.

    Args:
        a: f32[rows, depth], rows `a_stride` apart.
        a_stride: in elements, as the other strides.
        b: f32[depth, WIDE], rows `b_stride` apart.
        b_stride: see `a_stride`.
        depth: number of products added to each element; with 0 only `scales` is applied.
        c: f32[rows, WIDE], rows `c_stride` apart; updated.
        c_stride: see `a_stride`.
        scales: f32[rows], multiplied in before anything is added.
        rows: 1 to `MAX_ROWS`.
    """
    if rows == 4:
        _wide_4(a, a_stride, b, b_stride, depth, c, c_stride, scales)
    elif rows == 3:
        _wide_3(a, a_stride, b, b_stride, depth, c, c_stride, scales)
    elif rows == 2:
        _wide_2(a, a_stride, b, b_stride, depth, c, c_stride, scales)
    else:
        _wide_1(a, a_stride, b, b_stride, depth, c, c_stride, scales)


@subroutine
def multiply_onto_in_place(
    a: Pointer,
    a_stride: int,
    like: Pointer,
    addresses: Pointer,
    ahead: Pointer,
    offset: int,
    depth: int,
    c: Pointer,
    c_stride: int,
    scales: Pointer,
    rows: int,
) -> None:
    """`multiply_onto_wide` with the rows of B read where they are.

    Args:
        a: see `multiply_onto_wide`.
        a_stride: see `multiply_onto_wide`.
        like: pointer of B's dtype; only its type is used.
        addresses: i64[depth], of the rows of B.
        ahead: i64[depth], of rows that are needed later; any addresses are safe.
        offset: elements of a row before the strip.
        depth: see `multiply_onto_wide`.
        c: see `multiply_onto_wide`.
        c_stride: see `multiply_onto_wide`.
        scales: see `multiply_onto_wide`.
        rows: 1 to `MAX_ROWS`.
    """
    if rows == 4:
        _in_place_4(a, a_stride, like, addresses, ahead, offset, depth, c, c_stride, scales)
    elif rows == 3:
        _in_place_3(a, a_stride, like, addresses, ahead, offset, depth, c, c_stride, scales)
    elif rows == 2:
        _in_place_2(a, a_stride, like, addresses, ahead, offset, depth, c, c_stride, scales)
    else:
        _in_place_1(a, a_stride, like, addresses, ahead, offset, depth, c, c_stride, scales)
