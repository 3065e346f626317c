"""The only door from the model to the attention kernels."""

from typing import Self

import torch

from kvwatch_engine.contracts.step import Int32Array, Int64Array, StepInput
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_kernels.cpu.warmup import warm_up
from kvwatch_kernels.paged_attention import AttentionBatch
from kvwatch_kernels.rotary import rotate_and_store
from kvwatch_kernels.slots import SlotMapping


class StepAttention:
    """Attention of all layers for one step: where its tokens are written, and which blocks they see.

    What is the same for all layers is checked and laid out once. Engine thread only.
    """

    __slots__ = ("_batch", "_cache", "_slots")

    def __init__(
        self,
        cache: KVCache,
        *,
        slot_mapping: Int64Array,
        query_starts: Int32Array,
        context_lens: Int32Array,
        block_tables: Int32Array,
    ) -> None:
        """See `StepInput` for the arrays' shapes; they are viewed and may not change during the step."""
        self._cache = cache
        self._slots = SlotMapping(slot_mapping, cache.num_blocks * cache.spec.block_size)
        key_scales, value_scales = cache.layer_scales(0)
        self._batch = AttentionBatch(
            *cache.layer(0),
            block_tables=block_tables,
            query_starts=query_starts,
            context_lens=context_lens,
            key_scales=key_scales,
            value_scales=value_scales,
        )

    @classmethod
    def of_step(cls, cache: KVCache, step: StepInput) -> Self:
        """Return the attention of a step over a cache."""
        return cls(
            cache,
            slot_mapping=step.slot_mapping,
            query_starts=step.query_starts,
            context_lens=step.context_lens,
            block_tables=step.block_tables,
        )

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
        key_scales, value_scales = self._cache.layer_scales(layer)
        return rotate_and_store(
            qkv,
            *angles,
            *self._cache.layer(layer),
            self._slots,
            norm_weight=norm_weight,
            eps=eps,
            key_scales=key_scales,
            value_scales=value_scales,
        )

    def attend(self, layer: int, query: torch.Tensor, *, scale: float, sliding_window: int | None) -> torch.Tensor:
        """Attend to everything in the cache that each query may see, the step's own tokens included.

        Args:
            layer: index of the layer, whose new keys and values are already in the cache.
            query: `[num_tokens, num_heads, head_dim]`, last dimension contiguous.
            scale: factor on the products of queries and keys.
            sliding_window: tokens that a query sees, itself included; none sees all.

        Returns:
            `[num_tokens, num_heads * head_dim]`, contiguous.
        """
        key_scales, value_scales = self._cache.layer_scales(layer)
        return self._batch.attend(
            query,
            *self._cache.layer(layer),
            scale=scale,
            sliding_window=sliding_window,
            key_scales=key_scales,
            value_scales=value_scales,
        ).flatten(1)


def warm_up_attention(cache: KVCache, num_heads: int, dtype: torch.dtype) -> None:
    """Compile the kernels for this cache and for computing in `dtype`, so that no request waits for a compiler."""
    spec = cache.spec
    warm_up(
        dtype,
        num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.block_size,
        cache_dtype=getattr(torch, spec.dtype),
    )
