# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202, RET505, SIM108  # device code: its types are Triton's, and its branches are for the compiler
"""Device functions of attention: scores, the online softmax, one run of tiles.

Knows pointers to one sequence's table and to one KV head; nothing of batches or splits. Positions are 32-bit, what is
added to a pointer is 64-bit.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _widen(stored, T: tl.constexpr, E4M3_BITS: tl.constexpr):
    """Stored numbers as T, exactly; with E4M3_BITS they are bytes, and the result is 1/256 of what they stand for."""
    if E4M3_BITS:
        # Shifted so, the bits are a float16 with the exponent's bias off by 8. Subnormals come out right as well.
        bits = stored.to(tl.uint16)
        halves = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        return halves.to(T)
    else:
        return stored.to(T)


@triton.jit
def _tanh(x):
    """From one exponential of a number that is not positive, so that nothing overflows."""
    decay = tl.exp(-2.0 * tl.abs(x))
    positive = (1.0 - decay) / (1.0 + decay)
    return tl.where(x < 0, -positive, positive)


@triton.jit
def _base_two_scores(products, scale, slopes, distances, SOFT_CAP: tl.constexpr, HAS_ALIBI: tl.constexpr):
    """Scores times log2(e).

    products f32[M, TILE], slopes f32[M], distances i32[M, TILE] = key position - query position -> f32[M, TILE]
    """
    if SOFT_CAP > 0:
        scores = _tanh(products * (scale / SOFT_CAP)) * (SOFT_CAP * LOG2_E)
    else:
        scores = products * (scale * LOG2_E)
    if HAS_ALIBI:
        scores += (slopes * LOG2_E)[:, None] * distances
    return scores


@triton.jit
def _attend_tiles(
    sums,
    maxima,
    norms,
    first_tile,
    end_tile,
    queries,
    query_places,
    is_row,
    positions,
    slopes,
    first_seen,
    last_seen,
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
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    IS_QUANTISED: tl.constexpr,
    E4M3_BITS: tl.constexpr,
    ONE_QUERY: tl.constexpr,
    IS_EDGE: tl.constexpr,
):
    """Take tiles `first_tile` to `end_tile - 1` into the running softmax.

    Shapes: sums f32[M, LANES], maxima and norms f32[M], queries T[M, LANES], positions i32[M], slopes f32[M]. No row
    sees tokens outside of `first_seen` to `last_seen`, and they are not read. Without IS_EDGE every row sees all of the
    tiles. With CHUNK below LANES the queries are read again, CHUNK elements at a time: without matrix units a product
    keeps its whole rows in registers, where they would not fit.
    """
    lanes = tl.arange(0, LANES)
    is_lane = lanes < HEAD_DIM
    for tile in tl.range(first_tile, end_tile, num_stages=1 if IS_EDGE else None):
        tokens = tile * TILE + tl.arange(0, TILE)
        slots = (tokens % BLOCK_SIZE).to(tl.int64)
        distances = tokens[None, :] - positions[:, None]
        is_read = (tokens >= first_seen) & (tokens <= last_seen)
        is_visible = is_read[None, :] & (distances <= 0)
        if WINDOW > 0:
            is_visible &= distances > -WINDOW
        if IS_EDGE:
            blocks = tl.load(table + tokens // BLOCK_SIZE, mask=is_read, other=0).to(tl.int64)
        else:
            blocks = tl.load(table + tokens // BLOCK_SIZE).to(tl.int64)

        key_places = keys_of_head + blocks * key_block_stride + slots * key_slot_stride
        value_places = values_of_head + blocks * value_block_stride + slots * value_slot_stride
        if CHUNK == LANES:
            keys = _load_rows(key_places, is_read, lanes, is_lane, IS_EDGE, LANES > HEAD_DIM)
            keys = _widen(keys, queries.dtype, E4M3_BITS)
            products = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        else:
            products = tl.zeros([queries.shape[0], TILE], tl.float32)
            for chunk in tl.static_range(LANES // CHUNK):
                part = chunk * CHUNK + tl.arange(0, CHUNK)
                is_part = part < HEAD_DIM
                is_element = is_row[:, None] & is_part[None, :]
                query_part = tl.load(query_places[:, None] + part[None, :], mask=is_element, other=0.0)
                keys = _load_rows(key_places, is_read, part, is_part, IS_EDGE, LANES > HEAD_DIM)
                keys = _widen(keys, queries.dtype, E4M3_BITS)
                products = tl.dot(query_part, tl.trans(keys), products, input_precision="ieee")
        values = _load_rows(value_places, is_read, lanes, is_lane, IS_EDGE, LANES > HEAD_DIM)
        if IS_QUANTISED:
            key_scale_places = key_scales_of_head + blocks * key_scale_block_stride + slots
            value_scale_places = value_scales_of_head + blocks * value_scale_block_stride + slots
            key_scales = _load_scales(key_scale_places, is_read, IS_EDGE, E4M3_BITS)
            value_scales = _load_scales(value_scale_places, is_read, IS_EDGE, E4M3_BITS)
            products *= key_scales[None, :]
        scores = _base_two_scores(products, scale, slopes, distances, SOFT_CAP, HAS_ALIBI)
        if IS_EDGE:
            scores = tl.where(is_visible, scores, float("-inf"))

        new_maxima = tl.maximum(maxima, tl.max(scores, 1))
        shifts = tl.where(new_maxima == float("-inf"), 0.0, new_maxima)  # -inf - -inf would be NaN
        weights = tl.exp2(scores - shifts[:, None])
        fading = tl.exp2(maxima - shifts)
        maxima = new_maxima
        norms = norms * fading + tl.sum(weights, 1)
        sums = sums * fading[:, None]
        if IS_QUANTISED:
            sums = _add_quantised(
                sums, weights, _widen(values, queries.dtype, E4M3_BITS), value_scales, is_visible, IS_EDGE
            )
        elif IS_EDGE and not ONE_QUERY:
            sums, norms = _add_partly_visible(sums, norms, weights, values, is_visible)
        else:
            sums = tl.dot(weights.to(values.dtype), values, sums, input_precision="ieee")
    return sums, maxima, norms


@triton.jit
def _load_rows(places, is_read, lanes, is_lane, IS_EDGE: tl.constexpr, HAS_PADDING: tl.constexpr):
    """Heads of a tile's tokens, C[TILE, LANES]: zeros where nothing is read, whatever is there."""
    pointers = places[:, None] + lanes[None, :]
    if IS_EDGE and HAS_PADDING:
        return tl.load(pointers, mask=is_read[:, None] & is_lane[None, :], other=0.0)
    elif IS_EDGE:
        return tl.load(pointers, mask=is_read[:, None], other=0.0)
    elif HAS_PADDING:
        return tl.load(pointers, mask=is_lane[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _load_scales(places, is_read, IS_EDGE: tl.constexpr, E4M3_BITS: tl.constexpr):
    """Scales of a tile's tokens, f32[TILE]; they make up for `_widen`."""
    if IS_EDGE:
        scales = tl.load(places, mask=is_read, other=0.0)
    else:
        scales = tl.load(places)
    return scales * 256.0 if E4M3_BITS else scales


@triton.jit
def _add_quantised(sums, weights, values, value_scales, is_visible, IS_EDGE: tl.constexpr):
    """Add weights x (values * scales) to the sums, the scales folded into the weights.

    In float16 such weights could become subnormal, so they are taken relative to the tile's largest scale. A scale of
    NaN reaches the rows that see its token, and no others.
    """
    if values.dtype == tl.float16:
        largest = tl.max(tl.where(value_scales < float("inf"), value_scales, 0.0), 0)
        unit = tl.where(largest > 0, largest, 1.0)
        weights = weights * (value_scales / unit)[None, :]
        if IS_EDGE:
            weights = tl.where(is_visible, weights, 0.0)
        return sums + tl.dot(weights.to(values.dtype), values, input_precision="ieee") * unit
    else:
        weights = weights * value_scales[None, :]
        if IS_EDGE:
            weights = tl.where(is_visible, weights, 0.0)
        return tl.dot(weights.to(values.dtype), values, sums, input_precision="ieee")


@triton.jit
def _add_partly_visible(sums, norms, weights, values, is_visible):
    """Add weights x values to the sums; the norms become NaN for the rows that see a value that is not finite.

    A weight of zero does not keep NaN out of a product, so what is not finite is left out of it.
    """
    is_finite = tl.abs(values) < float("inf")
    sums = tl.dot(weights.to(values.dtype), tl.where(is_finite, values, 0.0), sums, input_precision="ieee")
    is_broken = tl.min(is_finite.to(tl.int32), 1) == 0
    sees_broken = tl.max((is_visible & is_broken[None, :]).to(tl.int32), 1) == 1
    return sums, tl.where(sees_broken, float("nan"), norms)
