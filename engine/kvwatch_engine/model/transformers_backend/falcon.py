"""Falcon's attention, which transformers computes in the module itself instead of asking its attention interface.

As the interface has a registry of functions, Falcon has one of classes: ours is entered there under the same name.
"""

from typing import Any

import torch
from transformers.models.falcon.modeling_falcon import (
    FALCON_ATTENTION_CLASSES,
    FalconAttention,
    apply_rotary_pos_emb,
)

from kvwatch_engine.model.transformers_backend.route import IMPLEMENTATION, paged_attention_forward


class PagedFalconAttention(FalconAttention):  # type: ignore[misc]  # transformers has no types
    """Attention of one layer over the paged cache; keys and values that query heads share are kept once."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        """Attend; under any other implementation's name as transformers does.

        Args:
            hidden_states: `dtype[1, num_tokens, hidden_size]`.
            *args: transformers'.
            **kwargs: transformers'; `position_embeddings` are cosine and sine.

        Returns:
            `dtype[1, num_tokens, hidden_size]`, and no weights.
        """
        if self.config._attn_implementation != IMPLEMENTATION:
            found: tuple[torch.Tensor, None] = super().forward(hidden_states, *args, **kwargs)
            return found
        query, key, value = self._heads(self.query_key_value(hidden_states))
        query, key = apply_rotary_pos_emb(query, key, *kwargs["position_embeddings"])
        attended, _ = paged_attention_forward(self, query, key, value, None, scaling=self.inv_norm_factor)
        return self.dense(attended.flatten(2)), None

    def _heads(self, fused: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return queries, keys and values, `[1, heads, num_tokens, head_dim]` each."""
        batch, num_tokens, _ = fused.shape
        # Each group of query heads is followed by its key and its value; without sharing a group is one head.
        groups = fused.view(batch, num_tokens, self.num_kv_heads, -1, self.head_dim)
        parts = groups[:, :, :, :-2].flatten(2, 3), groups[:, :, :, -2], groups[:, :, :, -1]
        return tuple(part.transpose(1, 2) for part in parts)


FALCON_ATTENTION_CLASSES[IMPLEMENTATION] = PagedFalconAttention
