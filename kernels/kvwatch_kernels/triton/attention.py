"""Attention on a GPU: checks what only the device path needs, chooses the launch, runs one or two kernels.

Knows tensors and the launch table, not how the kernels work.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Self

import numpy as np
import torch
from torch import Tensor

from kvwatch_kernels.dims import Int32Array
from kvwatch_kernels.errors import ShapeError
from kvwatch_kernels.quant import is_quantised
from kvwatch_kernels.triton.attention_kernel import attention_kernel
from kvwatch_kernels.triton.launch import (
    REDUCE_SPLITS,
    REDUCE_WARPS,
    SPLIT,
    AttentionLaunch,
    Queries,
    Stored,
    attention_launch,
    padded_head_dim,
)
from kvwatch_kernels.triton.reduce import reduce_kernel

LARGEST_HEAD_DIM: Final = 256


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """The sequences of one step, on the device, and what the host must know of them.

    The bounds decide how much is launched, never what is computed: a captured graph sets them to what its bucket holds.
    """

    block_tables: Tensor
    """i32[num_seqs, max_blocks], last dim contiguous"""
    query_starts: Tensor
    """i32[num_seqs + 1]. Tokens behind the last are left alone."""
    context_lens: Tensor
    """i32[num_seqs]"""
    max_query_len: int
    """No sequence has more queries."""
    max_context_len: int
    """No context is longer."""
    num_tokens: int | None = None
    """How many there are, where the host knows."""

    @classmethod
    def of_arrays(
        cls, block_tables: Int32Array, query_starts: Int32Array, context_lens: Int32Array, key_cache: Tensor
    ) -> Self:
        """Check a batch's arrays against each other and the cache, and copy them to its device.

        Args:
            block_tables: i32[num_seqs, max_blocks].
            query_starts: i32[num_seqs + 1].
            context_lens: i32[num_seqs].
            key_cache: C[num_blocks, num_kv_heads, block_size, head_dim].

        Raises:
            ShapeError: lengths contradict each other, or a block id lies outside of the cache.
        """
        num_blocks, _, block_size, _ = key_cache.shape
        query_lens = np.diff(query_starts)
        if query_starts[0] != 0 or (query_lens < 0).any():
            raise ShapeError(f"query_starts is {query_starts.tolist()}: must start at 0 and never fall")
        room = block_tables.shape[1] * block_size
        is_wrong = (query_lens > 0) & ((context_lens < query_lens) | (context_lens > room))
        if is_wrong.any():
            wrong = int(is_wrong.argmax())
            raise ShapeError(
                f"context_lens[{wrong}] is {context_lens[wrong]}: must be at least its {query_lens[wrong]} queries "
                f"and at most the {room} tokens that a row of block_tables holds"
            )
        is_read = np.arange(block_tables.shape[1]) * block_size < np.where(query_lens > 0, context_lens, 0)[:, None]
        read = block_tables[is_read]
        if len(read) and (read.min() < 0 or read.max() >= num_blocks):
            raise ShapeError(
                f"block_tables names blocks {read.min()} to {read.max()}: the cache has blocks 0 to {num_blocks - 1}"
            )
        tables, starts, lens = (
            torch.from_numpy(array).to(key_cache.device) for array in (block_tables, query_starts, context_lens)
        )
        longest = int(query_lens.max(initial=0)), int(context_lens.max(initial=0))
        return cls(tables, starts, lens, *longest, num_tokens=int(query_starts[-1]))

    def holding(self, num_tokens: int) -> Self:
        """Return the batch, which must have exactly this many tokens.

        Raises:
            ShapeError: it was made of arrays that have another number of them.
        """
        if self.num_tokens not in (None, num_tokens):
            raise ShapeError(f"query_starts ends at {self.num_tokens}: must end at {num_tokens}, the tokens in query")
        return self


def triton_paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: DeviceBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    out: Tensor,
    is_split: bool | None = None,
    has_bits: bool | None = None,
) -> None:
    """Attention of packed queries; see `kvwatch_kernels.paged_attention`. Enqueued on the current stream.

    Nothing is read back and no length is looked at on the host, so a CUDA graph can hold it.

    Args:
        query: T[num_tokens, num_heads, head_dim].
        key_cache: C[num_blocks, num_kv_heads, block_size, head_dim].
        value_cache: C[num_blocks, num_kv_heads, block_size, head_dim].
        batch: tables and lengths. Block ids are not checked: what they name is read.
        scale: factor of the scores.
        sliding_window: tokens that a query sees, itself included; None for all.
        soft_cap: bound of the scores; None for none.
        alibi_slopes: f32[num_heads], or none.
        key_scales: f32[num_blocks, num_kv_heads, block_size] of a quantised cache.
        value_scales: likewise.
        out: T[num_tokens, num_heads, head_dim]; written.
        is_split: whether long contexts are split; None: where the grid alone would leave the device idle.
        has_bits: whether e4m3 is widened by shifting bits; None: where the device has no conversion.

    Raises:
        ShapeError: heads larger than 256.
    """
    num_tokens, num_heads, head_dim = query.shape
    if head_dim > LARGEST_HEAD_DIM:
        raise ShapeError(f"query has heads of {head_dim} elements: must be at most {LARGEST_HEAD_DIM} on a GPU")
    num_seqs = len(batch.context_lens)
    if num_tokens == 0 or num_seqs == 0:
        return
    group = num_heads // key_cache.shape[1]
    launch = attention_launch(
        Queries.DECODE if batch.max_query_len <= 1 else Queries.PREFILL,
        stored_kind(key_cache.dtype, query.dtype),
        head_dim,
        group,
    )
    blocks = num_tokens // (launch.block_m // group) + num_seqs
    num_splits = _num_splits(batch, blocks * key_cache.shape[1], query.device, is_split=is_split)
    partials = _partials(query, num_splits) if num_splits > 1 else (None, None, None)
    if has_bits is None:
        has_bits = key_cache.dtype == torch.float8_e4m3fn and not _converts_e4m3(key_cache.device)
    if has_bits:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    attention_kernel[(blocks, key_cache.shape[1], num_splits)](
        out,
        *partials,
        query,
        key_cache,
        value_cache,
        key_scales,
        value_scales,
        batch.block_tables,
        batch.query_starts,
        batch.context_lens,
        alibi_slopes,
        scale,
        num_seqs,
        num_splits,
        *out.stride()[:2],
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        *(key_scales.stride()[:2] if key_scales is not None else (0, 0)),
        *(value_scales.stride()[:2] if value_scales is not None else (0, 0)),
        batch.block_tables.stride(0),
        **attention_constants(
            launch,
            group=group,
            num_kv_heads=key_cache.shape[1],
            block_size=key_cache.shape[2],
            same_strides=_have_same_strides(key_cache, value_cache) and _have_same_strides(key_scales, value_scales),
            head_dim=head_dim,
            is_split=num_splits > 1,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            has_alibi=alibi_slopes is not None,
            is_quantised=key_scales is not None,
            has_bits=has_bits,
            one_query=batch.max_query_len <= 1,
        ),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    if num_splits > 1:
        reduce_kernel[(num_tokens, num_heads)](
            out,
            *partials,
            batch.query_starts,
            batch.context_lens,
            num_seqs,
            num_splits,
            *out.stride()[:2],
            **reduce_constants(num_heads, head_dim, sliding_window),
            num_warps=REDUCE_WARPS,
        )


def stored_kind(stored: torch.dtype, query: torch.dtype) -> Stored:
    """Return what the launch depends on of a cache's and a query's dtype."""
    if is_quantised(stored):
        return Stored.QUANTISED_FLOAT32 if query == torch.float32 else Stored.QUANTISED
    return Stored.FLOAT32 if stored == torch.float32 else Stored.HALF


def attention_constants(
    launch: AttentionLaunch,
    *,
    group: int,
    num_kv_heads: int,
    block_size: int,
    same_strides: bool,
    head_dim: int,
    is_split: bool,
    sliding_window: int | None,
    soft_cap: float | None,
    has_alibi: bool,
    is_quantised: bool,
    has_bits: bool,
    one_query: bool,
) -> dict[str, Any]:
    """Return what the attention kernel is compiled for, at run time and ahead of time alike."""
    return {
        "GROUP": group,
        "NUM_KV_HEADS": num_kv_heads,
        "BLOCK_SIZE": block_size,
        "SAME_STRIDES": same_strides,
        "HEAD_DIM": head_dim,
        "LANES": padded_head_dim(head_dim),
        "CHUNK": launch.chunk or padded_head_dim(head_dim),
        "BLOCK_M": launch.block_m,
        "TILE": launch.tile,
        "SPLIT": SPLIT if is_split else 0,
        "WINDOW": sliding_window or 0,
        "SOFT_CAP": soft_cap or 0.0,
        "HAS_ALIBI": has_alibi,
        "IS_QUANTISED": is_quantised,
        "E4M3_BITS": has_bits,
        "ONE_QUERY": one_query,
    }


def reduce_constants(num_heads: int, head_dim: int, sliding_window: int | None) -> dict[str, Any]:
    """Return what the reduce kernel is compiled for."""
    return {
        "NUM_HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "LANES": padded_head_dim(head_dim),
        "SPLIT": SPLIT,
        "WINDOW": sliding_window or 0,
        "SPLITS_AT_ONCE": REDUCE_SPLITS,
    }


def _have_same_strides(one: Tensor | None, other: Tensor | None) -> bool:
    return one is None or other is None or one.stride() == other.stride()


def _num_splits(batch: DeviceBatch, num_programs: int, device: torch.device, *, is_split: bool | None) -> int:
    """Return in how many splits a context is taken at most; 1: as a whole."""
    needed = -(-batch.max_context_len // SPLIT)
    if is_split is None:
        is_split = num_programs < _num_processors(device)
    return max(needed, 1) if is_split else 1


@cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _partials(query: Tensor, num_splits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return room for sums f32[num_tokens, num_heads, num_splits, head_dim], maxima and norms of splits."""
    num_tokens, num_heads, head_dim = query.shape
    sums = torch.empty((num_tokens, num_heads, num_splits, head_dim), dtype=torch.float32, device=query.device)
    maxima, norms = torch.empty((2, num_tokens, num_heads, num_splits), dtype=torch.float32, device=query.device)
    return sums, maxima, norms


@cache
def _converts_e4m3(device: torch.device) -> bool:
    """CUDA has the conversion from sm_89 on; ROCm's compiler has it everywhere."""
    if device.type != "cuda" or torch.version.hip is not None:
        return True
    return torch.cuda.get_device_capability(device) >= (8, 9)
