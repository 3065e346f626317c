"""What every thread does in a linear layer: take panels of the weight until none is left.

An item is a panel of the weight times a block of rows. Many rows are cut into blocks that stay in the L2 cache while
all panels pass by; few rows are one block, and what counts is that memory is never idle: while a thread multiplies one
item it asks for the panel of the item that it has already taken as its next.
"""

from typing import NamedTuple

from kvwatch_kernels.cpu.compiled import inlined, subroutine
from kvwatch_kernels.cpu.linear_product import MAX_ROWS, PANEL, multiply_panel, widen_panel
from kvwatch_kernels.cpu.memory import (
    Pointer,
    advance,
    bf16_at,
    f32_at,
    fetch_add,
    i32_at,
    load,
    pointer_like,
    read,
    store_some,
)
from kvwatch_kernels.cpu.vectors import LANES

# Places in the argument array.
(
    NEXT_ITEM,  # taken by the threads
    NEXT_THREAD,
    X,  # address of f32[num_rows, depth], or pairs of bfloat16 (see `run_paired_linear`)
    X_STRIDE,  # in elements, as Y_STRIDE
    WEIGHT,  # address of the packed weight
    BIAS,  # address of f32[num_panels * PANEL]
    Y,  # address of f32[num_rows, num_columns], or bfloat16
    Y_STRIDE,
    NUM_ROWS,
    NUM_COLUMNS,
    NUM_PANELS,
    DEPTH,
    BLOCK_ROWS,  # rows of one block
    SCRATCH,  # address of the threads' scratch: f32[MAX_ROWS + depth, PANEL] each, for a panel that is not full and
    # for one that is widened; 0 where a call has neither
    SCRATCH_BYTES,  # bytes of one thread's scratch
    NUM_FIELDS,
) = range(16)

FLOAT_BYTES = 4
WIDEN_FROM_ROWS = 4 * MAX_ROWS + 1
"""Rows of a block from which a panel of bfloat16 is widened once instead of in every product."""


class Block(NamedTuple):
    """Rows of x and y that an item covers."""

    x: Pointer
    x_stride: int
    y: Pointer
    y_stride: int
    num_rows: int
    num_columns: int
    """Output features of the panel, at most PANEL."""


@inlined
def store_columns(tile: Pointer, num_rows: int, num_columns: int, y: Pointer, y_stride: int) -> None:
    """Copy the first columns of f32[num_rows, PANEL] to y."""
    for row in range(num_rows):
        for column in range(0, num_columns, LANES):
            count = min(num_columns - column, LANES)
            source = advance(tile, row * PANEL + column)
            store_some(advance(y, row * y_stride + column), count, load(source))


@subroutine
def multiply_block(
    block: Block, panel: Pointer, depth: int, start: Pointer, tile: Pointer, ahead: int, ahead_bytes: int
) -> None:
    """Multiply a block of rows by one panel, in products of nearly equal numbers of rows.

    Args:
        block: the rows.
        panel: see `multiply_panel`, as the next two.
        depth: input features.
        start: the bias.
        tile: f32[MAX_ROWS, PANEL], scratch for a panel that is not full.
        ahead: address of the panel that comes next.
        ahead_bytes: bytes of it for each step of the depth, to be asked for over all products.
    """
    num_products = (block.num_rows + MAX_ROWS - 1) // MAX_ROWS
    step = ahead_bytes // num_products
    is_full = block.num_columns == PANEL
    done = 0
    for product in range(num_products):
        rows = (block.num_rows - done + num_products - product - 1) // (num_products - product)
        x, y = advance(block.x, done * block.x_stride), advance(block.y, done * block.y_stride)
        if is_full:
            multiply_panel(x, block.x_stride, panel, depth, start, y, block.y_stride, ahead, step, rows)
        else:
            multiply_panel(x, block.x_stride, panel, depth, start, tile, PANEL, ahead, step, rows)
            store_columns(tile, rows, block.num_columns, y, block.y_stride)
        ahead += step * depth
        done += rows


@inlined
def block_of(params: Pointer, item: int, num_panels: int, x_like: Pointer, y_like: Pointer) -> Block:
    """The rows of an item: all panels of one block, then those of the next; pointers of these types."""
    first = item // num_panels * read(params, BLOCK_ROWS)
    column = item % num_panels * PANEL
    x_stride, y_stride = read(params, X_STRIDE), read(params, Y_STRIDE)
    return Block(
        advance(pointer_like(x_like, read(params, X)), first * x_stride),
        x_stride,
        advance(pointer_like(y_like, read(params, Y)), first * y_stride + column),
        y_stride,
        min(read(params, NUM_ROWS) - first, read(params, BLOCK_ROWS)),
        min(read(params, NUM_COLUMNS) - column, PANEL),
    )


@inlined
def run_linear(params: Pointer, element_bytes: int) -> None:
    """Take items until none is left.

    Args:
        params: the arguments.
        element_bytes: of the weight, 2 or 4: a constant, so that the code of the other is not compiled.
    """
    depth = read(params, DEPTH)
    num_panels = read(params, NUM_PANELS)
    num_blocks = (read(params, NUM_ROWS) + read(params, BLOCK_ROWS) - 1) // read(params, BLOCK_ROWS)
    row_bytes = PANEL * element_bytes
    tile = f32_at(read(params, SCRATCH) + fetch_add(params, NEXT_THREAD) * read(params, SCRATCH_BYTES))
    wide = advance(tile, MAX_ROWS * PANEL)
    item = fetch_add(params, NEXT_ITEM)
    while item < num_panels * num_blocks:
        following = fetch_add(params, NEXT_ITEM)
        address = read(params, WEIGHT) + item % num_panels * depth * row_bytes
        ahead = read(params, WEIGHT) + following % num_panels * depth * row_bytes
        start = advance(f32_at(read(params, BIAS)), item % num_panels * PANEL)
        block = block_of(params, item, num_panels, f32_at(0), f32_at(0))
        if element_bytes == FLOAT_BYTES:
            multiply_block(block, f32_at(address), depth, start, tile, ahead, row_bytes)
        elif block.num_rows >= WIDEN_FROM_ROWS:
            widen_panel(i32_at(address), depth, wide)
            multiply_block(block, wide, depth, start, tile, ahead, row_bytes)
        else:
            multiply_block(block, i32_at(address), depth, start, tile, ahead, row_bytes)
        item = following


@inlined
def run_paired_linear(params: Pointer) -> None:
    """`run_linear` in bfloat16: x, weight and depth are pairs of neighbouring input features, y is bfloat16."""
    depth = read(params, DEPTH)
    num_panels = read(params, NUM_PANELS)
    num_blocks = (read(params, NUM_ROWS) + read(params, BLOCK_ROWS) - 1) // read(params, BLOCK_ROWS)
    row_bytes = PANEL * FLOAT_BYTES
    tile = f32_at(read(params, SCRATCH) + fetch_add(params, NEXT_THREAD) * read(params, SCRATCH_BYTES))
    item = fetch_add(params, NEXT_ITEM)
    while item < num_panels * num_blocks:
        following = fetch_add(params, NEXT_ITEM)
        address = read(params, WEIGHT) + item % num_panels * depth * row_bytes
        ahead = read(params, WEIGHT) + following % num_panels * depth * row_bytes
        start = advance(f32_at(read(params, BIAS)), item % num_panels * PANEL)
        block = block_of(params, item, num_panels, i32_at(0), bf16_at(0))
        multiply_block(block, i32_at(address), depth, start, tile, ahead, row_bytes)
        item = following
