"""Paged attention as compiled code: what a thread does with its work items, and the checks of a call.

Whoever finishes the last split of a (sequence, KV head) merges its splits, always in ascending order. The reduction
order is that of `SPLIT` and `TILE` over token positions, whichever thread does what: results have the same bits for any
batch, chunking of the prefill, block size and number of threads.
"""

import numpy as np

from kvwatch_kernels.cpu.compiled import inlined
from kvwatch_kernels.cpu.fields import (
    BLOCK_SIZE,
    CONTEXT_LENS,
    COUNTERS,
    FAULT,
    FAULT_CONTEXT_LEN,
    FAULT_QUERY_STARTS,
    FAULT_VALUE,
    FIRST_SPLIT_COUNTER,
    HEAD_DIM,
    MAX_BLOCKS,
    NUM_KV_HEADS,
    NUM_SEQS,
    NUM_TOKENS,
    PARTIALS,
    QUERY_STARTS,
    SCRATCH,
    SCRATCH_BYTES,
    THREAD_COUNTER,
    TILE_ROWS,
)
from kvwatch_kernels.cpu.items import CURSOR_SEQUENCE, Item, QueryTile, item_at, plan_sequence, take_item
from kvwatch_kernels.cpu.memory import Pointer, advance, f32_at, fetch_add, i32_at, i64_at, load, read, store, write
from kvwatch_kernels.cpu.micro_gemm import TILE
from kvwatch_kernels.cpu.packing import locate_rows
from kvwatch_kernels.cpu.scratch import Worker, cut_scratch, padded_head_dim
from kvwatch_kernels.cpu.softmax import merge_row
from kvwatch_kernels.cpu.tiles import attend_split, load_queries, store_outputs
from kvwatch_kernels.cpu.vectors import LANES

PARTIAL_HEADER = LANES
"""Floats before a partial row's sums: its largest score, its total, and padding."""


@inlined
def attend_all_splits(worker: Worker, item: Item, rows: Pointer, next_rows: Pointer) -> bool:
    """Attend to a query tile's whole context and write its outputs; arguments and result as of `attend_split`."""
    scratch, padded, tile = worker.scratch, worker.padded, item.tile
    for row in range(tile.num_rows):
        write(scratch.merged_total, row, np.float32(0.0))
    is_swapped = False
    for split in range(item.first_split, item.end_split):
        if attend_split(worker, item, split, rows, next_rows):
            rows, next_rows = next_rows, rows
            is_swapped = not is_swapped
        for row in range(tile.num_rows):
            merge_row(
                advance(scratch.merged_largest, row),
                advance(scratch.merged_total, row),
                advance(scratch.merged_sums, row * padded),
                advance(scratch.largest, row),
                advance(scratch.total, row),
                advance(scratch.sums, row * padded),
                padded,
            )
    store_outputs(worker, tile)
    return is_swapped


@inlined
def keep_partial(worker: Worker, tile: QueryTile, partials: Pointer) -> None:
    """Copy the state of one split to its partial rows."""
    scratch, padded = worker.scratch, worker.padded
    for row in range(tile.num_rows):
        partial = advance(partials, row * (PARTIAL_HEADER + padded))
        write(partial, 0, read(scratch.largest, row))
        write(partial, 1, read(scratch.total, row))
        for offset in range(0, padded, LANES):
            sums = load(advance(scratch.sums, row * padded + offset))
            store(advance(partial, PARTIAL_HEADER + offset), sums)


@inlined
def merge_partials(worker: Worker, tile: QueryTile, partials: Pointer, num_splits: int) -> None:
    """Merge the partial rows of all splits of a (sequence, KV head), in ascending order, and write the outputs."""
    scratch, padded = worker.scratch, worker.padded
    for row in range(tile.num_rows):
        total = advance(scratch.merged_total, row)
        write(total, 0, np.float32(0.0))
        for split in range(num_splits):
            partial = advance(partials, (split * tile.num_rows + row) * (PARTIAL_HEADER + padded))
            merge_row(
                advance(scratch.merged_largest, row),
                total,
                advance(scratch.merged_sums, row * padded),
                partial,
                advance(partial, 1),
                advance(partial, PARTIAL_HEADER),
                padded,
            )
    store_outputs(worker, tile)


@inlined
def attend_one_split(worker: Worker, item: Item, rows: Pointer, next_rows: Pointer) -> bool:
    """Attend to one split and keep its partial rows; whoever finishes the last split of a head merges them."""
    params, tile = worker.params, item.tile
    is_swapped: bool = attend_split(worker, item, item.first_split, rows, next_rows)
    row_floats = PARTIAL_HEADER + worker.padded
    partials = advance(f32_at(read(params, PARTIALS)), item.first_partial * row_floats)
    keep_partial(worker, tile, advance(partials, item.split * tile.num_rows * row_floats))
    counter = FIRST_SPLIT_COUNTER + item.sequence * read(params, NUM_KV_HEADS) + tile.head
    if fetch_add(i64_at(read(params, COUNTERS)), counter) == item.num_splits - 1:
        merge_partials(worker, tile, partials, item.num_splits)
    return is_swapped


@inlined
def run_items(params: Pointer, like: Pointer) -> None:
    """What every thread of the pool does: take work items until none is left.

    Args:
        params: see `fields.py`.
        like: pointer of the cache's kind of element; only its type is used.
    """
    padded = padded_head_dim(read(params, HEAD_DIM))
    thread = fetch_add(i64_at(read(params, COUNTERS)), THREAD_COUNTER)
    base = read(params, SCRATCH) + thread * read(params, SCRATCH_BYTES)
    worker = Worker(params, like, padded, cut_scratch(base, read(params, TILE_ROWS), padded))
    cursor = worker.scratch.cursor
    rows = worker.scratch.addresses
    next_rows = advance(rows, 2 * TILE)
    is_left = take_item(params, cursor)
    if is_left:
        item = item_at(params, cursor)
        locate_rows(params, item.tile.table, item.tile.head, item.first, item.end, rows)
    while is_left:
        item = item_at(params, cursor)
        load_queries(worker, item.tile)
        if item.num_splits > 1:
            is_swapped = attend_one_split(worker, item, rows, next_rows)
        else:
            is_swapped = attend_all_splits(worker, item, rows, next_rows)
        if is_swapped:
            rows, next_rows = next_rows, rows
        is_left = read(cursor, CURSOR_SEQUENCE) < read(params, NUM_SEQS)


@inlined
def find_fault(params: Pointer) -> tuple[int, int]:
    """Check the sequences' lengths against each other, the queries and the block tables.

    Returns:
        0 and 0, or which check failed and at which place.
    """
    starts = i32_at(read(params, QUERY_STARTS))
    context_lens = i32_at(read(params, CONTEXT_LENS))
    num_seqs = read(params, NUM_SEQS)
    max_context_len = read(params, MAX_BLOCKS) * read(params, BLOCK_SIZE)
    fault = place = 0
    if read(starts, num_seqs) != read(params, NUM_TOKENS):
        fault, place = FAULT_QUERY_STARTS, num_seqs
    for sequence in range(num_seqs):
        num_queries = read(starts, sequence + 1) - read(starts, sequence)
        if num_queries < 0:
            fault, place = FAULT_QUERY_STARTS, sequence + 1
        elif read(context_lens, sequence) < num_queries or read(context_lens, sequence) > max_context_len:
            fault, place = FAULT_CONTEXT_LEN, sequence
    if read(starts, 0) != 0:
        fault, place = FAULT_QUERY_STARTS, 0
    return fault, place


@inlined
def check_and_count_partials(params: Pointer) -> int:
    """Check the sequences' lengths and return the number of partial rows that the call needs.

    Returns 0 with `FAULT` set where the lengths are wrong.
    """
    fault, place = find_fault(params)
    write(params, FAULT, fault)
    write(params, FAULT_VALUE, place)
    partials = 0
    if fault == 0:
        for sequence in range(read(params, NUM_SEQS)):
            partials += plan_sequence(params, sequence).num_partials
    return partials
