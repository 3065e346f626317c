"""Compiled rotary embedding: queries turn in place, keys on their way into the cache, values go there as they are.

For a quantised cache keys turn in place too, and the compiled store takes them and the values from there.
"""

from functools import cache, lru_cache
from typing import NamedTuple

import torch
from numba import types
from torch import Tensor

from kvwatch_kernels.cpu.call import KernelCall
from kvwatch_kernels.cpu.compiled import entry_point, inlined, source_digest, subroutine
from kvwatch_kernels.cpu.memory import (
    Pointer,
    advance,
    bf16_at,
    copy_bytes,
    f32_at,
    i64_at,
    load,
    load_some,
    pointer_like,
    read,
    rounded_like,
    store,
    store_some,
)
from kvwatch_kernels.cpu.rms_norm import inverse_rms
from kvwatch_kernels.cpu.rows import ELEMENTS_PER_ITEM, FIRST_ARGUMENT, float_bits, rows_call, take_rows
from kvwatch_kernels.cpu.store import kv_store_call
from kvwatch_kernels.cpu.vectors import LANES, float_of_bits, fma, splat
from kvwatch_kernels.dims import Int64Array

(
    _NUM_HEADS,  # query heads
    _NUM_KV_HEADS,
    _HEAD_DIM,
    _ELEMENT_BYTES,
    _BLOCK_SIZE,
    SLOTS,  # address of i64[num_tokens]
    _QKV,  # address of qkv [num_tokens, num_heads + 2 * num_kv_heads, head_dim]; then its strides in bytes
    _QKV_TOKEN,
    _QKV_HEAD,
    _COSINE,  # addresses of [num_tokens, head_dim / 2], contiguous
    _SINE,
    _NORM,  # address of the norm weights [num_heads + num_kv_heads, head_dim], contiguous; 0 for none
    _EPS,  # the bits of a float32
    _KEY_CACHE,  # address, 0 where keys and values stay in qkv; then the strides of block, head, token in bytes
    _KEY_BLOCK,
    _KEY_HEAD,
    _KEY_TOKEN,
    _VALUE_CACHE,  # likewise
    _VALUE_BLOCK,
    _VALUE_HEAD,
    _VALUE_TOKEN,
) = range(FIRST_ARGUMENT, FIRST_ARGUMENT + 21)


@subroutine
def normalise_head(head: Pointer, weight: Pointer, head_dim: int, eps: float) -> None:
    """Normalise a head in place: rounded to its dtype before it is multiplied by the weight, and once more after."""
    scale = inverse_rms(head, head_dim, eps)
    whole = head_dim // LANES * LANES
    for offset in range(0, whole, LANES):
        normalised = rounded_like(head, load(advance(head, offset)) * scale)
        store(advance(head, offset), normalised * load(advance(weight, offset)))
    if whole < head_dim:
        rest = head_dim - whole
        normalised = rounded_like(head, load_some(advance(head, whole), rest) * scale)
        store_some(advance(head, whole), rest, normalised * load_some(advance(weight, whole), rest))


@subroutine
def rotate_head(head: Pointer, cosine: Pointer, sine: Pointer, half: int, target: Pointer) -> None:
    """Turn dimension i of a head together with dimension i + half; `target` may be `head` itself.

    The first product is rounded to the dtype, the sum with the second one once more.
    """
    zero = splat(float_of_bits(0))
    whole = half // LANES * LANES
    for offset in range(0, whole, LANES):
        first, second = load(advance(head, offset)), load(advance(head, half + offset))
        cosines, sines = load(advance(cosine, offset)), load(advance(sine, offset))
        store(advance(target, offset), fma(second, zero - sines, rounded_like(head, first * cosines)))
        store(advance(target, half + offset), fma(first, sines, rounded_like(head, second * cosines)))
    if whole < half:
        rest = half - whole
        first, second = load_some(advance(head, whole), rest), load_some(advance(head, half + whole), rest)
        cosines, sines = load_some(advance(cosine, whole), rest), load_some(advance(sine, whole), rest)
        store_some(advance(target, whole), rest, fma(second, zero - sines, rounded_like(head, first * cosines)))
        store_some(advance(target, half + whole), rest, fma(first, sines, rounded_like(head, second * cosines)))


@inlined
def prepare_token(params: Pointer, like: Pointer, token: int) -> None:
    """Norm, rotate and store one token's heads."""
    num_heads, num_kv_heads = read(params, _NUM_HEADS), read(params, _NUM_KV_HEADS)
    head_dim = read(params, _HEAD_DIM)
    half = head_dim // 2
    row_bytes = head_dim * read(params, _ELEMENT_BYTES)
    eps = float_of_bits(read(params, _EPS))
    heads = read(params, _QKV) + token * read(params, _QKV_TOKEN)
    head_bytes = read(params, _QKV_HEAD)
    cosine = advance(pointer_like(like, read(params, _COSINE)), token * half)
    sine = advance(pointer_like(like, read(params, _SINE)), token * half)
    slot = read(i64_at(read(params, SLOTS)), token)
    block = slot // read(params, _BLOCK_SIZE)
    offset = slot - block * read(params, _BLOCK_SIZE)
    is_stored = read(params, _KEY_CACHE) != 0
    # Keys of a token without a slot are of no use to anybody.
    for head in range(num_heads + num_kv_heads if slot >= 0 else num_heads):
        source = pointer_like(like, heads + head * head_bytes)
        if read(params, _NORM) != 0:
            weight = pointer_like(like, read(params, _NORM) + head * row_bytes)
            normalise_head(source, weight, head_dim, eps)
        target = source
        if head >= num_heads and is_stored:
            place = block * read(params, _KEY_BLOCK) + offset * read(params, _KEY_TOKEN)
            place += (head - num_heads) * read(params, _KEY_HEAD)
            target = pointer_like(like, read(params, _KEY_CACHE) + place)
        rotate_head(source, cosine, sine, half, target)
    if slot >= 0 and is_stored:
        place = read(params, _VALUE_CACHE) + block * read(params, _VALUE_BLOCK) + offset * read(params, _VALUE_TOKEN)
        values = heads + (num_heads + num_kv_heads) * head_bytes
        for head in range(num_kv_heads):
            copy_bytes(place + head * read(params, _VALUE_HEAD), values + head * head_bytes, row_bytes)


@inlined
def prepare_tokens(params: Pointer, like: Pointer) -> None:
    """What every thread does: prepare tokens until none is left; `like` is a pointer of their dtype."""
    first, end = take_rows(params)
    while first < end:
        for token in range(first, end):
            prepare_token(params, like, token)
        first, end = take_rows(params)


@cache
def rotary_code(dtype: torch.dtype) -> int:
    """Address of the compiled code for float32 or bfloat16 (compiled, or loaded, once in a process)."""
    digest = source_digest()

    def run_f32(address: int) -> None:
        digest  # noqa: B018  # part of the cache's key
        prepare_tokens(i64_at(address), f32_at(address))

    def run_bf16(address: int) -> None:
        digest  # noqa: B018
        prepare_tokens(i64_at(address), bf16_at(address))

    return entry_point(types.void(types.int64), run_f32 if dtype == torch.float32 else run_bf16)


_eps_bits = lru_cache(maxsize=64)(float_bits)


class RotaryCalls(NamedTuple):
    """What rotates and stores: one call, or two for a quantised cache."""

    rotate: KernelCall
    store: KernelCall | None


def rotary_calls(
    qkv: Tensor,
    cosine: Tensor,
    sine: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Int64Array,
    *,
    norm_weight: Tensor | None,
    eps: float,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    elements_per_item: int = ELEMENTS_PER_ITEM,
) -> RotaryCalls:
    """Lay out rotation and store of checked arguments; see `kvwatch_kernels.rotary`.

    Args:
        qkv: T[num_tokens, num_heads + 2 * num_kv_heads, head_dim], CPU, last dim contiguous; changed.
        cosine: T[num_tokens, head_dim / 2], contiguous.
        sine: the same.
        key_cache: C[num_blocks, num_kv_heads, block_size, head_dim], CPU, last dim contiguous; written.
        value_cache: same shape and dtype.
        slots: i64[num_tokens], contiguous; every slot lies in the cache or is negative.
        norm_weight: T[num_heads + num_kv_heads, head_dim], contiguous; none for no norm.
        eps: added to the mean of squares.
        key_scales: f32[num_blocks, num_kv_heads, block_size], last dim contiguous, of a quantised cache; written.
        value_scales: likewise.
        elements_per_item: see `rows_call`.
    """
    num_tokens, num_rows, head_dim = qkv.shape
    _, num_kv_heads, block_size, _ = key_cache.shape
    size = qkv.element_size()
    qkv_token, qkv_head, _ = qkv.stride()
    key_block, key_head, key_token, _ = key_cache.stride()
    value_block, value_head, value_token, _ = value_cache.stride()
    is_fused = key_scales is None
    arguments = (
        *(num_rows - 2 * num_kv_heads, num_kv_heads, head_dim, size, block_size, slots.ctypes.data),
        *(qkv.data_ptr(), qkv_token * size, qkv_head * size),
        *(cosine.data_ptr(), sine.data_ptr()),
        *(0 if norm_weight is None else norm_weight.data_ptr(), _eps_bits(eps)),
        *(key_cache.data_ptr() if is_fused else 0, key_block * size, key_head * size, key_token * size),
        *(value_cache.data_ptr() if is_fused else 0, value_block * size, value_head * size, value_token * size),
    )
    rotate = rows_call(rotary_code(qkv.dtype), num_tokens, num_rows * head_dim, arguments, elements_per_item)
    store = None
    if not is_fused:
        store = kv_store_call(
            qkv[:, -2 * num_kv_heads : -num_kv_heads],
            qkv[:, -num_kv_heads:],
            key_cache,
            value_cache,
            slots,
            key_scales=key_scales,
            value_scales=value_scales,
        )
    return RotaryCalls(rotate, store)


def compiled_rotate_and_store(
    qkv: Tensor,
    cosine: Tensor,
    sine: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Int64Array,
    *,
    norm_weight: Tensor | None,
    eps: float,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> None:
    """Run rotation and store on checked arguments; see `rotary_calls`."""
    calls = rotary_calls(
        qkv,
        cosine,
        sine,
        key_cache,
        value_cache,
        slots,
        norm_weight=norm_weight,
        eps=eps,
        key_scales=key_scales,
        value_scales=value_scales,
    )
    calls.rotate.run()
    if calls.store is not None:
        calls.store.run()
