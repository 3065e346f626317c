"""Attention that reads keys and values in place through block tables."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvwatch_kernels.cpu.attention import CompiledAttention, has_compiled_attention
from kvwatch_kernels.dims import (
    FACTOR_LIMIT,
    FLOAT_DTYPES,
    Int32Array,
    check_cache,
    check_device,
    check_heads,
    check_written,
    index_array,
)
from kvwatch_kernels.errors import ShapeError
from kvwatch_kernels.reference import reference_paged_attention

if TYPE_CHECKING:
    from kvwatch_kernels.triton.attention import DeviceBatch


class AttentionBatch:
    """The sequences of one step, checked and laid out once for the attention of all layers.

    One call at a time. The arrays are viewed, not copied: they may not change while the batch is in use.
    """

    __slots__ = ("_compiled", "_context_lens", "_layout", "_on_device", "_query_starts", "_tables")

    def __init__(
        self,
        key_cache: Tensor,
        value_cache: Tensor,
        *,
        block_tables: Int32Array | Tensor,
        query_starts: Int32Array | Tensor,
        context_lens: Int32Array | Tensor,
        key_scales: Tensor | None = None,
        value_scales: Tensor | None = None,
    ) -> None:
        """Check a batch; see `paged_attention` for the arguments.

        Args:
            key_cache: of one of the layers.
            value_cache: of the same layer.
            block_tables: i32[num_seqs, max_blocks].
            query_starts: i32[num_seqs + 1].
            context_lens: i32[num_seqs].
            key_scales: f32[num_blocks, num_kv_heads, block_size], of the layer, if its cache is quantised.
            value_scales: likewise.

        Raises:
            ShapeError: an argument breaks this contract.
        """
        check_cache(key_cache, value_cache, key_scales, value_scales)
        self._layout = _layout_of(key_cache, value_cache, key_scales, value_scales)
        self._tables = index_array("block_tables", block_tables, np.int32, (None, None))
        self._query_starts = index_array("query_starts", query_starts, np.int32, (len(self._tables) + 1,))
        self._context_lens = index_array("context_lens", context_lens, np.int32, (len(self._tables),))
        self._compiled: CompiledAttention | None = None
        self._on_device: DeviceBatch | None = None
        if key_cache.device.type == "cuda":
            from kvwatch_kernels.triton import attention as device_attention

            self._on_device = device_attention.DeviceBatch.of_arrays(
                self._tables, self._query_starts, self._context_lens, key_cache
            )
        if key_cache.device.type == "cpu" and any(
            has_compiled_attention(dtype, key_cache.dtype) for dtype in FLOAT_DTYPES
        ):
            self._compiled = CompiledAttention(
                key_cache,
                value_cache,
                key_scales,
                value_scales,
                block_tables=self._tables,
                query_starts=self._query_starts,
                context_lens=self._context_lens,
            )

    @property
    def compiled(self) -> CompiledAttention | None:
        """The compiled attention of this batch; none where there is none for such a cache."""
        return self._compiled

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        alibi_slopes: Tensor | None = None,
        key_scales: Tensor | None = None,
        value_scales: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attention of one layer; see `paged_attention` for the arguments and the result.

        Args:
            query: T[num_tokens, num_heads, head_dim].
            key_cache: of the shape, strides, dtype and device of the constructor's.
            value_cache: likewise.
            scale: factor of the scores.
            sliding_window: tokens that a query sees, itself included; None for all.
            soft_cap: bound of the scores; None for none.
            alibi_slopes: f32[num_heads], or none.
            key_scales: like the constructor's.
            value_scales: likewise.
            out: T[num_tokens, num_heads, head_dim]; allocated if not given.

        Returns:
            T[num_tokens, num_heads, head_dim]: `out`.

        Raises:
            ShapeError: an argument breaks this contract.
        """
        layout = _layout_of(key_cache, value_cache, key_scales, value_scales)
        if layout != self._layout:
            raise ShapeError(
                f"the caches' shapes, strides, dtypes and devices are {layout}: "
                f"must be those that the batch was made for, {self._layout}"
            )
        _check_query(query, key_cache, out)
        _check_scoring(scale, sliding_window, soft_cap)
        if alibi_slopes is not None:
            _check_slopes(alibi_slopes, query)
        if out is None:
            out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if self._on_device is not None:
            from kvwatch_kernels.triton.attention import triton_paged_attention

            triton_paged_attention(
                query,
                key_cache,
                value_cache,
                self._on_device.holding(len(query)),
                scale=scale,
                sliding_window=sliding_window,
                soft_cap=soft_cap,
                alibi_slopes=alibi_slopes,
                key_scales=key_scales,
                value_scales=value_scales,
                out=out,
            )
        elif self._compiled is not None and has_compiled_attention(query.dtype, key_cache.dtype):
            self._compiled.attend(
                query,
                key_cache,
                value_cache,
                scale=scale,
                sliding_window=sliding_window,
                soft_cap=soft_cap,
                alibi_slopes=alibi_slopes,
                key_scales=key_scales,
                value_scales=value_scales,
                out=out,
            )
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
                soft_cap=soft_cap,
                alibi_slopes=alibi_slopes,
                key_scales=key_scales,
                value_scales=value_scales,
                out=out,
            )
        return out


def _layout_of(*tensors: Tensor | None) -> tuple[object, ...]:
    """What all layers' caches and scales have in common."""
    return tuple(
        fact
        for tensor in tensors
        if tensor is not None
        for fact in (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    )


def _check_query(query: Tensor, key_cache: Tensor, out: Tensor | None) -> None:
    """Check queries, and the output where it is given, against the cache."""
    check_heads("query", query, key_cache)
    num_heads, num_kv_heads = query.shape[1], key_cache.shape[1]
    if num_heads == 0 or num_heads % num_kv_heads:
        raise ShapeError(f"query has {num_heads} heads: must be a multiple of the cache's {num_kv_heads}")
    if out is None:
        return
    check_heads("out", out, key_cache)
    check_written("out", out)
    if out.shape != query.shape or out.dtype != query.dtype:
        raise ShapeError(
            f"out has shape {list(out.shape)}, query {list(query.shape)}; out has dtype {out.dtype}, "
            f"query {query.dtype}: must agree"
        )


def _check_scoring(scale: float, sliding_window: int | None, soft_cap: float | None) -> None:
    """Check the numbers that shape the scores."""
    if not abs(scale) <= FACTOR_LIMIT:  # nor is NaN
        raise ShapeError(f"scale is {scale}: must be from {-FACTOR_LIMIT} to {FACTOR_LIMIT}")
    if sliding_window is not None and not 1 <= sliding_window < 2**31:
        raise ShapeError(f"sliding_window is {sliding_window}: must be at least 1 and below {2**31}, or None for all")
    if soft_cap is not None and not 1 / FACTOR_LIMIT <= soft_cap <= FACTOR_LIMIT:
        raise ShapeError(f"soft_cap is {soft_cap}: must be from {1 / FACTOR_LIMIT} to {FACTOR_LIMIT}, or None")


def _check_slopes(alibi_slopes: Tensor, query: Tensor) -> None:
    """Check the slopes f32[num_heads] against the queries."""
    if alibi_slopes.dtype != torch.float32 or alibi_slopes.shape != query.shape[1:2]:
        raise ShapeError(
            f"alibi_slopes is {alibi_slopes.dtype}{list(alibi_slopes.shape)}: must be "
            f"torch.float32[{query.shape[1]}], one for each query head"
        )
    check_device("alibi_slopes", alibi_slopes, query)
    if not alibi_slopes.is_contiguous():
        raise ShapeError(f"alibi_slopes has stride {alibi_slopes.stride(0)}: must be contiguous (Tensor.contiguous)")


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
    soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of packed queries over the paged KV cache; prefill chunks and decodes mix freely.

    Query i of a sequence with q queries sees the first `context_len - q + 1 + i` tokens of its context, or the last
    `sliding_window` of those. Nothing else in the cache has any effect, even if it is NaN. On a CPU the result has the
    same bits for any batch, chunking, block size and number of threads.

    A score is `query . key * scale`, then `soft_cap * tanh(score / soft_cap)` if there is a cap, then
    `+ slope * (key's position - query's position)` if there are slopes.

    Args:
        query: T[num_tokens, num_heads, head_dim], last dim contiguous; a slice of a fused projection will do.
        key_cache: C[num_blocks, num_kv_heads, block_size, head_dim], last dim contiguous. C is T, or quantised.
        value_cache: C[num_blocks, num_kv_heads, block_size, head_dim], last dim contiguous.
        block_tables: i32[num_seqs, max_blocks]. Block ids of each sequence, in order; what lies behind the context is
            not read.
        query_starts: i32[num_seqs + 1]. Where each sequence's queries begin in `query`; the last is num_tokens.
        context_lens: i32[num_seqs]. Tokens visible to the last query of each sequence, itself included.
        scale: factor of the scores.
        sliding_window: tokens that a query sees, itself included; None for all.
        soft_cap: bound of the scores; None for none.
        alibi_slopes: f32[num_heads], contiguous; None for no bias.
        key_scales: f32[num_blocks, num_kv_heads, block_size], last dim contiguous, if C is quantised.
        value_scales: likewise.
        out: T[num_tokens, num_heads, head_dim], last dim contiguous; allocated if not given. May not overlap the
            inputs.

    Returns:
        T[num_tokens, num_heads, head_dim]: `out`.

    Raises:
        ShapeError: an argument breaks this contract. The message has its value. `out` may have been written in part
            where a block id is to blame, else nothing was.
    """
    batch = AttentionBatch(
        key_cache,
        value_cache,
        block_tables=block_tables,
        query_starts=query_starts,
        context_lens=context_lens,
        key_scales=key_scales,
        value_scales=value_scales,
    )
    return batch.attend(
        query,
        key_cache,
        value_cache,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        alibi_slopes=alibi_slopes,
        key_scales=key_scales,
        value_scales=value_scales,
        out=out,
    )
