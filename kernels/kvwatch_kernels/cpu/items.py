"""Work items of paged attention: how sequences are cut into them, and how a thread takes one.

A work item is one query tile of one sequence and KV head: over all splits of its context, or over one split where the
sequence has but one query tile (decoding), so that a single long context keeps every core busy. The threads of the pool
take items from a common counter, a little before they need them: see `locate_next` in `tiles.py`.
"""

from typing import NamedTuple

import numba

from kvwatch_kernels.cpu.compiled import inlined, subroutine
from kvwatch_kernels.cpu.fields import (
    BLOCK_TABLES,
    CONTEXT_LENS,
    COUNTERS,
    GROUP_SIZE,
    ITEM_COUNTER,
    MAX_BLOCKS,
    NUM_KV_HEADS,
    NUM_SEQS,
    QUERY_STARTS,
    TILE_ROWS,
    WINDOW,
)
from kvwatch_kernels.cpu.memory import Pointer, advance, fetch_add, i32_at, i64_at, read, write
from kvwatch_kernels.cpu.micro_gemm import TILE

SPLIT = 256
"""Token positions whose weighted values are summed up on their own. Part of the reduction order, as `TILE` is."""


CURSOR_ITEM, CURSOR_SEQUENCE, CURSOR_FIRST_ITEM, CURSOR_FIRST_PARTIAL = range(4)
"""Places in a thread's cursor: the item that it took, the item's sequence (num_seqs: no item was left), and the items
and partial rows of the sequences before."""
CURSOR_FIELDS = 4


class QueryTile(NamedTuple):
    """Consecutive queries of one sequence, for the query heads of one KV head.

    Row = query * group size + head of the group.
    """

    first_token: int
    """Where the first query lies in the packed batch."""
    first_position: int
    """Position of the first query in its sequence."""
    num_queries: int
    num_rows: int
    head: int
    """KV head."""
    table: Pointer
    """i32[max_blocks]: the sequence's block table."""


@subroutine
def first_visible(params: Pointer, position: int) -> int:
    """First position that the query at `position` sees."""
    position -= read(params, WINDOW) - 1
    return max(0, position)


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


class Item(NamedTuple):
    """A work item: a query tile and the stretch of its context that is attended to."""

    tile: QueryTile
    sequence: int
    first_split: int
    end_split: int
    first: int
    """First token position, a multiple of TILE."""
    end: int
    """One after the last token position."""
    num_splits: int
    """Splits of which this item is one; 1 where the item has all of them to itself."""
    split: int
    """Which of those."""
    first_partial: int
    """First partial row of the (sequence, KV head)."""


@inlined
def item_at(params: Pointer, cursor: Pointer) -> Item:
    """The item at the cursor, which has one."""
    sequence = read(cursor, CURSOR_SEQUENCE)
    index = read(cursor, CURSOR_ITEM) - read(cursor, CURSOR_FIRST_ITEM)
    num_heads = read(params, NUM_KV_HEADS)
    plan = plan_sequence(params, sequence)
    if plan.is_split:
        head = index // plan.num_splits
        split = index - head * plan.num_splits
        num_splits = plan.num_splits
        tile = query_tile(params, plan, sequence, head, 0)
        first_split = plan.first_split + split
        end_split = first_split + 1
    else:
        # Later query tiles see more: the longest items go first, so that no thread ends alone with one.
        from_last = index // num_heads
        head = index - from_last * num_heads
        split, num_splits = 0, 1
        tile = query_tile(params, plan, sequence, head, plan.num_tiles - 1 - from_last)
        first_split = first_visible(params, tile.first_position) // SPLIT
        end_split = -(-(tile.first_position + tile.num_queries) // SPLIT)
    seen_from = first_visible(params, tile.first_position) // TILE * TILE
    first = max(first_split * SPLIT, seen_from)
    end = min(end_split * SPLIT, tile.first_position + tile.num_queries)
    first_partial = read(cursor, CURSOR_FIRST_PARTIAL) + head * plan.num_splits * tile.num_rows
    return Item(tile, sequence, first_split, end_split, first, end, num_splits, split, first_partial)


@subroutine
def take_item(params: Pointer, cursor: Pointer) -> bool:
    """Take the next work item and move the cursor to it; false where none is left."""
    item = fetch_add(i64_at(read(params, COUNTERS)), ITEM_COUNTER)
    sequence = read(cursor, CURSOR_SEQUENCE)
    first_item, first_partial = read(cursor, CURSOR_FIRST_ITEM), read(cursor, CURSOR_FIRST_PARTIAL)
    num_seqs = read(params, NUM_SEQS)
    while sequence < num_seqs:
        plan = plan_sequence(params, sequence)
        if item < first_item + plan.num_items:
            break
        first_item += plan.num_items
        first_partial += plan.num_partials
        sequence += 1
    write(cursor, CURSOR_ITEM, item)
    write(cursor, CURSOR_SEQUENCE, sequence)
    write(cursor, CURSOR_FIRST_ITEM, first_item)
    write(cursor, CURSOR_FIRST_PARTIAL, first_partial)
    is_left: bool = sequence < num_seqs
    return is_left
