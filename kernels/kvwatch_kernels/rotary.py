"""Rotary embedding of queries and keys, and the way of keys and values into the paged cache."""

from torch import Tensor

from kvwatch_kernels.cpu.bf16 import COMPILED_DTYPES
from kvwatch_kernels.cpu.rotary import compiled_rotate_and_store
from kvwatch_kernels.dims import Int64Array, check_cache, check_eps, check_heads, check_rows, check_written
from kvwatch_kernels.errors import ShapeError
from kvwatch_kernels.reference import reference_rotate_and_store
from kvwatch_kernels.slots import SlotMapping, slots_of


def rotate_and_store(
    qkv: Tensor,
    cosine: Tensor,
    sine: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: SlotMapping | Int64Array | Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Tensor:
    """Rotate each token's queries in place; rotate its keys into the cache and copy its values there.

    A quantised cache receives what `quant.quantise` makes of the rotated keys and of the values, and the scales.

    Dimension i of a head turns together with dimension i + head_dim / 2. With `norm_weight` each head of query and key
    is RMS-normalised before (Qwen3).

    Args:
        qkv: T[num_tokens, num_heads + 2 * num_kv_heads, head_dim], last dim contiguous: what a fused projection gives,
            queries, keys, values. The queries are replaced; what the keys hold afterwards is undefined.
        cosine: T[num_tokens, head_dim / 2], contiguous; of each token's angles.
        sine: T[num_tokens, head_dim / 2], contiguous.
        key_cache: C[num_blocks, num_kv_heads, block_size, head_dim], last dim contiguous; written. C is T or
            quantised.
        value_cache: C[num_blocks, num_kv_heads, block_size, head_dim], last dim contiguous; written.
        slot_mapping: i64[num_tokens], as in `kv_store`; a step that checks it once passes a `SlotMapping`.
        norm_weight: T[num_heads + num_kv_heads, head_dim], contiguous: of query heads, then key heads.
        eps: added to the mean of squares of the norm.
        key_scales: f32[num_blocks, num_kv_heads, block_size], last dim contiguous, if C is quantised; written.
        value_scales: likewise.

    Returns:
        T[num_tokens, num_heads, head_dim]: the rotated queries, a view of `qkv`.

    Raises:
        ShapeError: an argument breaks this contract; nothing was written.
    """
    check_cache(key_cache, value_cache, key_scales, value_scales)
    check_written("key_cache", key_cache)
    check_written("value_cache", value_cache)
    check_heads("qkv", qkv, key_cache)
    check_written("qkv", qkv)
    check_eps(eps)
    num_tokens, num_rows, head_dim = qkv.shape
    num_heads = num_rows - 2 * key_cache.shape[1]
    if num_heads < 1:
        raise ShapeError(f"qkv has {num_rows} heads: must be query heads and twice the cache's {key_cache.shape[1]}")
    if head_dim % 2:
        raise ShapeError(f"qkv has heads of {head_dim} elements: must be even to turn in pairs")
    for name, angles in (("cosine", cosine), ("sine", sine)):
        check_rows(name, angles, (num_tokens, head_dim // 2), qkv, is_dense=True)
    if norm_weight is not None:
        check_rows("norm_weight", norm_weight, (num_rows - key_cache.shape[1], head_dim), qkv, is_dense=True)
    slots = slots_of(slot_mapping, num_tokens, key_cache)
    if num_tokens and qkv.device.type == "cuda":
        from kvwatch_kernels.triton.store import slots_on, triton_rotate_and_store

        triton_rotate_and_store(
            qkv,
            cosine,
            sine,
            key_cache,
            value_cache,
            slots_on(qkv.device, slots),
            norm_weight=norm_weight,
            eps=eps,
            key_scales=key_scales,
            value_scales=value_scales,
        )
    elif num_tokens:
        is_compiled = qkv.device.type == "cpu" and qkv.dtype in COMPILED_DTYPES
        rotate = compiled_rotate_and_store if is_compiled else reference_rotate_and_store
        rotate(
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
    return qkv[:, :num_heads]
