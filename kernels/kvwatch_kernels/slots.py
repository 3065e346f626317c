"""Where a step's tokens are written: slots that were checked once and serve every layer."""

from typing import Final

import numpy as np
from torch import Tensor

from kvwatch_kernels.dims import PAD_SLOT, Int64Array, index_array
from kvwatch_kernels.errors import ShapeError


class SlotMapping:
    """i64[num_tokens] of slots that lie in a cache of `num_slots`, or are `PAD_SLOT`.

    The array is viewed, not copied: it may not change while the mapping is in use.
    """

    __slots__ = ("num_slots", "slots")

    def __init__(self, slot_mapping: Int64Array | Tensor, num_slots: int) -> None:
        """Check slots against the size of a cache.

        Args:
            slot_mapping: i64[num_tokens], contiguous. No slot may occur twice.
            num_slots: num_blocks * block_size of the cache.

        Raises:
            ShapeError: another shape or dtype, or a slot outside of the cache.
        """
        self.slots: Final = index_array("slot_mapping", slot_mapping, np.int64, (None,))
        self.num_slots: Final = num_slots
        if len(self.slots) == 0:
            return
        lowest, highest = int(self.slots.min()), int(self.slots.max())
        if lowest < PAD_SLOT or highest >= num_slots:
            raise ShapeError(
                f"slot_mapping has slots {lowest} to {highest}: must be 0 to {num_slots - 1}, or {PAD_SLOT} for none"
            )


def slots_of(slot_mapping: "SlotMapping | Int64Array | Tensor", num_tokens: int, key_cache: Tensor) -> Int64Array:
    """Return the checked slots of `num_tokens` tokens.

    Args:
        slot_mapping: checked before, or to be checked now.
        num_tokens: tokens that are to be written.
        key_cache: T[num_blocks, num_kv_heads, block_size, head_dim]; its dims were checked.

    Raises:
        ShapeError: not one slot a token, or a slot outside of the cache.
    """
    num_slots = key_cache.shape[0] * key_cache.shape[2]
    if not isinstance(slot_mapping, SlotMapping):
        index_array("slot_mapping", slot_mapping, np.int64, (num_tokens,))
        slot_mapping = SlotMapping(slot_mapping, num_slots)
    if len(slot_mapping.slots) != num_tokens or slot_mapping.num_slots > num_slots:
        raise ShapeError(
            f"slot_mapping has {len(slot_mapping.slots)} slots of a cache of {slot_mapping.num_slots}: "
            f"must be one for each of {num_tokens} tokens, in this cache of {num_slots}"
        )
    return slot_mapping.slots
