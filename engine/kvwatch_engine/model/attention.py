"""The only door from the model to the attention kernels."""

from typing import Self

import torch

from kvwatch_engine.contracts.step import Int32Array, Int64Array, StepInput
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_kernels.cpu.warmup import warm_up
from kvwatch_kernels.kv_store import kv_store
from kvwatch_kernels.paged_attention import paged_attention


class StepAttention:
    """Attention of all layers for one step: where its tokens are written, and which blocks they see."""

    __slots__ = ("_block_tables", "_cache", "_context_lens", "_query_starts", "_slot_mapping")

    def __init__(
        self,
        cache: KVCache,
        *,
        slot_mapping: Int64Array,
        query_starts: Int32Array,
        context_lens: Int32Array,
        block_tables: Int32Array,
    ) -> None:
        """See `StepInput` for the arrays' shapes."""
        self._cache = cache
        self._slot_mapping = slot_mapping
        self._query_starts = query_starts
        self._context_lens = context_lens
        self._block_tables = block_tables

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

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """Write a layer's new keys and values to the cache, then attend to everything that each query may see.

        Args:
            layer: index of the layer.
            query: `[num_tokens, num_heads, head_dim]`, last dimension contiguous.
            key: `[num_tokens, num_kv_heads, head_dim]`, last dimension contiguous.
            value: `[num_tokens, num_kv_heads, head_dim]`, last dimension contiguous.
            scale: factor on the products of queries and keys.
            sliding_window: tokens that a query sees, itself included; none sees all.

        Returns:
            `[num_tokens, num_heads * head_dim]`, contiguous.
        """
        key_cache, value_cache = self._cache.layer(layer)
        kv_store(key, value, key_cache, value_cache, self._slot_mapping)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        paged_attention(
            query,
            key_cache,
            value_cache,
            block_tables=self._block_tables,
            query_starts=self._query_starts,
            context_lens=self._context_lens,
            scale=scale,
            sliding_window=sliding_window,
            out=out,
        )
        return out.flatten(1)


def warm_up_attention(cache: KVCache, num_heads: int) -> None:
    """Compile the kernels for this cache, so that no request waits for a compiler."""
    spec = cache.spec
    warm_up(getattr(torch, spec.dtype), num_heads, spec.num_kv_heads, spec.head_dim, spec.block_size)
