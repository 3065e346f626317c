"""Find a tile's keys and values through the block table and bring them into float32 scratch.

A tile is `TILE` consecutive token positions, starting at a multiple of `TILE`, whatever the block size. Keys are
transposed on the way (sixteen by sixteen in registers), so that a score is a sum over rows of scratch with one key per
lane; values keep their rows. This is the only place that knows block tables and cache strides.
"""

from typing import Any

import numba
from llvmlite import ir
from numba.core import types
from numba.core.typing.templates import signature

from kvwatch_kernels.cpu.compiled import subroutine
from kvwatch_kernels.cpu.elements import BF16_POINTER, ELEMENT_POINTERS, ELEMENTS, F32_POINTER, I32_POINTER, I64_POINTER
from kvwatch_kernels.cpu.fields import (
    BLOCK_SIZE,
    FAULT,
    FAULT_BLOCK_ID,
    FAULT_VALUE,
    KEY_BLOCK_BYTES,
    KEY_CACHE,
    KEY_HEAD_BYTES,
    KEY_SCALES,
    KEY_SCALES_BLOCK_BYTES,
    KEY_SCALES_HEAD_BYTES,
    KEY_TOKEN_BYTES,
    NUM_BLOCKS,
    VALUE_BLOCK_BYTES,
    VALUE_CACHE,
    VALUE_HEAD_BYTES,
    VALUE_SCALES,
    VALUE_TOKEN_BYTES,
)
from kvwatch_kernels.cpu.items import QueryTile
from kvwatch_kernels.cpu.memory import (
    CACHE_LINE_BYTES,
    Pointer,
    advance,
    f32_at,
    load,
    load_some,
    pointer_like,
    prefetch,
    read,
    store,
    unit_of,
    write,
)
from kvwatch_kernels.cpu.micro_gemm import TILE
from kvwatch_kernels.cpu.pairs import multiplies_pairs
from kvwatch_kernels.cpu.vectors import I1, I16, I32, I32_LANES, I64, LANES, Vector, emitted_for, splat

_FLOAT_BYTES = 4
_DWORD_BYTES, _DWORDS = 4, 4
"""What is transposed are units of 32 bits, four of a row at a time: one float32, two bfloat16 or four bytes each."""


def _transpose_quads(builder: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """Emit the transpose of each aligned 4 x 4 piece of four vectors: two rounds that swap at distance 1 and 2."""
    for distance in (1, 2):
        low = [lane if not lane & distance else LANES + lane - distance for lane in range(LANES)]
        high = [lane + distance if not lane & distance else LANES + lane for lane in range(LANES)]
        swapped = list(rows)
        for first in (row for row in range(4) if not row & distance):
            pair = rows[first], rows[first + distance]
            swapped[first] = builder.shuffle_vector(*pair, ir.Constant(I32_LANES, low))
            swapped[first + distance] = builder.shuffle_vector(*pair, ir.Constant(I32_LANES, high))
        rows = swapped
    return rows


def _store_column(builder: ir.IRBuilder, column: ir.Value, target: ir.Value, index: int) -> None:
    place = builder.gep(target, [ir.Constant(I64, index * TILE)])
    builder.store(column, builder.bitcast(place, column.type.as_pointer()), align=4)


def _dwords_of_rows(builder: ir.IRBuilder, pointers: list[ir.Value], num_bytes: int) -> ir.Value:
    """Emit four units of 32 bits from each of four pointers, side by side; `num_bytes` is the elements' alignment."""
    piece = ir.VectorType(I32, _DWORDS).as_pointer()
    parts = [builder.load(builder.bitcast(pointer, piece), align=num_bytes) for pointer in pointers]
    while len(parts) > 1:
        count = 2 * parts[0].type.count
        order = ir.Constant(ir.VectorType(I32, count), list(range(count)))
        parts = [builder.shuffle_vector(*parts[first : first + 2], order) for first in range(0, len(parts), 2)]
    return parts[0]


@emitted_for(
    *(signature(types.void, like, I64_POINTER, types.int64, F32_POINTER) for like in ELEMENT_POINTERS),
    signature(types.void, BF16_POINTER, I64_POINTER, types.int64, I32_POINTER),
)
def load_transposed(
    builder: ir.IRBuilder, sig: Any, like: ir.Value, addresses: ir.Value, offset: ir.Value, target: ir.Value
) -> None:
    """Write elements `offset` to `offset + 15` of sixteen rows as sixteen columns.

    `load_transposed(like, addresses, offset, target)`: `addresses` holds the rows' addresses, whose elements are of
    `like`'s type; row d of `target`, `TILE` floats after row d - 1, receives element `offset + d` of every row. If
    `target` is i32, row d receives the pair of elements `offset + 2 d` and `offset + 2 d + 1`.
    """
    builder.function.attributes.add("noinline")  # once is enough: it is long
    element = ELEMENTS[sig.args[0]]
    per_dword = _DWORD_BYTES // element.num_bytes
    rows = []
    for row in range(LANES):
        address = builder.load(builder.gep(addresses, [ir.Constant(I64, row)]))
        rows.append(builder.gep(builder.inttoptr(address, like.type), [offset]))
    # Rows r, r + 4, r + 8, r + 12 meet in one vector as they are loaded, which is cheaper than shuffling them together.
    for start in range(0, LANES, _DWORDS * per_dword):
        quads = []
        for first in range(4):
            pieces = [builder.gep(rows[row], [ir.Constant(I64, start)]) for row in range(first, LANES, 4)]
            quads.append(_dwords_of_rows(builder, pieces, element.num_bytes))
        for index, dwords in enumerate(_transpose_quads(builder, quads)):
            if sig.args[3] == I32_POINTER:
                _store_column(builder, dwords, target, start // per_dword + index)
                continue
            for place in range(per_dword):
                column = element.element_of_dword(builder, dwords, place)
                _store_column(builder, column, target, start + index * per_dword + place)


@emitted_for(
    signature(F32_POINTER, F32_POINTER, types.int64),
    signature(I32_POINTER, I32_POINTER, types.int64),
)
def key_row(builder: ir.IRBuilder, sig: Any, keys: ir.Value, offset: ir.Value) -> ir.Value:
    """`key_row(keys, offset)`: the row of packed keys in which element `offset` is; of pairs, the first of one."""
    row = builder.lshr(offset, ir.Constant(I64, 1)) if sig.args[0] == I32_POINTER else offset
    return builder.gep(keys, [builder.mul(row, ir.Constant(I64, TILE))])


@emitted_for(signature(types.boolean, F32_POINTER), signature(types.boolean, I32_POINTER))
def has_pairs(_builder: ir.IRBuilder, sig: Any, _keys: ir.Value) -> ir.Value:
    """`has_pairs(keys)`: whether packed keys are pairs."""
    return ir.Constant(I1, int(sig.args[0] == I32_POINTER))


def _half_of_pair(builder: ir.IRBuilder, keys: ir.Value, offset: ir.Value, row: ir.Value) -> ir.Value:
    """Emit a pointer to the 16 bits of element `offset` of key `row`."""
    place = builder.add(builder.mul(builder.lshr(offset, ir.Constant(I64, 1)), ir.Constant(I64, TILE)), row)
    halves = builder.bitcast(builder.gep(keys, [place]), I16.as_pointer())
    return builder.gep(halves, [builder.and_(offset, ir.Constant(I64, 1))])


@emitted_for(
    *(signature(types.void, F32_POINTER, types.int64, types.int64, like) for like in ELEMENT_POINTERS),
    *(signature(types.void, I32_POINTER, types.int64, types.int64, like) for like in ELEMENT_POINTERS),
)
def write_key(
    builder: ir.IRBuilder, sig: Any, keys: ir.Value, offset: ir.Value, row: ir.Value, source: ir.Value
) -> None:
    """`write_key(keys, offset, row, source)`: element `offset` of `source` becomes that of packed key `row`."""
    value = builder.load(builder.gep(source, [offset]))
    if sig.args[0] == I32_POINTER:
        if sig.args[3] == BF16_POINTER:  # no other kind of element is ever packed in pairs
            builder.store(value, _half_of_pair(builder, keys, offset, row))
        return
    place = builder.add(builder.mul(offset, ir.Constant(I64, TILE)), row)
    builder.store(ELEMENTS[sig.args[3]].widen(builder, value), builder.gep(keys, [place]))


@emitted_for(
    signature(types.void, F32_POINTER, types.int64, types.int64),
    signature(types.void, I32_POINTER, types.int64, types.int64),
)
def clear_key(builder: ir.IRBuilder, sig: Any, keys: ir.Value, offset: ir.Value, row: ir.Value) -> None:
    """`clear_key(keys, offset, row)`: element `offset` of packed key `row`, one behind its last, becomes zero."""
    if sig.args[0] == I32_POINTER:
        builder.store(ir.Constant(I16, 0), _half_of_pair(builder, keys, offset, row))


@emitted_for(
    *(
        signature(I32_POINTER if like == BF16_POINTER and multiplies_pairs() else F32_POINTER, like, F32_POINTER)
        for like in ELEMENT_POINTERS
    )
)
def operand_like(builder: ir.IRBuilder, sig: Any, _like: ir.Value, scratch: ir.Value) -> ir.Value:
    """`operand_like(like, scratch)`: scratch for what scores are made of: pairs of bfloat16, or float32."""
    return builder.bitcast(scratch, I32.as_pointer()) if sig.return_type == I32_POINTER else scratch


@subroutine
def locate_rows(params: Pointer, table: Pointer, head: int, first: int, end: int, rows: Pointer) -> None:
    """Write the addresses of the keys and values of a tile's tokens.

    A block id outside of the cache is reported in `FAULT` and read as block 0, so that nothing beyond the cache is
    touched.

    Args:
        params: see `fields.py`.
        table: i32[max_blocks], the sequence's block table.
        head: KV head.
        first: the tile's first token position.
        end: positions from here on are not visible to any query. The keys' addresses are padded to a multiple of 16
            with that of position `end - 1`.
        rows: i64[2, TILE], addresses of keys, then of values.
    """
    block_size = read(params, BLOCK_SIZE)
    key_base = read(params, KEY_CACHE) + head * read(params, KEY_HEAD_BYTES)
    value_base = read(params, VALUE_CACHE) + head * read(params, VALUE_HEAD_BYTES)
    key_block, value_block = read(params, KEY_BLOCK_BYTES), read(params, VALUE_BLOCK_BYTES)
    key_token, value_token = read(params, KEY_TOKEN_BYTES), read(params, VALUE_TOKEN_BYTES)
    count = min(end - first, TILE)
    index = first // block_size
    offset = first - index * block_size
    row = 0
    while row < count:
        block = block_at(params, table, index)
        run = min(block_size - offset, count - row)
        if read(params, KEY_SCALES) != 0:
            prefetch_run(scale_address(params, KEY_SCALES, block, head, offset), run)
            prefetch_run(scale_address(params, VALUE_SCALES, block, head, offset), run)
        key = key_base + block * key_block + offset * key_token
        value = value_base + block * value_block + offset * value_token
        for _ in range(run):
            write(rows, row, key)
            write(rows, TILE + row, value)
            key += key_token
            value += value_token
            row += 1
        offset = 0
        index += 1
    for padding in range(row, -(-count // LANES) * LANES):
        write(rows, padding, read(rows, count - 1))


@subroutine
def scale_address(params: Pointer, side: int, block: int, head: int, offset: int) -> int:
    """Address of the scale of a token's head; `side` is KEY_SCALES or VALUE_SCALES."""
    block_place = block * read(params, side + KEY_SCALES_BLOCK_BYTES - KEY_SCALES)
    head_place = head * read(params, side + KEY_SCALES_HEAD_BYTES - KEY_SCALES)
    address: int = read(params, side) + block_place + head_place + offset * _FLOAT_BYTES
    return address


@subroutine
def prefetch_run(address: int, count: int) -> None:
    """Ask for the cache lines of `count` float32 from `address` on."""
    for offset in range(0, count * _FLOAT_BYTES, CACHE_LINE_BYTES):
        prefetch(address + offset)


@subroutine
def load_scales(params: Pointer, like: Pointer, tile: QueryTile, first: int, count: int, scales: Pointer) -> None:
    """Copy the scales of a tile's tokens, times the unit in which their elements are read.

    Args:
        params: see `fields.py`.
        like: pointer of the cache's kind of element; only its type is used.
        tile: whose head and block table.
        first: the tile's first token position.
        count: tokens of the tile that are visible to any query.
        scales: f32[2, TILE + LANES], of keys, then of values; overwritten.
    """
    unit = splat(unit_of(like))
    block_size = read(params, BLOCK_SIZE)
    index = first // block_size
    offset = first - index * block_size
    row = 0
    while row < count:
        block = block_at(params, tile.table, index)
        run = min(block_size - offset, count - row)
        keys = f32_at(scale_address(params, KEY_SCALES, block, tile.head, offset))
        values = f32_at(scale_address(params, VALUE_SCALES, block, tile.head, offset))
        copy_scales(keys, run, unit, advance(scales, row))
        copy_scales(values, run, unit, advance(scales, TILE + LANES + row))
        row += run
        offset = 0
        index += 1


@subroutine
def copy_scales(source: Pointer, count: int, unit: Vector, target: Pointer) -> None:
    """Copy `count` float32, each times `unit`; up to a vector beyond them is written."""
    whole = count // LANES * LANES
    for offset in range(0, whole, LANES):
        store(advance(target, offset), load(advance(source, offset)) * unit)
    if whole < count:
        store(advance(target, whole), load_some(advance(source, whole), count - whole) * unit)


@subroutine
def block_at(params: Pointer, table: Pointer, index: int) -> int:
    """Entry `index` of a block table, checked against the cache (see `locate_rows`)."""
    block: int = numba.int64(read(table, index))
    if block < 0 or block >= read(params, NUM_BLOCKS):
        write(params, FAULT, FAULT_BLOCK_ID)
        write(params, FAULT_VALUE, block)
        return 0
    return block


@subroutine
def prefetch_rows(rows: Pointer, count: int, row_bytes: int) -> None:
    """Ask for the cache lines of the first `count` rows whose addresses are in `rows`, an i64 array."""
    for row in range(count):
        address = read(rows, row)
        for offset in range(0, row_bytes, CACHE_LINE_BYTES):
            prefetch(address + offset)


@subroutine
def pack_keys(
    like: Pointer,
    rows: Pointer,
    count: int,
    head_dim: int,
    keys: Pointer,
    next_rows: Pointer,
    next_count: int,
    row_bytes: int,
) -> None:
    """Transpose a tile's keys into scratch, and ask for those of the next tile meanwhile.

    Args:
        like: pointer of the cache's dtype; only its type is used.
        rows: i64[TILE], addresses of the keys.
        count: keys that somebody sees; the rest of the last sixteen is filled with whatever `rows` says.
        head_dim: elements of a key.
        keys: f32[head_dim, TILE], overwritten: one key per lane, one element per row; or i32, one pair per row.
        next_rows: i64[TILE], addresses of the next tile's keys.
        next_count: keys of the next tile; none if not positive.
        row_bytes: bytes of a key.
    """
    whole = head_dim // LANES * LANES
    for first in range(0, count, LANES):
        target = advance(keys, first)
        addresses = advance(rows, first)
        for offset in range(0, whole, LANES):
            ahead = first + offset // 4
            prefetch_rows(advance(next_rows, ahead), min(next_count - ahead, 4), row_bytes)
            load_transposed(like, addresses, offset, key_row(target, offset))
        for offset in range(whole, head_dim):
            for row in range(LANES):
                write_key(target, offset, row, pointer_like(like, read(addresses, row)))
        if has_pairs(target) and head_dim % 2:
            for row in range(LANES):
                clear_key(target, head_dim, row)


@subroutine
def pack_values(like: Pointer, rows: Pointer, count: int, head_dim: int, padded_dim: int, values: Pointer) -> None:
    """Copy a tile's values into scratch as float32, padded with zeros.

    Args:
        like: pointer of the cache's dtype; only its type is used.
        rows: i64[TILE], addresses of the values.
        count: values to copy.
        head_dim: elements of a value.
        padded_dim: elements of a row of `values`.
        values: f32[TILE, padded_dim], overwritten.
    """
    for row in range(count):
        copy_row(pointer_like(like, read(rows, row)), head_dim, padded_dim, advance(values, row * padded_dim))


@subroutine
def copy_row(source: Pointer, head_dim: int, padded_dim: int, target: Pointer) -> None:
    """Copy one row of `head_dim` elements as float32, padded with zeros to `padded_dim`, a multiple of 16."""
    whole = head_dim // LANES * LANES
    for offset in range(0, whole, LANES):
        store(advance(target, offset), load(advance(source, offset)))
    for offset in range(whole, padded_dim, LANES):
        store(advance(target, offset), load_some(advance(source, offset), max(head_dim - offset, 0)))
