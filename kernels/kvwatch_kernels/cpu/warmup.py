"""Compile what serving will need before the first request."""

import numpy as np
import torch

from kvwatch_kernels.activation import silu_and_multiply
from kvwatch_kernels.block_copy import block_copy
from kvwatch_kernels.kv_store import kv_store
from kvwatch_kernels.paged_attention import paged_attention
from kvwatch_kernels.quant import is_quantised
from kvwatch_kernels.rms_norm import rms_norm
from kvwatch_kernels.rotary import rotate_and_store


def warm_up(
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    *,
    cache_dtype: torch.dtype | None = None,
) -> None:
    """Compile the CPU kernels for a dtype, or load them from Numba's disk cache, and run each once.

    Takes seconds the first time on a machine and a fraction of one from then on. The compiled code serves every shape:
    the sizes only make the trial run that of the model.

    Args:
        dtype: of the model.
        num_heads: query heads.
        num_kv_heads: heads of the cache.
        head_dim: elements of one head.
        block_size: tokens of one block.
        cache_dtype: of the cache, if it is quantised.

    Raises:
        ShapeError: sizes that no model has.
    """
    cache = torch.zeros((3, 2, num_kv_heads, block_size, head_dim), dtype=cache_dtype or dtype)
    key_cache, value_cache = cache[:, 0], cache[:, 1]
    key_scales = value_scales = torch.zeros(key_cache.shape[:-1]) if is_quantised(cache.dtype) else None
    query = torch.zeros((1, num_heads, head_dim), dtype=dtype)
    key = torch.zeros((1, num_kv_heads, head_dim), dtype=dtype)
    slots = np.array([block_size], dtype=np.int64)
    kv_store(key, key, key_cache, value_cache, slots, key_scales=key_scales, value_scales=value_scales)
    qkv = torch.zeros((1, num_heads + 2 * num_kv_heads, head_dim), dtype=dtype)
    norm_weight = torch.ones((num_heads + num_kv_heads, head_dim), dtype=dtype)
    angles = torch.zeros((1, head_dim // 2), dtype=dtype)
    rotate_and_store(
        qkv,
        angles,
        angles,
        key_cache,
        value_cache,
        slots,
        norm_weight=norm_weight,
        key_scales=key_scales,
        value_scales=value_scales,
    )
    rows = torch.zeros((1, 2 * head_dim), dtype=dtype)
    rms_norm(rows, torch.ones(2 * head_dim, dtype=dtype), 1.0, added=silu_and_multiply(torch.cat((rows, rows), dim=1)))
    paged_attention(
        query,
        key_cache,
        value_cache,
        block_tables=np.array([[1]], dtype=np.int32),
        query_starts=np.array([0, 1], dtype=np.int32),
        context_lens=np.array([1], dtype=np.int32),
        scale=1.0,
        key_scales=key_scales,
        value_scales=value_scales,
    )
    block_copy(cache, np.array([1], dtype=np.int64), np.array([2], dtype=np.int64))
