"""Cache writes on a GPU: `kv_store`, and `rotate_and_store` with the rotary embedding and the norm fused in.

Knows tensors, not how the kernels work. Arguments were checked one folder up. Slots are on the device: a step copies
them once for all of its layers. Everything is enqueued on the current stream and nothing is read back.
"""

from typing import Any

import torch
from torch import Tensor

from kvwatch_kernels.dims import Int64Array
from kvwatch_kernels.quant import QUANTISED_LIMITS
from kvwatch_kernels.triton.launch import STORE_WARPS, padded_head_dim
from kvwatch_kernels.triton.rounding import CODES
from kvwatch_kernels.triton.store_kernel import rotate_and_store_kernel, store_kernel


def triton_kv_store(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    *,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> None:
    """Write each token's key and value to its slot; see `kvwatch_kernels.kv_store`.

    Args:
        key: T[num_tokens, num_kv_heads, head_dim].
        value: T[num_tokens, num_kv_heads, head_dim].
        key_cache: C[num_blocks, num_kv_heads, block_size, head_dim]; written.
        value_cache: C[num_blocks, num_kv_heads, block_size, head_dim]; written.
        slots: i64[num_tokens], on the device. Negative: not written.
        key_scales: f32[num_blocks, num_kv_heads, block_size] of a quantised cache; written.
        value_scales: likewise.
    """
    if len(slots) == 0:
        return
    store_kernel[(len(slots), key_cache.shape[1])](
        key,
        value,
        _writable(key_cache),
        _writable(value_cache),
        key_scales,
        value_scales,
        slots,
        *key.stride()[:2],
        *value.stride()[:2],
        *_cache_strides(key_cache, value_cache, key_scales, value_scales),
        **store_constants(key_cache.dtype, block_size=key_cache.shape[2], head_dim=key_cache.shape[3]),
        num_warps=STORE_WARPS,
    )


def triton_rotate_and_store(
    qkv: Tensor,
    cosine: Tensor,
    sine: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    *,
    norm_weight: Tensor | None,
    eps: float,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> None:
    """Norm, rotate and store in one pass; see `kvwatch_kernels.rotary`.

    Args:
        qkv: T[num_tokens, num_heads + 2 * num_kv_heads, head_dim]; its queries are replaced.
        cosine: T[num_tokens, head_dim / 2], contiguous.
        sine: T[num_tokens, head_dim / 2], contiguous.
        key_cache: C[num_blocks, num_kv_heads, block_size, head_dim]; written.
        value_cache: C[num_blocks, num_kv_heads, block_size, head_dim]; written.
        slots: i64[num_tokens], on the device. Negative: not written.
        norm_weight: T[num_heads + num_kv_heads, head_dim], contiguous, or none.
        eps: added to the mean of squares of the norm.
        key_scales: f32[num_blocks, num_kv_heads, block_size] of a quantised cache; written.
        value_scales: likewise.
    """
    num_tokens, num_rows, head_dim = qkv.shape
    if num_tokens == 0:
        return
    num_kv_heads = key_cache.shape[1]
    rotate_and_store_kernel[(num_tokens, num_rows)](
        qkv,
        cosine,
        sine,
        norm_weight,
        _writable(key_cache),
        _writable(value_cache),
        key_scales,
        value_scales,
        slots,
        eps,
        *qkv.stride()[:2],
        *_cache_strides(key_cache, value_cache, key_scales, value_scales),
        NUM_HEADS=num_rows - 2 * num_kv_heads,
        NUM_KV_HEADS=num_kv_heads,
        **store_constants(key_cache.dtype, block_size=key_cache.shape[2], head_dim=head_dim),
        num_warps=STORE_WARPS,
    )


def slots_on(device: torch.device, slots: Int64Array) -> Tensor:
    """Return checked slots on the device. A step that has many layers does this once."""
    return torch.from_numpy(slots).to(device)


def store_constants(dtype: torch.dtype, *, block_size: int, head_dim: int) -> dict[str, Any]:
    """Return what the kernels are compiled for, at run time and ahead of time alike."""
    return {
        "BLOCK_SIZE": block_size,
        "HEAD_DIM": head_dim,
        "LANES": padded_head_dim(head_dim),
        "LIMIT": QUANTISED_LIMITS.get(dtype, 0.0),
        "CODE": CODES.get(dtype, ""),
    }


def _writable(cache: Tensor) -> Tensor:
    """Return a quantised cache as the bytes that the kernels write."""
    return cache.view(torch.uint8) if cache.dtype in CODES else cache


def _cache_strides(
    key_cache: Tensor, value_cache: Tensor, key_scales: Tensor | None, value_scales: Tensor | None
) -> tuple[int, ...]:
    """Return strides of blocks, heads and slots, then of scales' blocks and heads, in the kernels' order."""
    return (
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        *(key_scales.stride()[:2] if key_scales is not None else (0, 0)),
        *(value_scales.stride()[:2] if value_scales is not None else (0, 0)),
    )
