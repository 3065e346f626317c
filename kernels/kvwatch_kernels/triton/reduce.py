# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201  # device code: its types are Triton's, and its branches are for the compiler
"""Merges the splits of long contexts: the second half of attention, where Triton has no barrier across programs.

Ascending, a fixed number at a time, so that the order depends on positions only.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_seqs", "num_splits"])
def reduce_kernel(
    out,
    partial_sums,
    partial_maxima,
    partial_norms,
    query_starts,
    context_lens,
    num_seqs,
    num_splits,
    out_token_stride,
    out_head_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS_AT_ONCE: tl.constexpr,
):
    """Grid (num_tokens, num_heads). Reads only the splits that the token sees, which are those that were written."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    sequence = find_sequence_of_token(query_starts, num_seqs, token)
    end = tl.load(query_starts + sequence + 1)
    if token >= end:
        return
    position = tl.load(context_lens + sequence) - end + token
    first_split = 0
    if WINDOW > 0:
        first_split = tl.maximum(position - WINDOW + 1, 0) // SPLIT
    end_split = position // SPLIT + 1

    lanes = tl.arange(0, LANES)
    is_lane = lanes < HEAD_DIM
    first_place = (token.to(tl.int64) * NUM_HEADS + head) * num_splits
    sums = tl.zeros([LANES], tl.float32)
    norm = 0.0
    maximum = float("-inf")
    for chunk in range(first_split, end_split, SPLITS_AT_ONCE):
        splits = chunk + tl.arange(0, SPLITS_AT_ONCE)
        is_split = splits < end_split
        places = first_place + splits
        maxima = tl.load(partial_maxima + places, mask=is_split, other=float("-inf"))
        norms = tl.load(partial_norms + places, mask=is_split, other=0.0)
        pointers = partial_sums + places[:, None] * HEAD_DIM + lanes[None, :]
        parts = tl.load(pointers, mask=is_split[:, None] & is_lane[None, :], other=0.0)

        new_maximum = tl.maximum(maximum, tl.max(maxima, 0))
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        fading = tl.exp2(maximum - shift)
        factors = tl.exp2(maxima - shift)
        sums = sums * fading + tl.sum(parts * factors[:, None], 0)
        norm = norm * fading + tl.sum(norms * factors, 0)
        maximum = new_maximum
    place = out + token.to(tl.int64) * out_token_stride + head.to(tl.int64) * out_head_stride
    tl.store(place + lanes, (sums / norm).to(out.dtype.element_ty), mask=is_lane)


@triton.jit
def find_sequence_of_token(query_starts, num_seqs, token):
    """Sequence that has query `token`, the last if none: the last one that starts at or before it."""
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) <= token:
            low = middle
        else:
            high = middle
    return low
