"""The shape of a decoder, read from a model's configuration."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from kvwatch_engine.contracts.errors import ModelError

SUPPORTED_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""transformers' model type -> the architecture that this package computes."""

IMAGE_ARCHITECTURES = {"llava": "LlavaForConditionalGeneration"}
"""Likewise, of decoders with a vision tower before them; see `llava.py`."""

SUPPORTED_ACTIVATIONS = ("silu",)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Everything that the forward pass needs to know beside the weights."""

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    """Longest context in tokens."""
    rms_norm_eps: float
    has_tied_embeddings: bool
    """Whether the output projection is the embedding table."""
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    """Whether each head of query and key is normalised before it is rotated."""
    sliding_windows: tuple[int | None, ...]
    """Of each layer: tokens that a query sees, itself included; none sees all."""

    @property
    def attention_scale(self) -> float:
        """Factor on the products of queries and keys."""
        return float(self.head_dim**-0.5)


def read_config(folder: Path) -> PreTrainedConfig:
    """Read a model folder's configuration.

    Raises:
        ModelError: there is none, it cannot be read, or it is of a kind that is not supported.
    """
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelError(f"{folder} has no config.json; give a Hugging Face model folder") from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path} holds a {type(raw).__name__} instead of an object")
    _check_supported(raw)
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds, and all mean the same to a user
        raise ModelError(f"{path} is not a valid configuration: {error}") from error


def _check_supported(raw: dict[str, Any]) -> None:
    """Refuse what would load and then compute something else.

    Raises:
        ModelError: says what is not supported, and what is.
    """
    model_type = raw.get("model_type")
    known = SUPPORTED_ARCHITECTURES | IMAGE_ARCHITECTURES
    expected = known.get(str(model_type))
    architectures = raw.get("architectures") or [expected]
    if expected is None or expected not in architectures:
        name = architectures[0] or f"of model type {model_type!r}"
        supported = ", ".join(known.values())
        raise ModelError(f"architecture {name} is not supported; supported: {supported}")
    quantization = raw.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else "unknown"
        raise ModelError(f"weights quantised with {method!r} are not supported; use plain weights or a GGUF file")


def decoder_config(config: PreTrainedConfig) -> DecoderConfig:
    """Translate a transformers configuration of a supported architecture.

    Raises:
        ModelError: its activation function is not supported, or its context holds no prompt with an answer.
    """
    if config.hidden_act not in SUPPORTED_ACTIVATIONS:
        supported = ", ".join(SUPPORTED_ACTIVATIONS)
        raise ModelError(f"activation {config.hidden_act!r} is not supported; supported: {supported}")
    model_type = config.model_type
    attention_bias = bool(getattr(config, "attention_bias", False))
    return DecoderConfig(
        architecture=SUPPORTED_ARCHITECTURES[model_type],
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        max_position=_max_position(config),
        rms_norm_eps=config.rms_norm_eps,
        has_tied_embeddings=bool(config.tie_word_embeddings),
        # Qwen2 has these biases whatever its configuration says; Mistral never has any.
        has_qkv_bias=model_type == "qwen2" or (model_type in ("llama", "qwen3") and attention_bias),
        has_output_bias=model_type in ("llama", "qwen3") and attention_bias,
        has_mlp_bias=model_type == "llama" and bool(config.mlp_bias),
        has_qk_norm=model_type == "qwen3",
        sliding_windows=_sliding_windows(config),
    )


def _max_position(config: PreTrainedConfig) -> int:
    """Return the longest context; yarn configurations give the length before stretching, and the factor.

    Raises:
        ModelError: no prompt with an answer fits.
    """
    rope = config.rope_parameters
    longest = int(config.max_position_embeddings)
    if rope["rope_type"] == "yarn" and rope.get("factor"):
        longest = max(longest, int(rope["original_max_position_embeddings"] * rope["factor"]))
    if longest < 2:
        raise ModelError(f"max_position_embeddings is {longest}: a prompt and an answer need at least 2 positions")
    return longest


def _sliding_windows(config: PreTrainedConfig) -> tuple[int | None, ...]:
    """Return each layer's window: Mistral's holds for all layers, Qwen's for those of type `sliding_attention`."""
    window = getattr(config, "sliding_window", None)
    if config.model_type == "llama" or window is None:
        return tuple([None] * int(config.num_hidden_layers))
    if config.model_type == "mistral":
        return tuple([int(window)] * int(config.num_hidden_layers))
    return tuple(int(window) if kind == "sliding_attention" else None for kind in config.layer_types)
