"""Attention that reads keys and values in place through block tables."""

import numpy as np
import torch
from torch import Tensor

from kvwatch_kernels.cpu.attention import CompiledAttention
from kvwatch_kernels.cpu.bf16 import COMPILED_DTYPES
from kvwatch_kernels.dims import Int32Array, check_cache, check_heads, index_array
from kvwatch_kernels.errors import ShapeError
from kvwatch_kernels.reference import reference_paged_attention


class AttentionBatch:
    """The sequences of one step, checked and laid out once for the attention of all layers.

    One call at a time. The arrays are viewed, not copied: they may not change while the batch is in use.
    """

    __slots__ = ("_compiled", "_context_lens", "_layout", "_query_starts", "_tables")

    def __init__(
        self,
        key_cache: Tensor,
        value_cache: Tensor,
        *,
        block_tables: Int32Array | Tensor,
        query_starts: Int32Array | Tensor,
        context_lens: Int32Array | Tensor,
    ) -> None:
        """Check a batch; see `paged_attention` for the arguments.

        Args:
            key_cache: of one of the layers.
            value_cache: of the same layer.
            block_tables: i32[num_seqs, max_blocks].
            query_starts: i32[num_seqs + 1].
            context_lens: i32[num_seqs].

        Raises:
            ShapeError: an argument breaks this contract.
        """
        check_cache(key_cache, value_cache)
        self._layout = _layout_of(key_cache, value_cache)
        self._tables = index_array("block_tables", block_tables, np.int32, (None, None))
        self._query_starts = index_array("query_starts", query_starts, np.int32, (len(self._tables) + 1,))
        self._context_lens = index_array("context_lens", context_lens, np.int32, (len(self._tables),))
        self._compiled: CompiledAttention | None = None
        if key_cache.device.type == "cpu" and key_cache.dtype in COMPILED_DTYPES:
            self._compiled = CompiledAttention(
                key_cache,
                value_cache,
                block_tables=self._tables,
                query_starts=self._query_starts,
                context_lens=self._context_lens,
            )

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        *,
        scale: float,
        sliding_window: int | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attention of one layer; see `paged_attention` for the arguments and the result.

        Args:
            query: T[num_tokens, num_heads, head_dim].
            key_cache: of the shape, strides, dtype and device of the constructor's.
            value_cache: likewise.
            scale: factor of the scores.
            sliding_window: tokens that a query sees, itself included; None for all.
            out: T[num_tokens, num_heads, head_dim]; allocated if not given.

        Returns:
            T[num_tokens, num_heads, head_dim]: `out`.

        Raises:
            ShapeError: an argument breaks this contract.
        """
        if _layout_of(key_cache, value_cache) != self._layout:
            raise ShapeError(
                f"the caches' shapes, strides, dtypes and devices are {_layout_of(key_cache, value_cache)}: "
                f"must be those that the batch was made for, {self._layout}"
            )
        check_heads("query", query, key_cache)
        num_heads, num_kv_heads = query.shape[1], key_cache.shape[1]
        if num_heads == 0 or num_heads % num_kv_heads:
            raise ShapeError(f"query has {num_heads} heads: must be a multiple of the cache's {num_kv_heads}")
        if sliding_window is not None and sliding_window < 1:
            raise ShapeError(f"sliding_window is {sliding_window}: must be at least 1, or None to see everything")
        if out is None:
            out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        else:
            check_heads("out", out, key_cache)
            if out.shape != query.shape:
                raise ShapeError(f"out has shape {list(out.shape)}, query {list(query.shape)}: must agree")
        if self._compiled is not None:
            self._compiled.attend(query, key_cache, value_cache, scale=scale, sliding_window=sliding_window, out=out)
        else:
            reference_paged_attention(
                query,
                key_cache,
                value_cache,
                block_tables=self._tables,
                query_starts=self._query_starts,
                context_lens=self._context_lens,
                scale=scale,
                sliding_window=sliding_window,
                out=out,
            )
        return out


def _layout_of(key_cache: Tensor, value_cache: Tensor) -> tuple[object, ...]:
    """What all layers' caches have in common."""
    return (
        *(key_cache.shape, key_cache.stride(), key_cache.dtype, key_cache.device),
        *(value_cache.shape, value_cache.stride(), value_cache.dtype, value_cache.device),
    )


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    block_tables: Int32Array | Tensor,
    query_starts: Int32Array | Tensor,
    context_lens: Int32Array | Tensor,
    scale: float,
    sliding_window: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of packed queries over the paged KV cache; prefill chunks and decodes mix freely.

    Query i of a sequence with q queries sees the first `context_len - q + 1 + i` tokens of its context, or the last
    `sliding_window` of those. Nothing else in the cache has any effect, even if it is NaN. On a CPU the result has the
    same bits for any batch, chunking, block size and number of threads.

    Args:
        query: T[num_tokens, num_heads, head_dim], last dim contiguous; a slice of a fused projection will do.
        key_cache: T[num_blocks, num_kv_heads, block_size, head_dim], last dim contiguous.
        value_cache: T[num_blocks, num_kv_heads, block_size, head_dim], last dim contiguous.
        block_tables: i32[num_seqs, max_blocks]. Block ids of each sequence, in order; what lies behind the context is
            not read.
        query_starts: i32[num_seqs + 1]. Where each sequence's queries begin in `query`; the last is num_tokens.
        context_lens: i32[num_seqs]. Tokens visible to the last query of each sequence, itself included.
        scale: factor of the scores.
        sliding_window: tokens that a query sees, itself included; None for all.
        out: T[num_tokens, num_heads, head_dim], last dim contiguous; allocated if not given. May not overlap the
            inputs.

    Returns:
        T[num_tokens, num_heads, head_dim]: `out`.

    Raises:
        ShapeError: an argument breaks this contract. The message has its value. `out` may have been written in part
            where a block id is to blame, else nothing was.
    """
    batch = AttentionBatch(
        key_cache, value_cache, block_tables=block_tables, query_starts=query_starts, context_lens=context_lens
    )
    return batch.attend(query, key_cache, value_cache, scale=scale, sliding_window=sliding_window, out=out)
