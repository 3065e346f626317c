"""Forward pass of Llama-like decoders over packed tokens: plain functions of plain tensors.

Tokens of all sequences of a step lie one after the other, without batch dimension or padding; only attention knows
where a sequence begins.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from kvwatch_engine.model.attention import StepAttention
from kvwatch_engine.model.decoder_config import DecoderConfig
from kvwatch_engine.model.linear import Linear
from kvwatch_engine.model.rope import RotaryEmbedding, rotate


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Weights of one layer."""

    attention_norm: torch.Tensor
    """`[hidden_size]`"""
    qkv: Linear
    """hidden_size -> (num_heads + 2 * num_kv_heads) * head_dim: queries, keys, values."""
    qk_norm: torch.Tensor | None
    """`[num_heads + num_kv_heads, head_dim]`: the query's norm weight for its heads, then the key's."""
    output: Linear
    """num_heads * head_dim -> hidden_size"""
    mlp_norm: torch.Tensor
    """`[hidden_size]`"""
    gate_up: Linear
    """hidden_size -> 2 * intermediate_size: gate, up."""
    down: Linear
    """intermediate_size -> hidden_size"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """Weights of a decoder; immutable once loaded."""

    embedding: torch.Tensor
    """`[vocab_size, hidden_size]`"""
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    """`[hidden_size]`"""
    logits: Linear
    """hidden_size -> vocab_size"""
    num_bytes: int
    """Memory that all weights take."""


class Decoder:
    """A decoder-only transformer. Holds no state between calls: the KV cache comes with each step."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, rotary: RotaryEmbedding) -> None:
        self.config = config
        self.dtype = weights.embedding.dtype
        self._weights = weights
        self._rotary = rotary

    def hidden_states(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: StepAttention) -> torch.Tensor:
        """Run all layers; writes the tokens' keys and values to the cache.

        Args:
            token_ids: i64[num_tokens].
            positions: i64[num_tokens]. Place of each token in its sequence, from 0.
            attention: cache and blocks of this step.

        Returns:
            `dtype[num_tokens, hidden_size]`, before the last norm.
        """
        hidden = functional.embedding(token_ids, self._weights.embedding)
        angles = self._rotary.angles(positions, self.dtype)
        for index, layer in enumerate(self._weights.layers):
            hidden.add_(self._attend(index, layer, self._normalise(hidden, layer.attention_norm), angles, attention))
            hidden.add_(self._feed_forward(layer, self._normalise(hidden, layer.mlp_norm)))
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return f32[num_rows, vocab_size], the logits of rows of `hidden_states`.

        Args:
            hidden: `dtype[num_rows, hidden_size]`. Only the rows that are sampled from: for a long prompt this product
                costs more than all layers together.
        """
        return self._weights.logits(self._normalise(hidden, self._weights.norm)).float()

    def _normalise(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        x: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        attention: StepAttention,
    ) -> torch.Tensor:
        config = self.config
        num_rotated = config.num_heads + config.num_kv_heads
        heads = layer.qkv(x).view(len(x), num_rotated + config.num_kv_heads, config.head_dim)
        rotated, value = heads[:, :num_rotated], heads[:, num_rotated:]
        if layer.qk_norm is not None:
            # One norm for queries and keys; the weights, which differ, are multiplied after it.
            rotated = functional.rms_norm(rotated, (config.head_dim,), None, config.rms_norm_eps) * layer.qk_norm
        rotated = rotate(rotated, *angles)
        attended = attention.attend(
            index,
            rotated[:, : config.num_heads],
            rotated[:, config.num_heads :],
            value,
            scale=config.attention_scale,
            sliding_window=config.sliding_windows[index],
        )
        return layer.output(attended)

    def _feed_forward(self, layer: LayerWeights, x: torch.Tensor) -> torch.Tensor:
        gate, up = layer.gate_up(x).chunk(2, dim=-1)
        return layer.down(functional.silu(gate).mul_(up))
