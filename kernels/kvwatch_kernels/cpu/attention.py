"""Host side of the compiled paged attention: lay out the arguments, launch, report faults."""

import ctypes
import math
from array import array
from collections.abc import Callable
from functools import cache, lru_cache
from typing import NamedTuple, NoReturn

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
    KEY_CACHE,
    OUT,
    OUT_HEAD_STRIDE,
    OUT_TOKEN_STRIDE,
    PARTIALS,
    QUERY,
    QUERY_HEAD_STRIDE,
    QUERY_TOKEN_STRIDE,
    SCALE,
    SCRATCH,
    VALUE_CACHE,
)
from kvwatch_kernels.cpu.memory import bf16_at, f32_at, i64_at
from kvwatch_kernels.cpu.rows import float_bits
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
    return float_bits(scale * math.log2(math.e))


class _Call(NamedTuple):
    """Arguments of calls that differ in their tensors only, and what these arguments point to."""

    params: "array[int]"
    counters: npt.NDArray[np.int64]
    workspace: Tensor
    num_threads: int


class CompiledAttention:
    """Compiled attention over one batch. What does not change from layer to layer is laid out once.

    One call at a time: calls share their counters and scratch.
    """

    def __init__(
        self,
        key_cache: Tensor,
        value_cache: Tensor,
        *,
        block_tables: Int32Array,
        query_starts: Int32Array,
        context_lens: Int32Array,
    ) -> None:
        """Take over checked arguments; see `kvwatch_kernels.paged_attention.AttentionBatch`.

        Args:
            key_cache: T[num_blocks, num_kv_heads, block_size, head_dim], CPU, last dim contiguous: of any layer.
            value_cache: same shape and dtype as `key_cache`; strides may differ.
            block_tables: i32[num_seqs, max_blocks], contiguous.
            query_starts: i32[num_seqs + 1], contiguous.
            context_lens: i32[num_seqs], contiguous.
        """
        self._code = attention_code(key_cache.dtype)
        self._cache_shape = tuple(key_cache.shape)
        size = key_cache.element_size()
        self._key_strides = tuple(size * stride for stride in key_cache.stride()[:3])
        self._value_strides = tuple(size * stride for stride in value_cache.stride()[:3])
        self._element_bytes = size
        self._block_tables = block_tables
        self._query_starts = query_starts
        self._context_lens = context_lens
        self._calls: dict[tuple[int, int, int | None, int], _Call] = {}

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        *,
        scale: float,
        sliding_window: int | None,
        out: Tensor,
    ) -> None:
        """Run the compiled attention on checked arguments.

        Args:
            query: T[num_tokens, num_heads, head_dim], CPU, last dim contiguous.
            key_cache: of the shape and strides of the constructor's.
            value_cache: likewise.
            scale: factor of the scores.
            sliding_window: tokens that a query sees, itself included; None for all.
            out: T[num_tokens, num_heads, head_dim], last dim contiguous; written.

        Raises:
            ShapeError: the lengths contradict each other (nothing was written) or a block id lies outside of the cache
                (`out` is then undefined).
        """
        num_tokens, num_heads, _ = query.shape
        key = (num_tokens, num_heads, sliding_window, torch.get_num_threads())
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = self._prepare(*key)
        params = call.params
        params[QUERY], params[QUERY_TOKEN_STRIDE], params[QUERY_HEAD_STRIDE] = query.data_ptr(), *query.stride()[:2]
        params[OUT], params[OUT_TOKEN_STRIDE], params[OUT_HEAD_STRIDE] = out.data_ptr(), *out.stride()[:2]
        params[KEY_CACHE], params[VALUE_CACHE] = key_cache.data_ptr(), value_cache.data_ptr()
        params[SCALE] = _scale_bits(scale)
        call.counters.fill(0)
        launcher()(self._code.run, params.buffer_info()[0], call.num_threads)
        if params[FAULT]:
            self._raise_fault(params, num_tokens)

    def _prepare(self, num_tokens: int, num_heads: int, sliding_window: int | None, num_threads: int) -> _Call:
        """Lay out everything but the addresses of a layer's tensors, and check the lengths."""
        num_blocks, num_kv_heads, block_size, head_dim = self._cache_shape
        num_seqs, max_blocks = self._block_tables.shape
        group_size = num_heads // num_kv_heads
        tile_rows = max(TILE_ROWS, -(-group_size // 16) * 16)
        padded = padded_head_dim(head_dim)
        thread_bytes = scratch_bytes(tile_rows, padded)
        counters = np.zeros(FIRST_SPLIT_COUNTER + num_seqs * num_kv_heads, dtype=np.int64)
        params = array(
            "q",
            (
                *(0, 0, 0),
                *(0, 0, 0),
                *(0, *self._key_strides),
                *(0, *self._value_strides),
                *(self._block_tables.ctypes.data, max_blocks),
                *(self._query_starts.ctypes.data, self._context_lens.ctypes.data),
                *(num_seqs, num_tokens, num_blocks, num_kv_heads, group_size, head_dim),
                *(self._element_bytes, block_size),
                _NO_WINDOW if sliding_window is None else sliding_window,
                0,
                counters.ctypes.data,
                *(0, 0),
                *(thread_bytes, tile_rows),
                *(0, 0),
            ),
        )
        num_partials = self._code.check(params.buffer_info()[0])
        if params[FAULT]:
            self._raise_fault(params, num_tokens)
        partial_bytes = num_partials * (PARTIAL_HEADER + padded) * _FLOAT_BYTES
        workspace = torch.empty(num_threads * thread_bytes + partial_bytes, dtype=torch.uint8)
        params[SCRATCH] = workspace.data_ptr()
        params[PARTIALS] = workspace.data_ptr() + num_threads * thread_bytes
        return _Call(params, counters, workspace, num_threads)

    def _raise_fault(self, params: "array[int]", num_tokens: int) -> NoReturn:
        fault, value = params[FAULT], params[FAULT_VALUE]
        params[FAULT] = 0
        starts, lens = self._query_starts, self._context_lens
        if fault == FAULT_QUERY_STARTS:
            raise ShapeError(
                f"query_starts[{value}] is {starts[value]}: "
                f"must start at 0, never fall, and end at {num_tokens}, the tokens in query"
            )
        if fault == FAULT_CONTEXT_LEN:
            max_tokens = self._block_tables.shape[1] * self._cache_shape[2]
            raise ShapeError(
                f"context_lens[{value}] is {lens[value]}: must be at least its {starts[value + 1] - starts[value]} "
                f"queries and at most the {max_tokens} tokens that a row of block_tables holds"
            )
        assert fault == FAULT_BLOCK_ID
        raise ShapeError(f"block_tables names block {value}: the cache has blocks 0 to {self._cache_shape[0] - 1}")
