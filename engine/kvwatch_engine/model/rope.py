"""Rotary position embeddings, with the frequencies that transformers computes for a configuration."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvwatch_engine.model.decoder_config import UnsupportedByDecoder

# `dynamic` changes its frequencies only beyond max_position_embeddings, which is the longest context served here.
# `longrope` changes them in the middle of a sequence, which would invalidate keys that are already in the cache.
SUPPORTED_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RotaryEmbedding:
    """Frequencies of one model."""

    inverse_frequencies: torch.Tensor
    """f32[head_dim / 2], radians per position."""
    scaling: float
    """Factor on sine and cosine (yarn)."""

    def angles(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosine and sine of each position's angles, to be used by all layers of a step.

        Args:
            positions: i64[num_tokens].
            dtype: dtype of queries and keys; the angles are computed in float32 in any case.

        Returns:
            Two tensors `dtype[num_tokens, head_dim / 2]`, contiguous.
        """
        angles = positions[:, None].float() * self.inverse_frequencies
        return (angles.cos() * self.scaling).to(dtype), (angles.sin() * self.scaling).to(dtype)


def rotary_embeddings(
    config: PreTrainedConfig, head_dim: int, device: torch.device | None = None
) -> tuple[RotaryEmbedding, ...]:
    """Return the rotary embedding of each layer of a transformers configuration; equal ones are one object.

    Args:
        config: its `rope_parameters` are those of all layers, or of each type of layer.
        head_dim: elements of a head.
        device: where positions will be; none means the CPU.

    Raises:
        UnsupportedByDecoder: a rope type is not supported, or rotates only a part of each head.
    """
    num_layers = int(config.num_hidden_layers)
    if "rope_type" in config.rope_parameters:
        return (rotary_embedding(config, head_dim, device),) * num_layers
    by_type = {kind: rotary_embedding(config, head_dim, device, kind) for kind in dict.fromkeys(config.layer_types)}
    return tuple(by_type[kind] for kind in config.layer_types)


def rotary_embedding(
    config: PreTrainedConfig, head_dim: int, device: torch.device | None = None, layer_type: str | None = None
) -> RotaryEmbedding:
    """Return the rotary embedding of a transformers configuration, or of one type of its layers.

    Raises:
        UnsupportedByDecoder: the rope type is not supported, or rotates only a part of each head.
    """
    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    rope_type = parameters["rope_type"]
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise UnsupportedByDecoder(
            f"rope type {rope_type!r} is not supported; supported: {', '.join(SUPPORTED_ROPE_TYPES)}"
        )
    if rope_type == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies, scaling = 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    else:
        more = {} if layer_type is None else {"layer_type": layer_type}
        frequencies, scaling = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), **more)
    if len(frequencies) != head_dim // 2:
        raise UnsupportedByDecoder(
            f"rope rotates {2 * len(frequencies)} of {head_dim} dimensions of each head; only whole heads are supported"
        )
    return RotaryEmbedding(frequencies.to(device), float(scaling))
