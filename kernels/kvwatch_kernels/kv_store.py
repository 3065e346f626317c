"""Write new keys and values into the paged cache."""

from torch import Tensor

from kvwatch_kernels.cpu.bf16 import COMPILED_DTYPES
from kvwatch_kernels.cpu.store import kv_store_call
from kvwatch_kernels.dims import Int64Array, check_cache, check_heads, check_written
from kvwatch_kernels.errors import ShapeError
from kvwatch_kernels.reference import reference_kv_store
from kvwatch_kernels.slots import SlotMapping, slots_of


def kv_store(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: SlotMapping | Int64Array | Tensor,
    *,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> None:
    """Write each token's key and value to its slot: slot = block id * block size + offset in the block.

    A quantised cache receives what `quant.quantise` makes of them, and the scales.

    Args:
        key: T[num_tokens, num_kv_heads, head_dim], last dim contiguous.
        value: T[num_tokens, num_kv_heads, head_dim], last dim contiguous.
        key_cache: C[num_blocks, num_kv_heads, block_size, head_dim], last dim contiguous; written. C is T or
            quantised.
        value_cache: C[num_blocks, num_kv_heads, block_size, head_dim], last dim contiguous; written.
        slot_mapping: i64[num_tokens]. A token with `PAD_SLOT` is skipped; no slot may occur twice.
        key_scales: f32[num_blocks, num_kv_heads, block_size], last dim contiguous, if C is quantised; written.
        value_scales: likewise.

    Raises:
        ShapeError: an argument breaks this contract; nothing was written.
    """
    check_cache(key_cache, value_cache, key_scales, value_scales)
    check_written("key_cache", key_cache)
    check_written("value_cache", value_cache)
    check_heads("key", key, key_cache)
    check_heads("value", value, key_cache)
    num_kv_heads = key_cache.shape[1]
    if key.shape[1] != num_kv_heads or value.shape != key.shape:
        raise ShapeError(
            f"key has shape {list(key.shape)}, value {list(value.shape)}: "
            f"must agree and have the cache's {num_kv_heads} heads"
        )
    if value.dtype != key.dtype:
        raise ShapeError(f"key has dtype {key.dtype}, value {value.dtype}: must agree")
    slots = slots_of(slot_mapping, len(key), key_cache)
    if len(slots) == 0:
        return
    if key.device.type == "cuda":
        from kvwatch_kernels.triton.store import slots_on, triton_kv_store

        on_device = slots_on(key.device, slots)
        triton_kv_store(key, value, key_cache, value_cache, on_device, key_scales=key_scales, value_scales=value_scales)
        return
    arguments = (key, value, key_cache, value_cache, slots)
    if key.device.type == "cpu" and (key_scales is None or key.dtype in COMPILED_DTYPES):
        kv_store_call(*arguments, key_scales=key_scales, value_scales=value_scales).run()
    else:
        reference_kv_store(*arguments, key_scales=key_scales, value_scales=value_scales)
