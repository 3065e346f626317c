# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201, ANN202  # device code: its types are Triton's, and its branches are for the compiler
"""Kernels that write keys and values to their slots, quantised or not, rotated or not.

One program for each token and head. Knows one token's slot; slots that are negative are not written.
"""

import triton
import triton.language as tl

from kvwatch_kernels.triton.rounding import quantise_head


@triton.jit
def _store_head(
    cache,
    scales,
    x,
    slot,
    head,
    lanes,
    is_lane,
    block_stride,
    head_stride,
    slot_stride,
    scale_block_stride,
    scale_head_stride,
    BLOCK_SIZE: tl.constexpr,
    LIMIT: tl.constexpr,
    CODE: tl.constexpr,
):
    """Write one head T[LANES] to a slot that is not negative; `cache` is in bytes where CODE is not empty."""
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    place = cache + block * block_stride + head * head_stride + offset * slot_stride
    if CODE == "":
        tl.store(place + lanes, x, mask=is_lane)
    else:
        stored, scale = quantise_head(x.to(tl.float32), LIMIT, CODE)
        tl.store(place + lanes, stored.to(tl.uint8), mask=is_lane)
        tl.store(scales + block * scale_block_stride + head * scale_head_stride + offset, scale)


@triton.jit
def store_kernel(
    key,
    value,
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    slots,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    key_cache_block_stride,
    key_cache_head_stride,
    key_cache_slot_stride,
    value_cache_block_stride,
    value_cache_head_stride,
    value_cache_slot_stride,
    key_scale_block_stride,
    key_scale_head_stride,
    value_scale_block_stride,
    value_scale_head_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr,
    LIMIT: tl.constexpr,
    CODE: tl.constexpr,
):
    """Grid (num_tokens, num_kv_heads)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    lanes = tl.arange(0, LANES)
    is_lane = lanes < HEAD_DIM
    keys = tl.load(key + token * key_token_stride + head * key_head_stride + lanes, mask=is_lane, other=0.0)
    _store_head(
        key_cache,
        key_scales,
        keys,
        slot,
        head,
        lanes,
        is_lane,
        key_cache_block_stride,
        key_cache_head_stride,
        key_cache_slot_stride,
        key_scale_block_stride,
        key_scale_head_stride,
        BLOCK_SIZE=BLOCK_SIZE,
        LIMIT=LIMIT,
        CODE=CODE,
    )
    values = tl.load(value + token * value_token_stride + head * value_head_stride + lanes, mask=is_lane, other=0.0)
    _store_head(
        value_cache,
        value_scales,
        values,
        slot,
        head,
        lanes,
        is_lane,
        value_cache_block_stride,
        value_cache_head_stride,
        value_cache_slot_stride,
        value_scale_block_stride,
        value_scale_head_stride,
        BLOCK_SIZE=BLOCK_SIZE,
        LIMIT=LIMIT,
        CODE=CODE,
    )


@triton.jit
def _norm_and_turn(row, norm_weights, cosines, sines, eps, HEAD_DIM: tl.constexpr, LANES: tl.constexpr):
    """One head of a fused projection, normalised (if there are weights) and rotated: T[LANES], 0 behind the head.

    Rounds to T where torch's operations do: the norm before and after its weight, the first product, the sum.
    """
    T: tl.constexpr = row.dtype.element_ty
    HALF: tl.constexpr = HEAD_DIM // 2
    lanes = tl.arange(0, LANES)
    is_lane = lanes < HEAD_DIM
    partners = tl.where(lanes < HALF, lanes + HALF, lanes - HALF)
    x = tl.load(row + lanes, mask=is_lane, other=0.0)
    partner = tl.load(row + partners, mask=is_lane, other=0.0)
    tl.debug_barrier()  # a caller that writes in place may not overtake another thread's read
    if norm_weights is not None:
        wide = x.to(tl.float32)
        inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(wide * wide, 0) / HEAD_DIM + eps))
        weights = tl.load(norm_weights + lanes, mask=is_lane, other=0.0)
        partner_weights = tl.load(norm_weights + partners, mask=is_lane, other=0.0)
        x = ((wide * inverse).to(T) * weights).to(T)
        partner = ((partner.to(tl.float32) * inverse).to(T) * partner_weights).to(T)
    angles = tl.where(lanes < HALF, lanes, lanes - HALF)
    cosine = tl.load(cosines + angles, mask=is_lane, other=0.0)
    sine = tl.load(sines + angles, mask=is_lane, other=0.0).to(tl.float32)
    cross = partner.to(tl.float32) * sine
    return ((x * cosine).to(T).to(tl.float32) + tl.where(lanes < HALF, -cross, cross)).to(T)


@triton.jit
def rotate_and_store_kernel(
    qkv,
    cosine,
    sine,
    norm_weight,
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    slots,
    eps,
    qkv_token_stride,
    qkv_head_stride,
    key_cache_block_stride,
    key_cache_head_stride,
    key_cache_slot_stride,
    value_cache_block_stride,
    value_cache_head_stride,
    value_cache_slot_stride,
    key_scale_block_stride,
    key_scale_head_stride,
    value_scale_block_stride,
    value_scale_head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr,
    LIMIT: tl.constexpr,
    CODE: tl.constexpr,
):
    """Grid (num_tokens, num_heads + 2 * num_kv_heads): queries, keys, values."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    place = qkv + token * qkv_token_stride + row * qkv_head_stride
    slot = tl.load(slots + token)
    lanes = tl.arange(0, LANES)
    is_lane = lanes < HEAD_DIM
    if row >= NUM_HEADS + NUM_KV_HEADS:
        if slot >= 0:
            _store_head(
                value_cache,
                value_scales,
                tl.load(place + lanes, mask=is_lane, other=0.0),
                slot,
                row - NUM_HEADS - NUM_KV_HEADS,
                lanes,
                is_lane,
                value_cache_block_stride,
                value_cache_head_stride,
                value_cache_slot_stride,
                value_scale_block_stride,
                value_scale_head_stride,
                BLOCK_SIZE=BLOCK_SIZE,
                LIMIT=LIMIT,
                CODE=CODE,
            )
        return
    weights = norm_weight
    if norm_weight is not None:
        weights += row * HEAD_DIM
    angles = token * (HEAD_DIM // 2)
    turned = _norm_and_turn(place, weights, cosine + angles, sine + angles, eps, HEAD_DIM=HEAD_DIM, LANES=LANES)
    if row < NUM_HEADS:
        tl.store(place + lanes, turned, mask=is_lane)
    elif slot >= 0:
        _store_head(
            key_cache,
            key_scales,
            turned,
            slot,
            row - NUM_HEADS,
            lanes,
            is_lane,
            key_cache_block_stride,
            key_cache_head_stride,
            key_cache_slot_stride,
            key_scale_block_stride,
            key_scale_head_stride,
            BLOCK_SIZE=BLOCK_SIZE,
            LIMIT=LIMIT,
            CODE=CODE,
        )
