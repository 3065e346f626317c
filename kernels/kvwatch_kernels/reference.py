"""The kernels in plain torch: slow, obvious, and the oracle of the fast ones. Runs on any device.

It gathers whole contexts, which the fast kernels never do.
"""

import torch
from torch import Tensor
from torch.nn import functional

from kvwatch_kernels.dims import PAD_SLOT, Int32Array, Int64Array
from kvwatch_kernels.errors import ShapeError
from kvwatch_kernels.quant import dequantise, quantise


def reference_paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    block_tables: Int32Array,
    query_starts: Int32Array,
    context_lens: Int32Array,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    out: Tensor,
) -> None:
    """Attention one sequence at a time, in float32; see `kvwatch_kernels.paged_attention`.

    Args:
        query: T[num_tokens, num_heads, head_dim].
        key_cache: C[num_blocks, num_kv_heads, block_size, head_dim].
        value_cache: C[num_blocks, num_kv_heads, block_size, head_dim].
        block_tables: i32[num_seqs, max_blocks].
        query_starts: i32[num_seqs + 1].
        context_lens: i32[num_seqs].
        scale: factor of the scores.
        sliding_window: tokens that a query sees, itself included; None for all.
        soft_cap: bound of the scores; None for none.
        alibi_slopes: f32[num_heads], or none.
        key_scales: f32[num_blocks, num_kv_heads, block_size] of a quantised cache.
        value_scales: likewise.
        out: T[num_tokens, num_heads, head_dim]; written.

    Raises:
        ShapeError: the lengths contradict each other, or a block id lies outside of the cache; sequences before it may
            have been written.
    """
    num_blocks, _, block_size, _ = key_cache.shape
    starts, lens = query_starts.tolist(), context_lens.tolist()
    if starts[0] != 0 or starts[-1] != len(query) or starts != sorted(starts):
        raise ShapeError(
            f"query_starts is {starts}: must start at 0, never fall, and end at {len(query)}, the tokens in query"
        )
    for sequence, (first, end, context_len) in enumerate(zip(starts, starts[1:], lens, strict=False)):
        if not end - first <= context_len <= block_tables.shape[1] * block_size:
            raise ShapeError(
                f"context_lens[{sequence}] is {context_len}: must be at least its {end - first} queries "
                f"and at most the {block_tables.shape[1] * block_size} tokens that a row of block_tables holds"
            )
        if first == end:
            continue
        blocks = block_tables[sequence, : -(-context_len // block_size)].tolist()
        for block in blocks:
            if not 0 <= block < num_blocks:
                raise ShapeError(f"block_tables names block {block}: the cache has blocks 0 to {num_blocks - 1}")
        keys = _context(key_cache, key_scales, blocks, context_len)
        values = _context(value_cache, value_scales, blocks, context_len)
        scores = _scores(query[first:end], keys, scale, soft_cap, alibi_slopes)
        out[first:end] = _attend(scores, values, sliding_window)


def _context(cache: Tensor, scales: Tensor | None, blocks: list[int], context_len: int) -> Tensor:
    """Gather one side of a sequence's context.

    Args:
        cache: C[num_blocks, num_kv_heads, block_size, head_dim].
        scales: f32[num_blocks, num_kv_heads, block_size], or none.
        blocks: of the sequence, in order.
        context_len: tokens.

    Returns:
        f32[num_kv_heads, context_len, head_dim]
    """
    heads = cache[blocks].transpose(0, 1).flatten(1, 2)[:, :context_len]
    if scales is None:
        return heads.float()
    return dequantise(heads, scales[blocks].transpose(0, 1).flatten(1, 2)[:, :context_len])


def _scores(query: Tensor, keys: Tensor, scale: float, soft_cap: float | None, alibi_slopes: Tensor | None) -> Tensor:
    """Scores of the last queries of one sequence against its whole context.

    Args:
        query: T[num_queries, num_heads, head_dim].
        keys: f32[num_kv_heads, context_len, head_dim].
        scale: factor of the products.
        soft_cap: see `reference_paged_attention`.
        alibi_slopes: likewise.

    Returns:
        f32[num_heads, num_queries, context_len]
    """
    num_queries, num_heads, _ = query.shape
    num_kv_heads, context_len, _ = keys.shape
    keys = keys.repeat_interleave(num_heads // num_kv_heads, dim=0)
    scores = query.float().transpose(0, 1) @ keys.transpose(1, 2) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if alibi_slopes is not None:
        positions = torch.arange(context_len, device=query.device)
        distances = positions - positions[context_len - num_queries :, None]
        scores = scores + alibi_slopes[:, None, None] * distances
    return scores


def _attend(scores: Tensor, values: Tensor, sliding_window: int | None) -> Tensor:
    """Weigh the values of one sequence's context.

    Args:
        scores: f32[num_heads, num_queries, context_len].
        values: f32[num_kv_heads, context_len, head_dim].
        sliding_window: see `reference_paged_attention`.

    Returns:
        f32[num_queries, num_heads, head_dim]
    """
    num_heads, num_queries, context_len = scores.shape
    key_positions = torch.arange(context_len, device=scores.device)
    positions = key_positions[context_len - num_queries :, None]
    is_visible = key_positions <= positions
    if sliding_window is not None:
        is_visible &= key_positions > positions - sliding_window
    values = values.repeat_interleave(num_heads // len(values), dim=0)
    weights = scores.masked_fill(~is_visible, float("-inf")).softmax(dim=-1)
    # A value that a query may not see can be NaN, and zero times NaN is NaN: each query multiplies only what it sees.
    rows = [weights[:, row, seen].unsqueeze(1) @ values[:, seen] for row, seen in enumerate(is_visible)]
    return torch.cat(rows, dim=1).transpose(0, 1)


def reference_kv_store(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Int64Array,
    *,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> None:
    """Write token by token; see `kvwatch_kernels.kv_store`.

    Args:
        key: T[num_tokens, num_kv_heads, head_dim].
        value: T[num_tokens, num_kv_heads, head_dim].
        key_cache: C[num_blocks, num_kv_heads, block_size, head_dim]; written.
        value_cache: C[num_blocks, num_kv_heads, block_size, head_dim]; written.
        slot_mapping: i64[num_tokens], checked.
        key_scales: f32[num_blocks, num_kv_heads, block_size] of a quantised cache; written.
        value_scales: likewise.
    """
    block_size = key_cache.shape[2]
    for heads, cache, scales in ((key, key_cache, key_scales), (value, value_cache, value_scales)):
        stored, new_scales = (heads, None) if scales is None else quantise(heads, cache.dtype)
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot != PAD_SLOT:
                block, offset = divmod(slot, block_size)
                cache[block, :, offset] = stored[token]
                if scales is not None and new_scales is not None:
                    scales[block, :, offset] = new_scales[token]


def reference_block_copy(cache: Tensor, sources: Int64Array, destinations: Int64Array) -> None:
    """Copy block by block; see `kvwatch_kernels.block_copy`.

    Args:
        cache: T[num_blocks, ...]; written.
        sources: i64[num_copies], checked.
        destinations: i64[num_copies], checked.
    """
    for source, destination in zip(sources.tolist(), destinations.tolist(), strict=True):
        cache[destination] = cache[source]


def reference_gather_blocks(cache: Tensor, block_ids: Int64Array, staging: Tensor) -> None:
    """Copy block by block; see `kvwatch_kernels.block_copy.gather_blocks`.

    Args:
        cache: T[num_blocks, ...].
        block_ids: i64[num_copies], checked.
        staging: T[num_copies, ...]; written.
    """
    for place, block in enumerate(block_ids.tolist()):
        staging[place] = cache[block]


def reference_scatter_blocks(staging: Tensor, cache: Tensor, block_ids: Int64Array) -> None:
    """Copy block by block; see `kvwatch_kernels.block_copy.scatter_blocks`.

    Args:
        staging: T[num_copies, ...].
        cache: T[num_blocks, ...]; written.
        block_ids: i64[num_copies], checked.
    """
    for place, block in enumerate(block_ids.tolist()):
        cache[block] = staging[place]


def reference_rms_norm(x: Tensor, weight: Tensor, eps: float, added: Tensor | None, out: Tensor) -> None:
    """Norm in float32, rounded once; see `kvwatch_kernels.rms_norm`.

    Args:
        x: T[num_rows, width]; `added` is added to it.
        weight: T[width].
        eps: added to the mean of squares.
        added: T[num_rows, width], or none.
        out: T[num_rows, width]; written.
    """
    if added is not None:
        x.add_(added)
    out.copy_(functional.rms_norm(x.float(), weight.shape, weight.float(), eps))


def reference_silu_and_multiply(gate_up: Tensor, out: Tensor) -> None:
    """Two operations, each rounded; see `kvwatch_kernels.activation`.

    Args:
        gate_up: T[num_rows, 2 * width].
        out: T[num_rows, width]; written.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    torch.mul(functional.silu(gate), up, out=out)


def reference_gelu_tanh_and_multiply(gate_up: Tensor, out: Tensor) -> None:
    """The same with GELU by its tanh formula."""
    gate, up = gate_up.chunk(2, dim=-1)
    torch.mul(functional.gelu(gate, approximate="tanh"), up, out=out)


def reference_rotate_and_store(
    qkv: Tensor,
    cosine: Tensor,
    sine: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Int64Array,
    *,
    norm_weight: Tensor | None,
    eps: float,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> None:
    """Norm, rotate, store, one after the other; see `kvwatch_kernels.rotary`.

    Args:
        qkv: T[num_tokens, num_heads + 2 * num_kv_heads, head_dim]; its queries are replaced.
        cosine: T[num_tokens, head_dim / 2].
        sine: T[num_tokens, head_dim / 2].
        key_cache: C[num_blocks, num_kv_heads, block_size, head_dim]; written.
        value_cache: C[num_blocks, num_kv_heads, block_size, head_dim]; written.
        slots: i64[num_tokens], checked.
        norm_weight: T[num_heads + num_kv_heads, head_dim], or none.
        eps: added to the mean of squares of the norm.
        key_scales: f32[num_blocks, num_kv_heads, block_size] of a quantised cache; written.
        value_scales: likewise.
    """
    num_rotated = qkv.shape[1] - key_cache.shape[1]
    heads = qkv[:, :num_rotated]
    if norm_weight is not None:
        heads = functional.rms_norm(heads, heads.shape[-1:], None, eps) * norm_weight
    first, second = heads.chunk(2, dim=-1)
    cosine, sine = cosine[:, None], sine[:, None]
    turned_first = (first * cosine).addcmul_(second, sine, value=-1)
    rotated = torch.cat((turned_first, (second * cosine).addcmul_(first, sine)), dim=-1)
    num_heads = num_rotated - key_cache.shape[1]
    qkv[:, :num_heads] = rotated[:, :num_heads]
    reference_kv_store(
        rotated[:, num_heads:],
        qkv[:, num_rotated:],
        key_cache,
        value_cache,
        slots,
        key_scales=key_scales,
        value_scales=value_scales,
    )
