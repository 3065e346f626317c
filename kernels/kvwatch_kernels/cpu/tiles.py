"""Attention of one query tile over one split of its context, in float32 scratch."""

import numpy as np

from kvwatch_kernels.cpu.compiled import inlined, subroutine
from kvwatch_kernels.cpu.fields import (
    ALIBI_SLOPES,
    ELEMENT_BYTES,
    GROUP_SIZE,
    HEAD_DIM,
    KEY_SCALES,
    OUT,
    OUT_HEAD_STRIDE,
    OUT_TOKEN_STRIDE,
    QUERY,
    QUERY_BYTES,
    QUERY_HEAD_STRIDE,
    QUERY_TOKEN_STRIDE,
    SCALE,
    SOFT_CAP,
)
from kvwatch_kernels.cpu.items import SPLIT, Item, QueryTile, first_visible, item_at, take_item
from kvwatch_kernels.cpu.memory import (
    Pointer,
    address_of,
    advance,
    bf16_at,
    copy_bytes,
    f32_at,
    load,
    read,
    store,
    store_some,
    write,
)
from kvwatch_kernels.cpu.micro_gemm import (
    MAX_ROWS,
    NARROW,
    TILE,
    WIDE,
    multiply,
    multiply_onto_in_place,
    multiply_onto_narrow,
    multiply_onto_wide,
)
from kvwatch_kernels.cpu.packing import (
    copy_row,
    has_pairs,
    load_scales,
    locate_rows,
    operand_like,
    pack_keys,
    pack_values,
    prefetch_rows,
)
from kvwatch_kernels.cpu.scores import bias_row, cap_row, multiply_row
from kvwatch_kernels.cpu.scratch import Worker
from kvwatch_kernels.cpu.softmax import softmax_row
from kvwatch_kernels.cpu.vectors import LANES, float_of_bits, splat


@subroutine
def visible_in_tile(params: Pointer, tile: QueryTile, row: int, first: int) -> tuple[int, int]:
    """Keys (first, end) that a row sees of the tile of tokens that starts at position `first`, relative to it."""
    position = tile.first_position + row // read(params, GROUP_SIZE)
    return max(first_visible(params, position) - first, 0), min(position + 1 - first, TILE)


@subroutine
def head_row(tile: QueryTile, group_size: int, row: int, token_stride: int, head_stride: int) -> int:
    """Offset in elements of a row's head in a tensor [num_tokens, num_heads, head_dim]."""
    query = row // group_size
    head = tile.head * group_size + (row - query * group_size)
    return (tile.first_token + query) * token_stride + head * head_stride


@subroutine
def load_queries(worker: Worker, tile: QueryTile) -> None:
    """Bring the tile's queries into scratch: as float32, times scale and log2(e), or in pairs as they are."""
    params, padded = worker.params, worker.padded
    scale = splat(float_of_bits(read(params, SCALE)))
    base, num_bytes = read(params, QUERY), read(params, QUERY_BYTES)
    token_stride, head_stride = read(params, QUERY_TOKEN_STRIDE), read(params, QUERY_HEAD_STRIDE)
    for row in range(tile.num_rows):
        place = head_row(tile, read(params, GROUP_SIZE), row, token_stride, head_stride)
        source = base + place * num_bytes
        target = advance(worker.scratch.queries, row * padded)
        if has_pairs(operand_like(worker.like, target)):
            copy_pairs(source, read(params, HEAD_DIM), target)
            continue
        if num_bytes == 4:
            copy_row(f32_at(source), read(params, HEAD_DIM), padded, target)
        else:
            copy_row(bf16_at(source), read(params, HEAD_DIM), padded, target)
        for offset in range(0, padded, LANES):
            store(advance(target, offset), load(advance(target, offset)) * scale)


@subroutine
def copy_pairs(source: int, head_dim: int, target: Pointer) -> None:
    """Copy `head_dim` elements of bfloat16 from an address; an odd one gets a zero beside it."""
    if head_dim % 2:
        write(target, head_dim // 2, np.float32(0.0))
    copy_bytes(address_of(target), source, 2 * head_dim)


@subroutine
def store_outputs(worker: Worker, tile: QueryTile) -> None:
    """Divide each row's merged sums by its merged total and write it out."""
    params, scratch = worker.params, worker.scratch
    base, num_bytes = read(params, OUT), read(params, QUERY_BYTES)
    token_stride, head_stride = read(params, OUT_TOKEN_STRIDE), read(params, OUT_HEAD_STRIDE)
    for row in range(tile.num_rows):
        target = base + num_bytes * head_row(tile, read(params, GROUP_SIZE), row, token_stride, head_stride)
        sums = advance(scratch.merged_sums, row * worker.padded)
        total = read(scratch.merged_total, row)
        if num_bytes == 4:
            divide_row(sums, total, read(params, HEAD_DIM), f32_at(target))
        else:
            divide_row(sums, total, read(params, HEAD_DIM), bf16_at(target))


@subroutine
def divide_row(sums: Pointer, total: float, head_dim: int, target: Pointer) -> None:
    """Write `sums / total` as `head_dim` elements of the target's kind.

    A total of 0 means that all the row sees has a score of -inf. Then nothing was summed up, not even zeros: NaN.
    """
    whole = head_dim // LANES * LANES
    divisor = splat(total if total != np.float32(0.0) else np.float32(np.nan))
    for offset in range(0, whole, LANES):
        store(advance(target, offset), load(advance(sums, offset)) / divisor)
    if whole < head_dim:
        store_some(advance(target, whole), head_dim - whole, load(advance(sums, whole)) / divisor)


@subroutine
def reads_values_in_place(worker: Worker, tile: QueryTile) -> bool:
    """Whether values are read where they lie: packing them pays only if they are used for many rows."""
    return tile.num_rows <= MAX_ROWS and read(worker.params, HEAD_DIM) % WIDE == 0


@inlined
def score_keys(worker: Worker, tile: QueryTile) -> None:
    """Scores of all rows against the tile's packed keys."""
    scratch = worker.scratch
    head_dim = read(worker.params, HEAD_DIM)
    keys = operand_like(worker.like, scratch.keys)
    depth = (head_dim + 1) // 2 if has_pairs(keys) else head_dim
    row = 0
    while row < tile.num_rows:
        count = min(tile.num_rows - row, MAX_ROWS)
        queries = operand_like(worker.like, advance(scratch.queries, row * worker.padded))
        target = advance(scratch.scores, row * TILE)
        multiply(queries, worker.padded, keys, TILE, depth, target, TILE, count)
        row += count


@inlined
def weigh_keys(worker: Worker, tile: QueryTile, first: int) -> None:
    """Turn all rows' scores of the tile that starts at position `first` into weights."""
    scratch = worker.scratch
    has_scales = read(worker.params, KEY_SCALES) != 0
    is_unscaled = has_pairs(operand_like(worker.like, scratch.keys))
    factor = splat(float_of_bits(read(worker.params, SCALE)))
    for row in range(tile.num_rows):
        scores = advance(scratch.scores, row * TILE)
        if is_unscaled:
            for offset in range(0, TILE, LANES):
                store(advance(scores, offset), load(advance(scores, offset)) * factor)
        if has_scales:
            multiply_row(scores, scratch.scales)
        shape_scores(worker.params, tile, row, first, scores)
        begin, end = visible_in_tile(worker.params, tile, row, first)
        softmax_row(
            scores,
            begin,
            end,
            advance(scratch.largest, row),
            advance(scratch.total, row),
            advance(scratch.rescale, row),
        )
        if has_scales:
            # Weights of hidden keys may become NaN here: they are never used.
            multiply_row(scores, advance(scratch.scales, TILE + LANES))


@subroutine
def shape_scores(params: Pointer, tile: QueryTile, row: int, first: int, scores: Pointer) -> None:
    """Apply soft cap and position bias, where there are any, to a row's scores of the tile that starts at `first`."""
    if read(params, SOFT_CAP) != 0:
        cap_row(scores, float_of_bits(read(params, SOFT_CAP)))
    if read(params, ALIBI_SLOPES) != 0:
        group_size = read(params, GROUP_SIZE)
        query = row // group_size
        head = tile.head * group_size + (row - query * group_size)
        slope = read(f32_at(read(params, ALIBI_SLOPES)), head)
        bias_row(scores, slope, first - tile.first_position - query)


@inlined
def add_values(worker: Worker, tile: QueryTile, first: int, values: Pointer, next_values: Pointer) -> None:
    """Rescale the sums and add the tile's values, weighted, over what each row sees; ascending per row.

    Args:
        worker: its scratch holds the weights, and the packed values unless they are read in place.
        tile: the queries.
        first: position of the tile's first token.
        values: i64[TILE], addresses of the values.
        next_values: i64[TILE], those of the next tile.
    """
    strip = 0
    while strip < worker.padded:
        row = 0
        while row < tile.num_rows:
            count = min(tile.num_rows - row, MAX_ROWS)
            add_values_to_rows(worker, tile, first, values, next_values, strip, row, count)
            row += count
        strip += WIDE if worker.padded - strip >= WIDE else NARROW


@inlined
def add_values_to_rows(
    worker: Worker,
    tile: QueryTile,
    first: int,
    values: Pointer,
    next_values: Pointer,
    strip: int,
    row: int,
    count: int,
) -> None:
    """`add_values` for `count` rows from `row` on and one strip: first what all see together, the rest row by row.

    A value outside of a row's visible keys is never touched for that row, not even with weight zero: it may be NaN.
    """
    begin, end = visible_in_tile(worker.params, tile, row, first)
    last_begin, last_end = visible_in_tile(worker.params, tile, row + count - 1, first)
    rescale = worker.scratch.rescale
    shared_end = -1
    if last_begin == begin and begin <= end:
        add_range(worker, tile, values, next_values, strip, row, count, begin, end, rescale)
        if last_end == end:
            return
        # What is left of each row: its sums are already rescaled.
        shared_end = end
        rescale = worker.scratch.ones
    for single in range(row, row + count):
        begin, end = visible_in_tile(worker.params, tile, single, first)
        add_range(worker, tile, values, next_values, strip, single, 1, max(begin, shared_end), end, rescale)


@subroutine
def add_range(
    worker: Worker,
    tile: QueryTile,
    values: Pointer,
    next_values: Pointer,
    strip: int,
    row: int,
    count: int,
    begin: int,
    end: int,
    rescale: Pointer,
) -> None:
    """Rescale one strip of the sums of `count` rows and add the weighted values `begin` to `end - 1`."""
    scratch, padded = worker.scratch, worker.padded
    depth = max(end - begin, 0)
    weights = advance(scratch.scores, row * TILE + begin)
    packed = advance(scratch.values, begin * padded + strip)
    sums = advance(scratch.sums, row * padded + strip)
    scales = advance(rescale, row)
    if reads_values_in_place(worker, tile):
        addresses, ahead = advance(values, begin), advance(next_values, begin)
        multiply_onto_in_place(weights, TILE, worker.like, addresses, ahead, strip, depth, sums, padded, scales, count)
    elif padded - strip >= WIDE:
        multiply_onto_wide(weights, TILE, packed, padded, depth, sums, padded, scales, count)
    else:
        multiply_onto_narrow(weights, TILE, packed, padded, depth, sums, padded, scales, count)


@inlined
def start_split(worker: Worker, tile: QueryTile) -> None:
    """Forget the last split: nothing seen, nothing summed up."""
    scratch = worker.scratch
    for row in range(tile.num_rows):
        write(scratch.largest, row, np.float32(-np.inf))
        write(scratch.total, row, np.float32(0.0))
    for offset in range(0, tile.num_rows * worker.padded, LANES):
        store(advance(scratch.sums, offset), splat(np.float32(0.0)))


@subroutine
def locate_next(worker: Worker, item: Item, first: int, rows: Pointer) -> int:
    """Locate the tile of tokens that this thread attends to after the one at `first`.

    At the end of an item the next one is taken: not before, so that no thread sits on an item that another could have
    begun, and not after, so that its first keys and values are on their way when they are needed.

    Args:
        worker: this thread's; its cursor moves on at the end of the item.
        item: what it works on.
        first: position of the tile that it attends to now.
        rows: i64[2, TILE], receives the addresses.

    Returns:
        The number of tokens; 0 where nothing is left to do.
    """
    params, cursor = worker.params, worker.scratch.cursor
    if first + TILE < item.end:
        locate_rows(params, item.tile.table, item.tile.head, first + TILE, item.end, rows)
        return min(item.end - first - TILE, TILE)
    if not take_item(params, cursor):
        return 0
    following = item_at(params, cursor)
    locate_rows(params, following.tile.table, following.tile.head, following.first, following.end, rows)
    count: int = min(following.end - following.first, TILE)
    return count


@subroutine
def attend_split(worker: Worker, item: Item, split: int, rows: Pointer, next_rows: Pointer) -> bool:
    """Attend to one split; leaves the scratch's `largest`, `total` and `sums`.

    Args:
        worker: this thread's; its scratch holds the tile's queries.
        item: what it works on.
        split: positions `split * SPLIT` to `(split + 1) * SPLIT - 1`.
        rows: i64[2, TILE], addresses of the first tile's keys and values.
        next_rows: i64[2, TILE], for the next tile's.

    Returns:
        Whether the addresses of the tile that follows are in `next_rows` (an odd number of tiles), or in `rows`.
    """
    start_split(worker, item.tile)
    first = max(split * SPLIT, item.first)
    end = min((split + 1) * SPLIT, item.end)
    is_swapped = False
    while first < end:
        next_count = locate_next(worker, item, first, next_rows)
        attend_tile(worker, item.tile, first, min(end - first, TILE), rows, next_rows, next_count)
        rows, next_rows = next_rows, rows
        is_swapped = not is_swapped
        first += TILE
    return is_swapped


@inlined
def attend_tile(
    worker: Worker, tile: QueryTile, first: int, count: int, rows: Pointer, next_rows: Pointer, next_count: int
) -> None:
    """Attend to one tile of tokens, while the next one's are asked for.

    Args:
        worker: this thread's.
        tile: the queries.
        first: position of the first token.
        count: tokens of the tile.
        rows: i64[2, TILE], addresses of the tokens' keys and values.
        next_rows: i64[2, TILE], those of the next tile.
        next_count: tokens of the next tile.
    """
    params, scratch = worker.params, worker.scratch
    head_dim = read(params, HEAD_DIM)
    row_bytes = head_dim * read(params, ELEMENT_BYTES)
    values = advance(rows, TILE)
    if read(params, KEY_SCALES) != 0:
        load_scales(params, worker.like, tile, first, count, scratch.scales)
    keys = operand_like(worker.like, scratch.keys)
    pack_keys(worker.like, rows, count, head_dim, keys, next_rows, next_count, row_bytes)
    next_values = advance(next_rows, TILE)
    if reads_values_in_place(worker, tile):
        # Those that are not asked for with each value that is read.
        prefetch_rows(advance(next_values, count), next_count - count, row_bytes)
    else:
        prefetch_rows(next_values, next_count, row_bytes)
        pack_values(worker.like, values, count, head_dim, worker.padded, scratch.values)
    score_keys(worker, tile)
    weigh_keys(worker, tile, first)
    add_values(worker, tile, first, values, next_values)
