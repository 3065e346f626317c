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
from kvwatch_kernels.cpu.bf16 import COMPILED_DTYPES
from kvwatch_kernels.cpu.compiled import entry_point, source_digest
from kvwatch_kernels.cpu.fields import (
    ALIBI_SLOPES,
    FAULT,
    FAULT_BLOCK_ID,
    FAULT_CONTEXT_LEN,
    FAULT_QUERY_STARTS,
    FAULT_VALUE,
    FIRST_SPLIT_COUNTER,
    KEY_CACHE,
    KEY_SCALES,
    OUT,
    OUT_HEAD_STRIDE,
    OUT_TOKEN_STRIDE,
    PARTIALS,
    QUERY,
    QUERY_HEAD_STRIDE,
    QUERY_TOKEN_STRIDE,
    SCALE,
    SCRATCH,
    SOFT_CAP,
    VALUE_CACHE,
    VALUE_SCALES,
)
from kvwatch_kernels.cpu.memory import bf16_at, e4m3_at, e5m2_at, f32_at, i64_at, int8_at
from kvwatch_kernels.cpu.quantised import can_compile
from kvwatch_kernels.cpu.rows import float_bits
from kvwatch_kernels.cpu.scratch import padded_head_dim, scratch_bytes
from kvwatch_kernels.cpu.threads import launcher
from kvwatch_kernels.errors import ShapeError
from kvwatch_kernels.quant import is_quantised

Int32Array = npt.NDArray[np.int32]

TILE_ROWS = 128
"""Rows of one query tile: enough that packing keys is cheap beside using them, few enough for the L2 cache."""

_NO_WINDOW = 2**62
_FLOAT_BYTES = 4


class AttentionCode(NamedTuple):
    """Compiled attention over caches of one dtype."""

    check: Callable[[int], int]
    """Checks lengths and returns the number of partial rows; see `check_and_count_partials`."""
    run: int
    """Address of the C function that each thread runs."""


def has_compiled_attention(query_dtype: torch.dtype, cache_dtype: torch.dtype) -> bool:
    """Whether this processor has compiled attention for these dtypes."""
    if query_dtype not in COMPILED_DTYPES:
        return False
    return cache_dtype == query_dtype or (is_quantised(cache_dtype) and can_compile(cache_dtype))


@cache
def attention_code(dtype: torch.dtype) -> AttentionCode:
    """Compile the attention for a cache's dtype, or load it from the disk cache (once in a process).

    Args:
        dtype: float32, bfloat16 or quantised.
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

    def run_int8(address: int) -> None:
        digest  # noqa: B018
        run_items(i64_at(address), int8_at(address))

    def run_e4m3(address: int) -> None:
        digest  # noqa: B018
        run_items(i64_at(address), e4m3_at(address))

    def run_e5m2(address: int) -> None:
        digest  # noqa: B018
        run_items(i64_at(address), e5m2_at(address))

    run = {
        torch.float32: run_f32,
        torch.bfloat16: run_bf16,
        torch.int8: run_int8,
        torch.float8_e4m3fn: run_e4m3,
        torch.float8_e5m2: run_e5m2,
    }[dtype]
    prototype = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
    return AttentionCode(
        prototype(entry_point(types.int64(types.int64), check)),
        entry_point(types.void(types.int64), run),
    )


@lru_cache(maxsize=64)
def _base_2_bits(factor: float) -> int:
    """The bits of a factor of scores or of a bound on them, for scores in base 2."""
    return float_bits(factor * math.log2(math.e))


class PreparedAttention(NamedTuple):
    """Arguments of calls that differ in their tensors only, and what these arguments point to."""

    params: "array[int]"
    """See `fields.py`; those of a layer's tensors are 0."""
    counters: npt.NDArray[np.int64]
    workspace: Tensor
    num_threads: int


LAYER_FIELDS = (
    *(QUERY, QUERY_TOKEN_STRIDE, QUERY_HEAD_STRIDE, OUT, OUT_TOKEN_STRIDE, OUT_HEAD_STRIDE),
    *(KEY_CACHE, VALUE_CACHE, SCALE, SOFT_CAP, ALIBI_SLOPES, KEY_SCALES, VALUE_SCALES),
)
"""Arguments that differ from layer to layer; the others, but for `COUNTERS`, are those of a step."""


def _scale_strides(scales: Tensor | None) -> tuple[int, int, int]:
    """Place of the address, and bytes from one block and head to the next, of one side's scales."""
    if scales is None:
        return 0, 0, 0
    block_stride, head_stride, _ = scales.stride()
    return 0, block_stride * _FLOAT_BYTES, head_stride * _FLOAT_BYTES


def set_layer(
    params: "array[int]",
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    scale: float,
    soft_cap: float | None,
    alibi_slopes: Tensor | None,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    out: Tensor,
) -> None:
    """Write the arguments of a layer's tensors, `LAYER_FIELDS`; see `CompiledAttention.attend` for the others."""
    params[QUERY], params[QUERY_TOKEN_STRIDE], params[QUERY_HEAD_STRIDE] = query.data_ptr(), *query.stride()[:2]
    params[OUT], params[OUT_TOKEN_STRIDE], params[OUT_HEAD_STRIDE] = out.data_ptr(), *out.stride()[:2]
    params[KEY_CACHE], params[VALUE_CACHE] = key_cache.data_ptr(), value_cache.data_ptr()
    params[SCALE] = _base_2_bits(scale)
    params[SOFT_CAP] = 0 if soft_cap is None else _base_2_bits(soft_cap)
    params[ALIBI_SLOPES] = 0 if alibi_slopes is None else alibi_slopes.data_ptr()
    if key_scales is not None and value_scales is not None:
        params[KEY_SCALES], params[VALUE_SCALES] = key_scales.data_ptr(), value_scales.data_ptr()


class CompiledAttention:
    """Compiled attention over one batch. What does not change from layer to layer is laid out once.

    One call at a time: calls share their counters and scratch.
    """

    def __init__(
        self,
        key_cache: Tensor,
        value_cache: Tensor,
        key_scales: Tensor | None,
        value_scales: Tensor | None,
        *,
        block_tables: Int32Array,
        query_starts: Int32Array,
        context_lens: Int32Array,
    ) -> None:
        """Take over checked arguments; see `kvwatch_kernels.paged_attention.AttentionBatch`.

        Args:
            key_cache: C[num_blocks, num_kv_heads, block_size, head_dim], CPU, last dim contiguous: of any layer.
            value_cache: same shape and dtype as `key_cache`; strides may differ.
            key_scales: f32[num_blocks, num_kv_heads, block_size], last dim contiguous; none unless C is quantised.
            value_scales: likewise.
            block_tables: i32[num_seqs, max_blocks], contiguous.
            query_starts: i32[num_seqs + 1], contiguous.
            context_lens: i32[num_seqs], contiguous.
        """
        self._code = attention_code(key_cache.dtype)
        self._cache_shape = tuple(key_cache.shape)
        size = key_cache.element_size()
        self._key_strides = tuple(size * stride for stride in key_cache.stride()[:3])
        self._value_strides = tuple(size * stride for stride in value_cache.stride()[:3])
        self._scale_strides = (*_scale_strides(key_scales), *_scale_strides(value_scales))
        self._element_bytes = size
        self._block_tables = block_tables
        self._query_starts = query_starts
        self._context_lens = context_lens
        self._calls: dict[tuple[int, int, int, int | None, int], PreparedAttention] = {}

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        *,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
        alibi_slopes: Tensor | None,
        key_scales: Tensor | None,
        value_scales: Tensor | None,
        out: Tensor,
    ) -> None:
        """Run the compiled attention on checked arguments.

        Args:
            query: T[num_tokens, num_heads, head_dim], CPU, last dim contiguous.
            key_cache: of the shape and strides of the constructor's.
            value_cache: likewise.
            scale: factor of the scores.
            sliding_window: tokens that a query sees, itself included; None for all.
            soft_cap: bound of the scores, or none.
            alibi_slopes: f32[num_heads], contiguous, or none.
            key_scales: like the constructor's.
            value_scales: likewise.
            out: T[num_tokens, num_heads, head_dim], last dim contiguous; written.

        Raises:
            ShapeError: the lengths contradict each other (nothing was written) or a block id lies outside of the cache
                (`out` is then undefined).
        """
        num_tokens, num_heads, _ = query.shape
        call = self.prepared(num_tokens, num_heads, query.element_size(), sliding_window)
        params = call.params
        set_layer(
            params,
            query,
            key_cache,
            value_cache,
            scale=scale,
            soft_cap=soft_cap,
            alibi_slopes=alibi_slopes,
            key_scales=key_scales,
            value_scales=value_scales,
            out=out,
        )
        call.counters.fill(0)
        launcher()(self._code.run, params.buffer_info()[0], call.num_threads)
        fault, params[FAULT] = params[FAULT], 0
        self.check_fault(fault, params[FAULT_VALUE], num_tokens)

    def prepared(
        self, num_tokens: int, num_heads: int, query_bytes: int, sliding_window: int | None
    ) -> PreparedAttention:
        """Return what calls for queries of this shape have in common; counters and scratch serve one call at a time.

        Args:
            num_tokens: of the queries.
            num_heads: of the queries.
            query_bytes: of one element of them.
            sliding_window: tokens that a query sees, itself included; None for all.

        Raises:
            ShapeError: the lengths contradict each other.
        """
        key = (num_tokens, num_heads, query_bytes, sliding_window, torch.get_num_threads())
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = self._prepare(*key)
        return call

    @property
    def function(self) -> int:
        """Address of the C function that each thread runs."""
        return self._code.run

    def check_fault(self, fault: int, value: int, num_tokens: int) -> None:
        """Raise what a call has found, if anything.

        Args:
            fault: what the call left in `FAULT`.
            value: what it left in `FAULT_VALUE`.
            num_tokens: of its queries.

        Raises:
            ShapeError: a block id lies outside of the cache.
        """
        if fault:
            self._raise_fault(fault, value, num_tokens)

    def _prepare(
        self, num_tokens: int, num_heads: int, query_bytes: int, sliding_window: int | None, num_threads: int
    ) -> PreparedAttention:
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
                *self._scale_strides,
                *(self._block_tables.ctypes.data, max_blocks),
                *(self._query_starts.ctypes.data, self._context_lens.ctypes.data),
                *(num_seqs, num_tokens, num_blocks, num_kv_heads, group_size, head_dim),
                *(self._element_bytes, query_bytes, block_size),
                _NO_WINDOW if sliding_window is None else sliding_window,
                *(0, 0, 0),
                counters.ctypes.data,
                *(0, 0),
                *(thread_bytes, tile_rows),
                *(0, 0),
            ),
        )
        num_partials = self._code.check(params.buffer_info()[0])
        self.check_fault(params[FAULT], params[FAULT_VALUE], num_tokens)
        partial_bytes = num_partials * (PARTIAL_HEADER + padded) * _FLOAT_BYTES
        workspace = torch.empty(num_threads * thread_bytes + partial_bytes, dtype=torch.uint8)
        params[SCRATCH] = workspace.data_ptr()
        params[PARTIALS] = workspace.data_ptr() + num_threads * thread_bytes
        return PreparedAttention(params, counters, workspace, num_threads)

    def _raise_fault(self, fault: int, value: int, num_tokens: int) -> NoReturn:
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
