"""Forward pass of Llama-like decoders over packed tokens: plain functions of plain tensors.

Tokens of all sequences of a step lie one after the other, without batch dimension or padding; only attention knows
where a sequence begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol

import torch
from torch.nn import functional

from kvwatch_engine.model.decoder_config import DecoderConfig
from kvwatch_engine.model.linear import Linear
from kvwatch_engine.model.rope import RotaryEmbedding
from kvwatch_kernels.activation import gelu_tanh_and_multiply, silu_and_multiply
from kvwatch_kernels.rms_norm import rms_norm

LinearName = Literal["qkv", "output", "gate_up", "down"]
"""The linear layers in `LayerWeights`, by name."""


class LinearLayer(Protocol):
    """A linear layer, whatever it is made of."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `dtype[num_tokens, out_features]`, contiguous, for `dtype[num_tokens, in_features]`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Weights of one layer."""

    attention_norm: torch.Tensor
    """`[hidden_size]`"""
    qkv: LinearLayer
    """hidden_size -> (num_heads + 2 * num_kv_heads) * head_dim: queries, keys, values."""
    qk_norm: torch.Tensor | None
    """`[num_heads + num_kv_heads, head_dim]`: the query's norm weight for its heads, then the key's."""
    output: LinearLayer
    """num_heads * head_dim -> hidden_size"""
    mlp_norm: torch.Tensor
    """`[hidden_size]`"""
    attention_output_norm: torch.Tensor | None = None
    """`[hidden_size]`: of what attention adds to the hidden states, where the architecture has it."""
    mlp_output_norm: torch.Tensor | None = None
    """`[hidden_size]`: the same of what the MLP adds."""
    gate_up: LinearLayer
    """hidden_size -> 2 * intermediate_size: gate, up."""
    down: LinearLayer
    """intermediate_size -> hidden_size"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """Weights of a decoder; immutable once loaded."""

    embedding: torch.Tensor
    """`[vocab_size, hidden_size]`; may be kept in bfloat16 where float32 is computed in."""
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    """`[hidden_size]`"""
    logits: Linear
    """hidden_size -> vocab_size"""
    num_bytes: int
    """Memory that all weights take."""


class LayerAttention(Protocol):
    """What a decoder needs of a step's cache and blocks; see `StepAttention` for the arguments."""

    def rotate_and_store(
        self,
        layer: int,
        qkv: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        *,
        norm_weight: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """Rotate a layer's queries and keys, write keys and values to the cache; return the queries."""
        ...

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write a layer's keys, already rotated, and values to the cache."""
        ...

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        *,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None = None,
    ) -> torch.Tensor:
        """Attend to what each query may see; return `[num_tokens, num_heads * head_dim]`."""
        ...


class StepAdapters(Protocol):
    """The LoRA adapters of one step."""

    def adapted(self, layers: tuple[LayerWeights, ...]) -> tuple[LayerWeights, ...]:
        """Return the layers as they compute in this step: each adapter acts on its own tokens."""
        ...


class StepImages(Protocol):
    """The images of one step."""

    def put_into(self, hidden: torch.Tensor) -> None:
        """Overwrite the rows of placeholder tokens in `dtype[num_tokens, hidden_size]` by what they stand for."""
        ...


_GATED = MappingProxyType({"silu": silu_and_multiply, "gelu_pytorch_tanh": gelu_tanh_and_multiply})
"""Gated activation by transformers' name."""


class Decoder:
    """A decoder-only transformer. Holds no state between calls: the KV cache comes with each step."""

    def __init__(
        self, config: DecoderConfig, weights: DecoderWeights, rotary: RotaryEmbedding | Sequence[RotaryEmbedding]
    ) -> None:
        """Make a decoder; `rotary` is that of all layers, or of each of them."""
        self.config = config
        self.can_be_captured = True
        self.dtype = weights.norm.dtype
        self.device = weights.norm.device
        self.weights = weights
        rotaries = [rotary] * config.num_layers if isinstance(rotary, RotaryEmbedding) else list(rotary)
        self.rotaries = list({id(each): each for each in rotaries}.values())
        self.rotary_of_layer = [next(i for i, each in enumerate(self.rotaries) if each is it) for it in rotaries]
        # As transformers does: the factor is rounded to the dtype that is computed in.
        self._embedding_scale = float(torch.tensor(config.embedding_scale).to(self.dtype))
        self._gated = _GATED[config.activation]

    def hidden_states(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: LayerAttention,
        adapters: StepAdapters | None = None,
        images: StepImages | None = None,
    ) -> torch.Tensor:
        """Run all layers; writes the tokens' keys and values to the cache.

        Args:
            token_ids: i64[num_tokens].
            positions: i64[num_tokens]. Place of each token in its sequence, from 0.
            attention: cache and blocks of this step.
            adapters: LoRA adapters of this step; none if no token has one.
            images: images of this step; none if no token stands for one.

        Returns:
            `dtype[num_tokens, hidden_size]`, before the last norm.
        """
        hidden = self.embeddings(token_ids)
        if images is not None:
            images.put_into(hidden)
        angles = [rotary.angles(positions, self.dtype) for rotary in self.rotaries]
        # What a part adds to the hidden states is added by the norm that follows, in one pass.
        added: torch.Tensor | None = None
        layers = self.weights.layers if adapters is None else adapters.adapted(self.weights.layers)
        for index, layer in enumerate(layers):
            normalised = self._normalise(hidden, layer.attention_norm, added)
            added = self._attend(index, layer, normalised, angles[self.rotary_of_layer[index]], attention)
            if layer.attention_output_norm is not None:
                added = self._normalise(added, layer.attention_output_norm)
            added = self._feed_forward(layer, self._normalise(hidden, layer.mlp_norm, added))
            if layer.mlp_output_norm is not None:
                added = self._normalise(added, layer.mlp_output_norm)
        return hidden if added is None else hidden.add_(added)

    @property
    def looks_embeddings_up(self) -> bool:
        """Whether `embeddings` are rows of the weights as they are."""
        return self.weights.embedding.dtype == self.dtype and self._embedding_scale == 1

    def embeddings(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return `dtype[num_tokens, hidden_size]`, what the first layer is given for tokens without images."""
        hidden = functional.embedding(token_ids, self.weights.embedding).to(self.dtype)
        return hidden * self._embedding_scale if self._embedding_scale != 1 else hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return f32[num_rows, vocab_size], the logits of rows of `hidden_states`.

        Args:
            hidden: `dtype[num_rows, hidden_size]`. Only the rows that are sampled from: for a long prompt this product
                costs more than all layers together.
        """
        return self.weights.logits(self._normalise(hidden, self.weights.norm)).float()

    def _normalise(self, x: torch.Tensor, weight: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
        return rms_norm(x, weight, self.config.rms_norm_eps, added=added)

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        x: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        attention: LayerAttention,
    ) -> torch.Tensor:
        config = self.config
        qkv = layer.qkv(x).view(len(x), -1, config.head_dim)
        query = attention.rotate_and_store(index, qkv, angles, norm_weight=layer.qk_norm, eps=config.rms_norm_eps)
        attended = attention.attend(
            index, query, scale=config.attention_scale, sliding_window=config.sliding_windows[index]
        )
        return layer.output(attended)

    def _feed_forward(self, layer: LayerWeights, x: torch.Tensor) -> torch.Tensor:
        return layer.down(self._gated(layer.gate_up(x)))
