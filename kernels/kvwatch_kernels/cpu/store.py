"""Compiled `kv_store`: rows go to their slots, as they are (bytes, whatever the dtype) or quantised."""

from array import array
from collections.abc import Callable
from functools import cache

import torch
from numba import types
from torch import Tensor

from kvwatch_kernels.cpu.call import KernelCall
from kvwatch_kernels.cpu.compiled import entry_point, inlined, source_digest
from kvwatch_kernels.cpu.memory import (
    Pointer,
    advance,
    bf16_at,
    copy_bytes,
    e4m3_at,
    e5m2_at,
    f32_at,
    fetch_add,
    i64_at,
    int8_at,
    pointer_like,
    read,
)
from kvwatch_kernels.cpu.quantise import quantise_head
from kvwatch_kernels.dims import Int64Array
from kvwatch_kernels.quant import is_quantised

TOKENS_PER_ITEM = 64
"""Tokens that a thread stores at a time; fewer are not worth a second thread."""

# Places in the argument array; strides in bytes.
(
    _NEXT_ITEM,  # taken by the threads
    STORE_NUM_TOKENS,
    _NUM_HEADS,
    _HEAD_DIM,
    _SOURCE_BYTES,  # of one element of keys and values
    _BLOCK_SIZE,
    STORE_SLOTS,  # address of i64[num_tokens]
    _KEY,  # for keys, then for values, the ten places that follow
) = range(8)
_SIDE_PLACES = 10
_VALUE = _KEY + _SIDE_PLACES
# Places of one side, from `_KEY` or `_VALUE` on.
(
    _SOURCE,  # address of keys or values [num_tokens, num_kv_heads, head_dim], then strides of token and head
    _SOURCE_TOKEN,
    _SOURCE_HEAD,
    _CACHE,  # address of the cache, then strides of block, head and token
    _CACHE_BLOCK,
    _CACHE_HEAD,
    _CACHE_TOKEN,
    _SCALES,  # address of the scales (0 for none), then strides of block and head
    _SCALES_BLOCK,
    _SCALES_HEAD,
) = range(_SIDE_PLACES)


@inlined
def copy_heads(params: Pointer, side: int, token: int, slot: int) -> None:
    """Copy one token's heads of one side (`_KEY` or `_VALUE`) to its slot."""
    block = slot // read(params, _BLOCK_SIZE)
    offset = slot - block * read(params, _BLOCK_SIZE)
    source = read(params, side + _SOURCE) + token * read(params, side + _SOURCE_TOKEN)
    target = read(params, side + _CACHE) + block * read(params, side + _CACHE_BLOCK)
    target += offset * read(params, side + _CACHE_TOKEN)
    row_bytes = read(params, _HEAD_DIM) * read(params, _SOURCE_BYTES)
    for head in range(read(params, _NUM_HEADS)):
        from_row = source + head * read(params, side + _SOURCE_HEAD)
        copy_bytes(target + head * read(params, side + _CACHE_HEAD), from_row, row_bytes)


@inlined
def quantise_heads(params: Pointer, side: int, token: int, slot: int, like: Pointer) -> None:
    """Quantise one token's heads of one side to its slot; `like` is a pointer of the cache's kind of element."""
    block = slot // read(params, _BLOCK_SIZE)
    offset = slot - block * read(params, _BLOCK_SIZE)
    source = read(params, side + _SOURCE) + token * read(params, side + _SOURCE_TOKEN)
    target = read(params, side + _CACHE) + block * read(params, side + _CACHE_BLOCK)
    target += offset * read(params, side + _CACHE_TOKEN)
    scales = read(params, side + _SCALES) + block * read(params, side + _SCALES_BLOCK)
    for head in range(read(params, _NUM_HEADS)):
        from_row = source + head * read(params, side + _SOURCE_HEAD)
        to_row = pointer_like(like, target + head * read(params, side + _CACHE_HEAD))
        scale = advance(f32_at(scales + head * read(params, side + _SCALES_HEAD)), offset)
        if read(params, _SOURCE_BYTES) == 4:
            quantise_head(f32_at(from_row), read(params, _HEAD_DIM), to_row, scale)
        else:
            quantise_head(bf16_at(from_row), read(params, _HEAD_DIM), to_row, scale)


@inlined
def store_tokens(params: Pointer) -> None:
    """What every thread does: copy `TOKENS_PER_ITEM` tokens at a time until none is left."""
    slots = i64_at(read(params, STORE_SLOTS))
    first = fetch_add(params, _NEXT_ITEM) * TOKENS_PER_ITEM
    while first < read(params, STORE_NUM_TOKENS):
        for token in range(first, min(first + TOKENS_PER_ITEM, read(params, STORE_NUM_TOKENS))):
            slot = read(slots, token)
            if slot >= 0:
                copy_heads(params, _KEY, token, slot)
                copy_heads(params, _VALUE, token, slot)
        first = fetch_add(params, _NEXT_ITEM) * TOKENS_PER_ITEM


@inlined
def quantise_tokens(params: Pointer, like: Pointer) -> None:
    """`store_tokens` for a quantised cache; `like` is a pointer of its kind of element."""
    slots = i64_at(read(params, STORE_SLOTS))
    first = fetch_add(params, _NEXT_ITEM) * TOKENS_PER_ITEM
    while first < read(params, STORE_NUM_TOKENS):
        for token in range(first, min(first + TOKENS_PER_ITEM, read(params, STORE_NUM_TOKENS))):
            slot = read(slots, token)
            if slot >= 0:
                quantise_heads(params, _KEY, token, slot, like)
                quantise_heads(params, _VALUE, token, slot, like)
        first = fetch_add(params, _NEXT_ITEM) * TOKENS_PER_ITEM


@cache
def store_code(dtype: torch.dtype) -> int:
    """Address of the compiled store into a cache (compiled, or loaded from the disk cache, once in a process).

    Args:
        dtype: of the cache. One code serves all that are not quantised.
    """
    digest = source_digest()

    def run_plain(address: int) -> None:
        digest  # noqa: B018  # part of the cache's key
        store_tokens(i64_at(address))

    def run_int8(address: int) -> None:
        digest  # noqa: B018
        quantise_tokens(i64_at(address), int8_at(0))

    def run_e4m3(address: int) -> None:
        digest  # noqa: B018
        quantise_tokens(i64_at(address), e4m3_at(0))

    def run_e5m2(address: int) -> None:
        digest  # noqa: B018
        quantise_tokens(i64_at(address), e5m2_at(0))

    quantising: dict[torch.dtype, Callable[[int], None]] = {
        torch.int8: run_int8,
        torch.float8_e4m3fn: run_e4m3,
        torch.float8_e5m2: run_e5m2,
    }
    return entry_point(types.void(types.int64), quantising[dtype] if is_quantised(dtype) else run_plain)


def kv_store_call(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Int64Array,
    *,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> KernelCall:
    """Lay out the store of checked arguments; see `kvwatch_kernels.kv_store`.

    Args:
        key: T[num_tokens, num_kv_heads, head_dim], CPU, last dim contiguous; float32 or bfloat16 for a quantised cache.
        value: same shape and dtype.
        key_cache: C[num_blocks, num_kv_heads, block_size, head_dim], CPU, last dim contiguous; written.
        value_cache: same shape and dtype; written.
        slot_mapping: i64[num_tokens], contiguous; every slot lies in the cache or is negative.
        key_scales: f32[num_blocks, num_kv_heads, block_size], last dim contiguous, of a quantised cache; written.
        value_scales: likewise.
    """
    num_tokens, num_heads, head_dim = key.shape
    sides = [
        number
        for heads, cache, scales in ((key, key_cache, key_scales), (value, value_cache, value_scales))
        for number in (
            *_address_and_strides(heads, 2),
            *_address_and_strides(cache, 3),
            *_address_and_strides(scales, 2),
        )
    ]
    head = (0, num_tokens, num_heads, head_dim, key.element_size(), key_cache.shape[2], slot_mapping.ctypes.data)
    params = array("q", (*head, *sides))
    return KernelCall(store_code(key_cache.dtype), params, -(-num_tokens // TOKENS_PER_ITEM))


def _address_and_strides(tensor: Tensor | None, num_strides: int) -> tuple[int, ...]:
    """Address of a tensor, and its first strides in bytes; zeros for none."""
    if tensor is None:
        return (0,) * (1 + num_strides)
    return tensor.data_ptr(), *(tensor.element_size() * stride for stride in tensor.stride()[:num_strides])
