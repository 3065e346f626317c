"""Compile what serving will need before the first request."""

import numpy as np
import torch

from kvwatch_kernels.block_copy import block_copy
from kvwatch_kernels.kv_store import kv_store
from kvwatch_kernels.paged_attention import paged_attention


def warm_up(dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
    """Compile the CPU kernels for a dtype, or load them from Numba's disk cache, and run each once.

    Takes seconds the first time on a machine and a fraction of one from then on. The compiled code serves every shape:
    the sizes only make the trial run that of the model.

    Args:
        dtype: of the cache.
        num_heads: query heads.
        num_kv_heads: heads of the cache.
        head_dim: elements of one head.
        block_size: tokens of one block.

    Raises:
        ShapeError: sizes that no model has.
    """
    cache = torch.zeros((3, 2, num_kv_heads, block_size, head_dim), dtype=dtype)
    key_cache, value_cache = cache[:, 0], cache[:, 1]
    query = torch.zeros((1, num_heads, head_dim), dtype=dtype)
    key = torch.zeros((1, num_kv_heads, head_dim), dtype=dtype)
    kv_store(key, key, key_cache, value_cache, np.array([block_size], dtype=np.int64))
    paged_attention(
        query,
        key_cache,
        value_cache,
        block_tables=np.array([[1]], dtype=np.int32),
        query_starts=np.array([0, 1], dtype=np.int32),
        context_lens=np.array([1], dtype=np.int32),
        scale=1.0,
    )
    block_copy(cache, np.array([1], dtype=np.int64), np.array([2], dtype=np.int64))
