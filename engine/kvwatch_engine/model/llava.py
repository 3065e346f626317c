"""What a LLaVA checkpoint is made of: a decoder, a vision tower, a projector, under the names of several releases."""

from transformers import PreTrainedConfig

from kvwatch_engine.contracts.errors import ModelError
from kvwatch_engine.model.decoder_config import IMAGE_ARCHITECTURES, SUPPORTED_ARCHITECTURES

TOWER, PROJECTOR = "vision_tower.", "multi_modal_projector."

_SUPPORTED_TOWERS = ("clip_vision_model", "siglip_vision_model")
"""Those that make one run of features of fixed length from an image of fixed size."""


def takes_images(config: PreTrainedConfig) -> bool:
    """Whether a configuration is that of a decoder with a vision tower before it."""
    return config.model_type in IMAGE_ARCHITECTURES


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the decoder's configuration: a part of it if the model takes images, else all of it.

    Raises:
        ModelError: the decoder or the vision tower is of a kind that is not supported.
    """
    if not takes_images(config):
        return config
    text, tower = config.text_config, config.vision_config.model_type
    if text.model_type not in SUPPORTED_ARCHITECTURES:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise ModelError(f"a decoder of type {text.model_type} is not supported; supported: {supported}")
    if tower not in _SUPPORTED_TOWERS:
        raise ModelError(f"a vision tower of type {tower} is not supported; supported: {', '.join(_SUPPORTED_TOWERS)}")
    if not 0 <= config.image_token_id < text.vocab_size:
        raise ModelError(f"image_token_index {config.image_token_id} is outside the vocabulary of {text.vocab_size}")
    text.tie_word_embeddings = config.tie_word_embeddings  # the whole model's decides
    return text


def decoder_name(name: str) -> str | None:
    """Return a stored tensor's name in a decoder of its own; None if it belongs to the vision part."""
    name = name.removeprefix("model.")
    if name.startswith((TOWER, PROJECTOR)):
        return None
    inner = name.removeprefix("language_model.")
    if inner.startswith(("model.", "lm_head.")):
        return inner
    return f"model.{inner}"


def vision_name(name: str) -> str | None:
    """Return a stored tensor's name in the vision part; None if it belongs to the decoder."""
    name = name.removeprefix("model.")
    if not name.startswith((TOWER, PROJECTOR)):
        return None
    # Releases before transformers 5 have one level more.
    return name.replace(f"{TOWER}vision_model.", TOWER, 1)
