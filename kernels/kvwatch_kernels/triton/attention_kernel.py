# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201  # device code: its types are Triton's, and its branches are for the compiler
"""One attention kernel for decode, chunked prefill and mixed batches, over plain and quantised paged caches.

A program takes a tile of queries of one sequence, all heads that share one KV head, and the whole visible context or
one split of it. Which sequence that is, it finds itself: the grid is an upper bound that needs no lengths on the host.
"""

import triton
import triton.language as tl

from kvwatch_kernels.triton.softmax import _attend_tiles


@triton.jit
def find_sequence(query_starts, num_seqs, block, BLOCK_Q: tl.constexpr):
    """Sequence of query block `block`: the last one whose blocks begin at or before it.

    Sequence i begins at block query_starts[i] // BLOCK_Q + i: each may waste one block, none overlaps the next.
    """
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) // BLOCK_Q + middle <= block:
            low = middle
        else:
            high = middle
    return low


@triton.jit(do_not_specialize=["num_seqs", "num_splits"])
def attention_kernel(
    out,
    partial_sums,
    partial_maxima,
    partial_norms,
    query,
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    block_tables,
    query_starts,
    context_lens,
    alibi_slopes,
    scale,
    num_seqs,
    num_splits,
    out_token_stride,
    out_head_stride,
    query_token_stride,
    query_head_stride,
    key_block_stride,
    key_head_stride,
    key_slot_stride,
    value_block_stride,
    value_head_stride,
    value_slot_stride,
    key_scale_block_stride,
    key_scale_head_stride,
    value_scale_block_stride,
    value_scale_head_stride,
    table_stride,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    IS_QUANTISED: tl.constexpr,
    E4M3_BITS: tl.constexpr,
    ONE_QUERY: tl.constexpr,
):
    """Grid (num_tokens // BLOCK_Q + num_seqs, num_kv_heads, splits); SPLIT 0: one split, results go to `out`.

    Else each split's sums go to f32[num_tokens, num_heads, num_splits, HEAD_DIM], maxima and norms to the like without
    HEAD_DIM.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    if SAME_STRIDES:  # so one offset serves both
        value_block_stride = key_block_stride
        value_head_stride = key_head_stride
        value_slot_stride = key_slot_stride
        value_scale_block_stride = key_scale_block_stride
        value_scale_head_stride = key_scale_head_stride
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = find_sequence(query_starts, num_seqs, block, BLOCK_Q)
    start = tl.load(query_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - start
    first_query = (block - start // BLOCK_Q - sequence) * BLOCK_Q
    if first_query >= num_queries:
        return

    # What the first and the last query of this tile see.
    first_position = tl.load(context_lens + sequence) - num_queries + first_query
    last_position = first_position + tl.minimum(BLOCK_Q, num_queries - first_query) - 1
    first_seen = 0
    seen_by_all = 0
    if WINDOW > 0:
        first_seen = tl.maximum(first_position - WINDOW + 1, 0)
        seen_by_all = tl.maximum(last_position - WINDOW + 1, 0)
    first_tile = first_seen // TILE
    end_tile = last_position // TILE + 1
    if SPLIT > 0:
        split = tl.program_id(2)
        first_tile = tl.maximum(first_tile, split * (SPLIT // TILE))
        end_tile = tl.minimum(end_tile, (split + 1) * (SPLIT // TILE))
        if first_tile >= end_tile:
            return
    # Tiles: left edge of the window | seen by all rows | up to the diagonal.
    inner_tile = tl.minimum(tl.maximum((seen_by_all + TILE - 1) // TILE, first_tile), end_tile)
    outer_tile = tl.minimum(tl.maximum((first_position + 1) // TILE, inner_tile), end_tile)

    rows = tl.arange(0, BLOCK_M)
    lanes = tl.arange(0, LANES)
    query_of_row = first_query + rows // GROUP
    head_of_row = kv_head * GROUP + rows % GROUP
    is_row = (rows < BLOCK_Q * GROUP) & (query_of_row < num_queries)
    positions = first_position + rows // GROUP
    token_of_row = (start + query_of_row).to(tl.int64)
    is_element = is_row[:, None] & (lanes < HEAD_DIM)[None, :]
    query_places = query + token_of_row * query_token_stride + head_of_row.to(tl.int64) * query_head_stride
    queries = tl.load(query_places[:, None] + lanes[None, :], mask=is_element, other=0.0)
    slopes = tl.zeros([BLOCK_M], tl.float32)
    if HAS_ALIBI:
        slopes = tl.load(alibi_slopes + head_of_row, mask=is_row, other=0.0)

    table = block_tables + sequence.to(tl.int64) * table_stride
    head = kv_head.to(tl.int64)
    keys_of_head = key_cache + head * key_head_stride
    values_of_head = value_cache + head * value_head_stride
    key_scales_of_head = key_scales
    value_scales_of_head = value_scales
    if IS_QUANTISED:
        key_scales_of_head += head * key_scale_head_stride
        value_scales_of_head += head * value_scale_head_stride

    sums = tl.zeros([BLOCK_M, LANES], tl.float32)
    maxima = tl.full([BLOCK_M], float("-inf"), tl.float32)
    norms = tl.zeros([BLOCK_M], tl.float32)
    for part in tl.static_range(3):
        if part == 0:
            part_start, part_end = first_tile, inner_tile
        elif part == 1:
            part_start, part_end = inner_tile, outer_tile
        else:
            part_start, part_end = outer_tile, end_tile
        if part > 0 or WINDOW > 0:
            sums, maxima, norms = _attend_tiles(
                sums,
                maxima,
                norms,
                part_start,
                part_end,
                queries,
                query_places,
                is_row,
                positions,
                slopes,
                first_seen,
                last_position,
                table,
                keys_of_head,
                values_of_head,
                key_scales_of_head,
                value_scales_of_head,
                scale,
                key_block_stride,
                key_slot_stride,
                value_block_stride,
                value_slot_stride,
                key_scale_block_stride,
                value_scale_block_stride,
                BLOCK_SIZE=BLOCK_SIZE,
                HEAD_DIM=HEAD_DIM,
                LANES=LANES,
                CHUNK=CHUNK,
                TILE=TILE,
                WINDOW=WINDOW,
                SOFT_CAP=SOFT_CAP,
                HAS_ALIBI=HAS_ALIBI,
                IS_QUANTISED=IS_QUANTISED,
                E4M3_BITS=E4M3_BITS,
                ONE_QUERY=ONE_QUERY,
                IS_EDGE=part != 1,
            )

    if SPLIT > 0:
        places = (token_of_row * (NUM_KV_HEADS * GROUP) + head_of_row) * num_splits + split
        tl.store(partial_maxima + places, maxima, mask=is_row)
        tl.store(partial_norms + places, norms, mask=is_row)
        tl.store(partial_sums + places[:, None] * HEAD_DIM + lanes[None, :], sums, mask=is_element)
    else:
        out_places = out + token_of_row * out_token_stride + head_of_row.to(tl.int64) * out_head_stride
        results = (sums / norms[:, None]).to(out.dtype.element_ty)
        tl.store(out_places[:, None] + lanes[None, :], results, mask=is_element)
