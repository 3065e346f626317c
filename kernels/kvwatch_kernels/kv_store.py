"""Write new keys and values into the paged cache."""

from torch import Tensor

from kvwatch_kernels.cpu.store import compiled_kv_store
from kvwatch_kernels.dims import Int64Array, check_cache, check_heads
from kvwatch_kernels.errors import ShapeError
from kvwatch_kernels.reference import reference_kv_store
from kvwatch_kernels.slots import SlotMapping, slots_of


def kv_store(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: SlotMapping | Int64Array | Tensor,
) -> None:
    """Write each token's key and value to its slot: slot = block id * block size + offset in the block.

    Args:
        key: T[num_tokens, num_kv_heads, head_dim], last dim contiguous.
        value: T[num_tokens, num_kv_heads, head_dim], last dim contiguous.
        key_cache: T[num_blocks, num_kv_heads, block_size, head_dim], last dim contiguous; written.
        value_cache: T[num_blocks, num_kv_heads, block_size, head_dim], last dim contiguous; written.
        slot_mapping: i64[num_tokens]. A token with `PAD_SLOT` is skipped; no slot may occur twice.

    Raises:
        ShapeError: an argument breaks this contract; nothing was written.
    """
    check_cache(key_cache, value_cache)
    check_heads("key", key, key_cache)
    check_heads("value", value, key_cache)
    num_kv_heads = key_cache.shape[1]
    if key.shape[1] != num_kv_heads or value.shape != key.shape:
        raise ShapeError(
            f"key has shape {list(key.shape)}, value {list(value.shape)}: "
            f"must agree and have the cache's {num_kv_heads} heads"
        )
    slots = slots_of(slot_mapping, len(key), key_cache)
    if len(slots) == 0:
        return
    store = compiled_kv_store if key.device.type == "cpu" else reference_kv_store
    store(key, value, key_cache, value_cache, slots)
