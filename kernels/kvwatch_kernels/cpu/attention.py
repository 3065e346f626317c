"""Host side of the compiled paged attention: lay out the arguments, launch, report faults."""

import ctypes
import math
import struct
from array import array
from collections.abc import Callable
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numba import types
from torch import Tensor

from kvwatch_kernels.cpu.attention_body import PARTIAL_HEADER, check_and_count_partials, run_items
from kvwatch_kernels.cpu.compiled import entry_point, source_digest
from kvwatch_kernels.cpu.fields import (
    FAULT,
    FAULT_BLOCK_ID,
    FAULT_CONTEXT_LEN,
    FAULT_QUERY_STARTS,
    FAULT_VALUE,
    FIRST_SPLIT_COUNTER,
    PARTIALS,
    SCRATCH,
)
from kvwatch_kernels.cpu.memory import bf16_at, f32_at, i64_at
from kvwatch_kernels.cpu.scratch import padded_head_dim, scratch_bytes
from kvwatch_kernels.cpu.threads import launcher
from kvwatch_kernels.errors import ShapeError

Int32Array = npt.NDArray[np.int32]

TILE_ROWS = 128
"""Rows of one query tile: enough that packing keys is cheap beside using them, few enough for the L2 cache."""

_NO_WINDOW = 2**62
_FLOAT_BYTES = 4


class AttentionCode(NamedTuple):
    """Compiled attention for one dtype."""

    check: Callable[[int], int]
    """Checks lengths and returns the number of partial rows; see `check_and_count_partials`."""
    run: int
    """Address of the C function that each thread runs."""


@cache
def attention_code(dtype: torch.dtype) -> AttentionCode:
    """Compile the attention for a dtype, or load it from the disk cache (once in a process).

    Args:
        dtype: of queries, cache and outputs: float32 or bfloat16.
    """
    digest = source_digest()

    def check(address: int) -> int:
        digest  # noqa: B018  # part of the cache's key
        partials: int = check_and_count_partials(i64_at(address))
        return partials

    def run_f32(address: int) -> None:
        digest  # noqa: B018
        run_items(i64_at(address), f32_at(address))

    def run_bf16(address: int) -> None:
        digest  # noqa: B018
        run_items(i64_at(address), bf16_at(address))

    prototype = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
    run = run_f32 if dtype == torch.float32 else run_bf16
    return AttentionCode(
        prototype(entry_point(types.int64(types.int64), check)),
        entry_point(types.void(types.int64), run),
    )


@lru_cache(maxsize=64)
def _scale_bits(scale: float) -> int:
    bits: int = struct.unpack("<i", struct.pack("<f", scale * math.log2(math.e)))[0]
    return bits


def compiled_paged_attention(
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
    """Run the compiled attention on checked arguments; see `kvwatch_kernels.paged_attention`.

    Args:
        query: T[num_tokens, num_heads, head_dim], CPU, last dim contiguous.
        key_cache: T[num_blocks, num_kv_heads, block_size, head_dim], CPU, last dim contiguous.
        value_cache: same shape and dtype as `key_cache`; strides may differ.
        block_tables: i32[num_seqs, max_blocks], contiguous.
        query_starts: i32[num_seqs + 1], contiguous.
        context_lens: i32[num_seqs], contiguous.
        scale: factor of the scores.
        sliding_window: tokens that a query sees, itself included; None for all.
        out: T[num_tokens, num_heads, head_dim], last dim contiguous; written.

    Raises:
        ShapeError: the lengths contradict each other (nothing was written) or a block id lies outside of the cache
            (`out` is then undefined).
    """
    code = attention_code(query.dtype)
    num_blocks, num_kv_heads, block_size, head_dim = key_cache.shape
    num_tokens, num_heads, _ = query.shape
    num_seqs, max_blocks = block_tables.shape
    size = query.element_size()
    group_size = num_heads // num_kv_heads
    tile_rows = max(TILE_ROWS, -(-group_size // 16) * 16)
    padded = padded_head_dim(head_dim)
    thread_bytes = scratch_bytes(tile_rows, padded)
    counters = np.zeros(FIRST_SPLIT_COUNTER + num_seqs * num_kv_heads, dtype=np.int64)
    params = array(
        "q",
        (
            *(query.data_ptr(), query.stride(0), query.stride(1)),
            *(out.data_ptr(), out.stride(0), out.stride(1)),
            *(key_cache.data_ptr(), *(size * stride for stride in key_cache.stride()[:3])),
            *(value_cache.data_ptr(), *(size * stride for stride in value_cache.stride()[:3])),
            *(block_tables.ctypes.data, max_blocks),
            *(query_starts.ctypes.data, context_lens.ctypes.data),
            *(num_seqs, num_tokens, num_blocks, num_kv_heads, group_size, head_dim, size, block_size),
            _NO_WINDOW if sliding_window is None else sliding_window,
            _scale_bits(scale),
            counters.ctypes.data,
            *(0, 0),
            *(thread_bytes, tile_rows),
            *(0, 0),
        ),
    )
    address = params.buffer_info()[0]
    num_partials = code.check(address)
    _raise_fault(params, query_starts, context_lens, num_tokens, max_blocks * block_size)
    num_threads = torch.get_num_threads()
    partial_bytes = num_partials * (PARTIAL_HEADER + padded) * _FLOAT_BYTES
    workspace = torch.empty(num_threads * thread_bytes + partial_bytes, dtype=torch.uint8)
    params[SCRATCH] = workspace.data_ptr()
    params[PARTIALS] = workspace.data_ptr() + num_threads * thread_bytes
    launcher()(code.run, address, num_threads)
    _raise_fault(params, query_starts, context_lens, num_blocks, max_blocks * block_size)


def _raise_fault(
    params: "array[int]", query_starts: Int32Array, context_lens: Int32Array, limit: int, max_tokens: int
) -> None:
    fault, value = params[FAULT], params[FAULT_VALUE]
    if fault == FAULT_QUERY_STARTS:
        raise ShapeError(
            f"query_starts[{value}] is {query_starts[value]}: "
            f"must start at 0, never fall, and end at {limit}, the tokens in query"
        )
    if fault == FAULT_CONTEXT_LEN:
        num_queries = query_starts[value + 1] - query_starts[value]
        raise ShapeError(
            f"context_lens[{value}] is {context_lens[value]}: must be at least its {num_queries} queries "
            f"and at most the {max_tokens} tokens that a row of block_tables holds"
        )
    if fault == FAULT_BLOCK_ID:
        raise ShapeError(f"block_tables names block {value}: the cache has blocks 0 to {limit - 1}")
