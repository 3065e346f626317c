"""The kernels in plain torch: slow, obvious, and the oracle of the fast ones. Runs on any device.

It gathers whole contexts, which the fast kernels never do.
"""

import torch
from torch import Tensor
from torch.nn import functional

from kvwatch_kernels.dims import PAD_SLOT, Int32Array, Int64Array
from kvwatch_kernels.errors import ShapeError


def reference_paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    block_tables: Int32Array,
    query_starts: Int32Array,
    context_lens: Int32Array,
    scale: float,
    sliding_window: int | None,
    out: Tensor,
) -> None:
    """Attention one sequence at a time, in float32; see `kvwatch_kernels.paged_attention`.

    Args:
        query: T[num_tokens, num_heads, head_dim].
        key_cache: T[num_blocks, num_kv_heads, block_size, head_dim].
        value_cache: T[num_blocks, num_kv_heads, block_size, head_dim].
        block_tables: i32[num_seqs, max_blocks].
        query_starts: i32[num_seqs + 1].
        context_lens: i32[num_seqs].
        scale: factor of the scores.
        sliding_window: tokens that a query sees, itself included; None for all.
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
        keys, values = (
            cache[blocks].transpose(0, 1).flatten(1, 2)[:, :context_len] for cache in (key_cache, value_cache)
        )
        out[first:end] = _attend(query[first:end], keys, values, scale, sliding_window)


def _attend(query: Tensor, keys: Tensor, values: Tensor, scale: float, sliding_window: int | None) -> Tensor:
    """Attention of the last queries of one sequence over its gathered context.

    Args:
        query: T[num_queries, num_heads, head_dim].
        keys: T[num_kv_heads, context_len, head_dim].
        values: T[num_kv_heads, context_len, head_dim].
        scale: factor of the scores.
        sliding_window: see `reference_paged_attention`.

    Returns:
        f32[num_queries, num_heads, head_dim]
    """
    num_queries, num_heads, _ = query.shape
    num_kv_heads, context_len, _ = keys.shape
    key_positions = torch.arange(context_len, device=query.device)
    positions = key_positions[context_len - num_queries :, None]
    is_visible = key_positions <= positions
    if sliding_window is not None:
        is_visible &= key_positions > positions - sliding_window
    group = num_heads // num_kv_heads
    keys, values = (heads.float().repeat_interleave(group, dim=0) for heads in (keys, values))
    scores = query.float().transpose(0, 1) @ keys.transpose(1, 2) * scale
    weights = scores.masked_fill(~is_visible, float("-inf")).softmax(dim=-1)
    # A value that a query may not see can be NaN, and zero times NaN is NaN: each query multiplies only what it sees.
    rows = [weights[:, row, seen].unsqueeze(1) @ values[:, seen] for row, seen in enumerate(is_visible)]
    return torch.cat(rows, dim=1).transpose(0, 1)


def reference_kv_store(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Int64Array
) -> None:
    """Write token by token; see `kvwatch_kernels.kv_store`.

    Args:
        key: T[num_tokens, num_kv_heads, head_dim].
        value: T[num_tokens, num_kv_heads, head_dim].
        key_cache: T[num_blocks, num_kv_heads, block_size, head_dim]; written.
        value_cache: T[num_blocks, num_kv_heads, block_size, head_dim]; written.
        slot_mapping: i64[num_tokens], checked.
    """
    block_size = key_cache.shape[2]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot != PAD_SLOT:
            block, offset = divmod(slot, block_size)
            key_cache[block, :, offset] = key[token]
            value_cache[block, :, offset] = value[token]


def reference_block_copy(cache: Tensor, sources: Int64Array, destinations: Int64Array) -> None:
    """Copy block by block; see `kvwatch_kernels.block_copy`.

    Args:
        cache: T[num_blocks, ...]; written.
        sources: i64[num_copies], checked.
        destinations: i64[num_copies], checked.
    """
    for source, destination in zip(sources.tolist(), destinations.tolist(), strict=True):
        cache[destination] = cache[source]


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
) -> None:
    """Norm, rotate, store, one after the other; see `kvwatch_kernels.rotary`.

    Args:
        qkv: T[num_tokens, num_heads + 2 * num_kv_heads, head_dim]; its queries are replaced.
        cosine: T[num_tokens, head_dim / 2].
        sine: T[num_tokens, head_dim / 2].
        key_cache: T[num_blocks, num_kv_heads, block_size, head_dim]; written.
        value_cache: T[num_blocks, num_kv_heads, block_size, head_dim]; written.
        slots: i64[num_tokens], checked.
        norm_weight: T[num_heads + num_kv_heads, head_dim], or none.
        eps: added to the mean of squares of the norm.
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
    reference_kv_store(rotated[:, num_heads:], qkv[:, num_rotated:], key_cache, value_cache, slots)
