"""What the general path cannot serve, refused with its reason before any weights are read."""

from typing import Any, Final

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from kvwatch_engine.contracts.errors import ModelError
from kvwatch_engine.model.config_file import architecture_name, stateful_error

_ATTENTION_TYPES: Final = frozenset({"full_attention", "sliding_attention"})
_STATEFUL_TYPES: Final = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba", "recurrent"})

_OWN_ATTENTION: Final = frozenset({"falcon"})
"""Model types for which this package has a door of its own where transformers' interface is not asked."""

_OTHER_SENSES: Final = ("vision_config", "audio_config")


def causal_model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return transformers' class for a configuration.

    Raises:
        ModelError: it cannot be served; says why.
    """
    name = architecture_name(config.architectures, config.model_type)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"architecture {name} is not supported: it has an encoder; only decoders are served")
    if any(getattr(config, part, None) is not None for part in _OTHER_SENSES):
        raise ModelError(
            f"architecture {name} is not supported: it sees images or hears; of those only LLaVA is supported"
        )
    found: type[PreTrainedModel] | None = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if found is None:
        raise ModelError(f"architecture {name} is not supported: transformers knows no language model of this kind")
    if config.architectures and found.__name__ not in config.architectures:
        raise ModelError(
            f"architecture {name} is not supported: it is no language model; that of its kind is {found.__name__}"
        )
    _check_layers(name, found, config)
    if config.model_type not in _OWN_ATTENTION and not found._can_set_attn_implementation():
        raise ModelError(
            f"architecture {name} is not supported: transformers computes its attention without asking its attention "
            "interface, so that keys and values never come to the paged cache"
        )
    if getattr(config, "alibi", False):
        raise ModelError(
            f"architecture {name} is not supported with alibi: transformers rounds its biases to bfloat16, which the "
            "attention kernels do not"
        )
    return found


def _check_layers(name: str, found: Any, config: PreTrainedConfig) -> None:
    """Refuse layers that keep something else than keys and values, or see something else than all or a window.

    Raises:
        ModelError: there are some.
    """
    kinds = set(getattr(config, "layer_types", None) or ())
    if found._is_stateful or kinds & _STATEFUL_TYPES:
        raise stateful_error(name)
    others = sorted(kinds - _ATTENTION_TYPES)
    if others or getattr(config, "attention_chunk_size", None) is not None:
        raise ModelError(
            f"architecture {name} is not supported: it has layers of type {', '.join(others) or 'chunked_attention'}; "
            "only full and sliding attention are supported"
        )
