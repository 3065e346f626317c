"""The only door from the model to the attention kernels."""

from collections.abc import Sequence
from typing import Self

import torch

from kvwatch_engine.contracts.cache import KVCacheSpec
from kvwatch_engine.contracts.step import GroupBlocks, Int32Array, StepInput
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.model.kv_groups import ONE_GROUP, LayerPlaces
from kvwatch_engine.model.layer_caches import LayerCaches
from kvwatch_kernels.cpu.warmup import warm_up
from kvwatch_kernels.kv_store import kv_store
from kvwatch_kernels.paged_attention import AttentionBatch
from kvwatch_kernels.rotary import rotate_and_store
from kvwatch_kernels.slots import SlotMapping


class StepAttention:
    """Attention of all layers for one step: where its tokens are written, and which blocks they see.

    What is the same for all layers of a KV group is checked and laid out once. Engine thread only.
    """

    __slots__ = ("_batches", "_layers", "_slots")

    def __init__(
        self,
        cache: KVCache,
        groups: Sequence[GroupBlocks],
        *,
        query_starts: Int32Array,
        context_lens: Int32Array,
        places: LayerPlaces = ONE_GROUP,
    ) -> None:
        """View a step's arrays, see `StepInput`; they may not change during the step.

        Args:
            cache: read and written.
            groups: where the step's tokens lie in each KV group.
            query_starts: i32[num_seqs + 1].
            context_lens: i32[num_seqs].
            places: where each layer's keys and values lie.
        """
        self._layers = LayerCaches(cache, places)
        num_slots = cache.num_blocks * cache.spec.block_size
        self._slots = [SlotMapping(group.slot_mapping, num_slots) for group in groups]
        _, layer, scales = self._layers.of(0)
        self._batches = [
            AttentionBatch(
                *layer, block_tables=group.block_tables, query_starts=query_starts, context_lens=context_lens, **scales
            )
            for group in groups
        ]

    @property
    def batches(self) -> Sequence[AttentionBatch]:
        """The step's sequences, of each KV group."""
        return self._batches

    @property
    def slots(self) -> Sequence[SlotMapping]:
        """Where the step's tokens are written, of each KV group."""
        return self._slots

    @classmethod
    def of_step(cls, cache: KVCache, step: StepInput, places: LayerPlaces = ONE_GROUP) -> Self:
        """Return the attention of a step over a cache."""
        starts, lens = step.query_starts, step.context_lens
        return cls(cache, step.groups, query_starts=starts, context_lens=lens, places=places)

    def rotate_and_store(
        self,
        layer: int,
        qkv: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        *,
        norm_weight: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """Rotate a layer's queries and keys to their positions; write keys and values to the cache.

        Args:
            layer: index of the layer.
            qkv: `[num_tokens, num_heads + 2 * num_kv_heads, head_dim]`, last dimension contiguous; overwritten.
            angles: cosine and sine of each token, `[num_tokens, head_dim / 2]`.
            norm_weight: `[num_heads + num_kv_heads, head_dim]` of the norm before the rotation; none: there is none.
            eps: of that norm.

        Returns:
            `[num_tokens, num_heads, head_dim]`: the queries, a view of `qkv`.
        """
        group, cache, scales = self._layers.of(layer)
        return rotate_and_store(qkv, *angles, *cache, self._slots[group], norm_weight=norm_weight, eps=eps, **scales)

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write a layer's keys and values to the cache.

        Args:
            layer: index of the layer.
            key: `[num_tokens, num_kv_heads, head_dim]`, last dimension contiguous, rotated as the model does.
            value: `[num_tokens, num_kv_heads, head_dim]`, last dimension contiguous.
        """
        group, cache, scales = self._layers.of(layer)
        kv_store(key, value, *cache, self._slots[group], **scales)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        *,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None = None,
    ) -> torch.Tensor:
        """Attend to everything in the cache that each query may see, the step's own tokens included.

        Args:
            layer: index of the layer, whose new keys and values are already in the cache.
            query: `[num_tokens, num_heads, head_dim]`, last dimension contiguous.
            scale: factor on the products of queries and keys.
            sliding_window: tokens that a query sees, itself included; none sees all.
            soft_cap: bound of the scores; none if there is none.

        Returns:
            `[num_tokens, num_heads * head_dim]`, contiguous.
        """
        group, cache, scales = self._layers.of(layer)
        return (
            self._batches[group]
            .attend(query, *cache, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap, **scales)
            .flatten(1)
        )


def warm_up_attention(spec: KVCacheSpec, num_heads: int, dtype: torch.dtype) -> None:
    """Compile the kernels for such a cache and for computing in `dtype`, so that no request waits for a compiler."""
    warm_up(
        dtype,
        num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.block_size,
        cache_dtype=getattr(torch, spec.dtype),
    )
