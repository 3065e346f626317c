"""Where a layer's keys and values lie in the cache: what every way to attention asks first. Computes nothing."""

from typing import TypedDict

import torch

from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.model.kv_groups import LayerPlaces


class CacheScales(TypedDict):
    """Scales of a quantised cache, as kernels take them by name; none if it is not quantised."""

    key_scales: torch.Tensor | None
    """`float32[num_blocks, num_kv_heads, block_size]`"""
    value_scales: torch.Tensor | None
    """`float32[num_blocks, num_kv_heads, block_size]`"""


class LayerCaches:
    """The layers of one cache."""

    __slots__ = ("_cache", "_places")

    def __init__(self, cache: KVCache, places: LayerPlaces) -> None:
        self._cache = cache
        self._places = places

    def of(self, layer: int) -> tuple[int, tuple[torch.Tensor, torch.Tensor], CacheScales]:
        """Return a layer's KV group, its keys and values, and their scales; see `KVCache.layer`. O(1)."""
        group, place = self._places.of(layer)
        key_scales, value_scales = self._cache.layer_scales(place)
        return group, self._cache.layer(place), {"key_scales": key_scales, "value_scales": value_scales}
