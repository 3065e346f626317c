"""The shape of a decoder, read from a model's configuration."""

from dataclasses import dataclass

from transformers import PreTrainedConfig

from kvwatch_engine.contracts.errors import ModelError

SUPPORTED_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
"""transformers' model type -> the architecture that this package computes."""

IMAGE_ARCHITECTURES = {"llava": "LlavaForConditionalGeneration"}
"""Likewise, of decoders with a vision tower before them; see `llava.py`."""

SUPPORTED_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")

_WITH_ATTENTION_BIAS = ("llama", "qwen3", "gemma3_text")
"""Types that have biases in all of attention's linear layers if their configuration says so."""


class UnsupportedByDecoder(ModelError):
    """This package's decoder does not compute such a model; another path may."""


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
    has_output_norms: bool = False
    """Whether what attention and the MLP give is normalised before it is added to the hidden states."""
    norm_offset: float = 0.0
    """Added to every norm weight of the checkpoint."""
    activation: str = "silu"
    """transformers' name of the MLP's activation."""
    embedding_scale: float = 1.0
    """Factor on the embeddings."""
    attention_scale: float
    """Factor on the products of queries and keys."""
    sliding_windows: tuple[int | None, ...]
    """Of each layer: tokens that a query sees, itself included; none sees all."""


def is_known(config: PreTrainedConfig) -> bool:
    """Whether a configuration is that of an architecture of this package, with or without a vision tower."""
    expected = (SUPPORTED_ARCHITECTURES | IMAGE_ARCHITECTURES).get(config.model_type)
    return expected is not None and expected in (config.architectures or [expected])


def decoder_config(config: PreTrainedConfig) -> DecoderConfig:
    """Translate a transformers configuration of a supported architecture.

    Raises:
        UnsupportedByDecoder: it does what this package does not compute.
        ModelError: its context holds no prompt with an answer.
    """
    model_type = config.model_type
    is_gemma = model_type == "gemma3_text"
    activation = config.hidden_activation if is_gemma else config.hidden_act
    if activation not in SUPPORTED_ACTIVATIONS:
        supported = ", ".join(SUPPORTED_ACTIVATIONS)
        raise UnsupportedByDecoder(f"activation {activation!r} is not supported; supported: {supported}")
    if is_gemma:
        _check_gemma(config)
    attention_bias = bool(getattr(config, "attention_bias", False))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return DecoderConfig(
        architecture=SUPPORTED_ARCHITECTURES[model_type],
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        max_position=longest_context(config),
        rms_norm_eps=config.rms_norm_eps,
        has_tied_embeddings=bool(config.tie_word_embeddings),
        # Qwen2 has these biases whatever its configuration says; Mistral never has any.
        has_qkv_bias=model_type == "qwen2" or (model_type in _WITH_ATTENTION_BIAS and attention_bias),
        has_output_bias=model_type in _WITH_ATTENTION_BIAS and attention_bias,
        has_mlp_bias=model_type == "llama" and bool(config.mlp_bias),
        has_qk_norm=model_type in ("qwen3", "gemma3_text"),
        has_output_norms=is_gemma,
        norm_offset=float(is_gemma),
        activation=activation,
        embedding_scale=float(config.hidden_size**0.5) if is_gemma else 1.0,
        attention_scale=float((config.query_pre_attn_scalar if is_gemma else head_dim) ** -0.5),
        sliding_windows=_sliding_windows(config),
    )


def _check_gemma(config: PreTrainedConfig) -> None:
    """Refuse what other members of the family do and this package does not compute.

    Raises:
        UnsupportedByDecoder: says what.
    """
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name, None) is not None:
            raise UnsupportedByDecoder(
                f"{name} is {getattr(config, name)}: soft caps of {config.model_type} are not supported"
            )
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedByDecoder("use_bidirectional_attention is set: only causal attention is supported")


def longest_context(config: PreTrainedConfig) -> int:
    """Return the longest context in tokens.

    Yarn configurations give the length before stretching, and the factor. Longrope ones change their frequencies where
    the first length ends, which would void keys that are in the cache by then: that length is the longest.

    Raises:
        ModelError: the configuration does not say, or no prompt with an answer fits.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    longest = getattr(config, "max_position_embeddings", None)
    if not isinstance(longest, int):
        raise ModelError("the configuration has no max_position_embeddings; add the longest context in tokens")
    if rope.get("rope_type") == "yarn" and rope.get("factor"):
        longest = max(longest, int(rope["original_max_position_embeddings"] * rope["factor"]))
    if rope.get("rope_type") == "longrope":
        longest = min(longest, int(rope["original_max_position_embeddings"]))
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
