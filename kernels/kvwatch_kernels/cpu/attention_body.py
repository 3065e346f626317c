"""Paged attention as compiled code: the work items, and what a thread does with one.

A work item is one query tile of one sequence and KV head: over all splits of its context, or over one split where the
sequence has but one query tile (decoding), so that a single long context keeps every core busy. The threads of the pool
take items from a common counter; whoever finishes the last split of a (sequence, KV head) merges its splits, always in
ascending order.

The reduction order is that of `SPLIT` and `TILE` over token positions, whichever thread does what: results have the
same bits for any batch, chunking of the prefill, block size and number of threads.
"""

from typing import NamedTuple

import numba
import numpy as np

from kvwatch_kernels.cpu.compiled import inlined, subroutine
from kvwatch_kernels.cpu.fields import (
    BLOCK_SIZE,
    BLOCK_TABLES,
    CONTEXT_LENS,
    COUNTERS,
    FAULT,
    FAULT_CONTEXT_LEN,
    FAULT_QUERY_STARTS,
    FAULT_VALUE,
    FIRST_SPLIT_COUNTER,
    GROUP_SIZE,
    HEAD_DIM,
    ITEM_COUNTER,
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
from kvwatch_kernels.cpu.memory import Pointer, advance, f32_at, fetch_add, i32_at, i64_at, load, read, store, write
from kvwatch_kernels.cpu.scratch import Worker, cut_scratch, padded_head_dim
from kvwatch_kernels.cpu.softmax import merge_row
from kvwatch_kernels.cpu.tiles import SPLIT, QueryTile, attend_split, first_visible, load_queries, store_outputs
from kvwatch_kernels.cpu.vectors import LANES

PARTIAL_HEADER = LANES
"""Floats before a partial row's sums: its largest score, its total, and padding."""


class Plan(NamedTuple):
    """How one sequence is cut into work items."""

    first_token: int
    num_queries: int
    first_position: int
    tile_queries: int
    """Queries of a full query tile."""
    num_tiles: int
    first_split: int
    """First split that the first query sees."""
    num_splits: int
    is_split: bool
    """Each split is a work item of its own and leaves partial rows."""
    num_items: int
    num_partials: int
    """Partial rows of all its heads and splits."""


@subroutine
def plan_sequence(params: Pointer, sequence: int) -> Plan:
    """Cut a sequence into work items; cheap enough for every thread to do it for itself."""
    starts = i32_at(read(params, QUERY_STARTS))
    first_token = numba.int64(read(starts, sequence))
    num_queries = read(starts, sequence + 1) - first_token
    context_len = numba.int64(read(i32_at(read(params, CONTEXT_LENS)), sequence))
    group_size, num_heads = read(params, GROUP_SIZE), read(params, NUM_KV_HEADS)
    tile_queries = read(params, TILE_ROWS) // group_size
    num_tiles = -(-num_queries // tile_queries)
    first_position = context_len - num_queries
    first_split = first_visible(params, first_position) // SPLIT
    num_splits = -(-context_len // SPLIT) - first_split
    is_split = num_tiles == 1 and num_splits > 1
    num_items = num_heads * (num_splits if is_split else num_tiles)
    num_partials = num_heads * num_splits * num_queries * group_size if is_split else 0
    return Plan(
        first_token,
        num_queries,
        first_position,
        tile_queries,
        num_tiles,
        first_split,
        num_splits,
        is_split,
        num_items,
        num_partials,
    )


@inlined
def query_tile(params: Pointer, plan: Plan, sequence: int, head: int, index: int) -> QueryTile:
    """Query tile `index` of a sequence for one KV head."""
    first_query = index * plan.tile_queries
    num_queries = min(plan.tile_queries, plan.num_queries - first_query)
    return QueryTile(
        plan.first_token + first_query,
        plan.first_position + first_query,
        num_queries,
        num_queries * read(params, GROUP_SIZE),
        head,
        advance(i32_at(read(params, BLOCK_TABLES)), sequence * read(params, MAX_BLOCKS)),
    )


@inlined
def attend_all_splits(worker: Worker, tile: QueryTile) -> None:
    """Attend to a query tile's whole context and write its outputs."""
    scratch, padded = worker.scratch, worker.padded
    load_queries(worker, tile)
    for row in range(tile.num_rows):
        write(scratch.merged_total, row, np.float32(0.0))
    first = first_visible(worker.params, tile.first_position) // SPLIT
    end = -(-(tile.first_position + tile.num_queries) // SPLIT)
    for split in range(first, end):
        attend_split(worker, tile, split)
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
def run_item(worker: Worker, plan: Plan, sequence: int, index: int, first_partial: int) -> None:
    """Carry out work item `index` of a sequence.

    Args:
        worker: this thread's.
        plan: the sequence's.
        sequence: its place in the batch.
        index: 0 to `plan.num_items - 1`.
        first_partial: partial rows of the sequences before this one.
    """
    params = worker.params
    num_heads = read(params, NUM_KV_HEADS)
    if not plan.is_split:
        # Later query tiles see more: the longest items go first, so that no thread ends alone with one.
        from_last = index // num_heads
        tile = query_tile(params, plan, sequence, index - from_last * num_heads, plan.num_tiles - 1 - from_last)
        attend_all_splits(worker, tile)
        return
    head = index // plan.num_splits
    split = index - head * plan.num_splits
    tile = query_tile(params, plan, sequence, head, 0)
    load_queries(worker, tile)
    attend_split(worker, tile, plan.first_split + split)
    row_floats = PARTIAL_HEADER + worker.padded
    first_row = first_partial + head * plan.num_splits * tile.num_rows
    partials = advance(f32_at(read(params, PARTIALS)), first_row * row_floats)
    keep_partial(worker, tile, advance(partials, split * tile.num_rows * row_floats))
    counter = FIRST_SPLIT_COUNTER + sequence * num_heads + head
    if fetch_add(i64_at(read(params, COUNTERS)), counter) == plan.num_splits - 1:
        merge_partials(worker, tile, partials, plan.num_splits)


@inlined
def run_items(params: Pointer, like: Pointer) -> None:
    """What every thread of the pool does: take work items until none is left.

    Args:
        params: see `fields.py`.
        like: pointer of the dtype of queries, cache and outputs; only its type is used.
    """
    counters = i64_at(read(params, COUNTERS))
    padded = padded_head_dim(read(params, HEAD_DIM))
    base = read(params, SCRATCH) + fetch_add(counters, THREAD_COUNTER) * read(params, SCRATCH_BYTES)
    worker = Worker(params, like, padded, cut_scratch(base, read(params, TILE_ROWS), padded))
    item = fetch_add(counters, ITEM_COUNTER)
    first_item = first_partial = 0
    for sequence in range(read(params, NUM_SEQS)):
        plan = plan_sequence(params, sequence)
        while item < first_item + plan.num_items:
            run_item(worker, plan, sequence, item - first_item, first_partial)
            item = fetch_add(counters, ITEM_COUNTER)
        first_item += plan.num_items
        first_partial += plan.num_partials


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
