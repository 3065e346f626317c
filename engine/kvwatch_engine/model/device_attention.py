"""Attention of a step whose arrays are on the GPU already: the door from the model to the Triton kernels.

What `StepAttention` checks on the host is not checked here: the lengths stay on the device, and a captured graph must
not look at them.
"""

import torch

from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.model.kv_groups import LayerPlaces
from kvwatch_engine.model.layer_caches import LayerCaches
from kvwatch_engine.model.staging import StagedStep
from kvwatch_kernels.triton.attention import DeviceBatch, triton_paged_attention
from kvwatch_kernels.triton.store import triton_kv_store, triton_rotate_and_store


class DeviceAttention:
    """Attention of all layers for one staged step. Engine thread only; everything is enqueued on the current stream."""

    __slots__ = ("_batches", "_layers", "_slots")

    def __init__(
        self, cache: KVCache, staged: StagedStep, places: LayerPlaces, max_query_len: int, max_context_len: int
    ) -> None:
        """Bind a staged step to a cache on the same device.

        Args:
            cache: read and written.
            staged: its arrays may be written anew between two runs of a graph.
            places: where each layer's keys and values lie.
            max_query_len: no sequence has more tokens in this step, nor in any that a graph of it is replayed for.
            max_context_len: no context is longer, likewise.
        """
        self._layers = LayerCaches(cache, places)
        self._slots = [group.slot_mapping for group in staged.groups]
        self._batches = [
            DeviceBatch(
                block_tables=group.block_tables,
                query_starts=staged.query_starts,
                context_lens=staged.context_lens,
                max_query_len=max_query_len,
                max_context_len=max_context_len,
            )
            for group in staged.groups
        ]

    def rotate_and_store(
        self,
        layer: int,
        qkv: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        *,
        norm_weight: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """Rotate a layer's queries and keys, write keys and values to the cache; see `StepAttention`."""
        group, cache, scales = self._layers.of(layer)
        triton_rotate_and_store(qkv, *angles, *cache, self._slots[group], norm_weight=norm_weight, eps=eps, **scales)
        return qkv[:, : qkv.shape[1] - 2 * cache[0].shape[1]]

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write a layer's keys and values to the cache; see `StepAttention`."""
        group, cache, scales = self._layers.of(layer)
        triton_kv_store(key, value, *cache, self._slots[group], **scales)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        *,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None = None,
    ) -> torch.Tensor:
        """Attend to what each query may see; see `StepAttention`."""
        group, cache, scales = self._layers.of(layer)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        triton_paged_attention(
            query,
            *cache,
            self._batches[group],
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            **scales,
            out=out,
        )
        return out.flatten(1)
