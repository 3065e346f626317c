"""Loads a model folder for this package's own decoder."""

from pathlib import Path

import torch
from transformers import PreTrainedConfig

from kvwatch_engine.model.adapters import AdapterStore
from kvwatch_engine.model.config_file import architecture_name
from kvwatch_engine.model.decoder import Decoder
from kvwatch_engine.model.decoder_config import (
    IMAGE_ARCHITECTURES,
    SUPPORTED_ARCHITECTURES,
    UnsupportedByDecoder,
    decoder_config,
    is_known,
)
from kvwatch_engine.model.image_encoder import ImageEncoder
from kvwatch_engine.model.llava import decoder_name, takes_images, text_config
from kvwatch_engine.model.parts import AttentionShape, ModelParts
from kvwatch_engine.model.rope import rotary_embeddings
from kvwatch_engine.model.vision_tower import load_vision_tower
from kvwatch_engine.model.weights import load_weights


def load_lean(
    files: tuple[Path, ...], config: PreTrainedConfig, dtype: torch.dtype, device: torch.device
) -> ModelParts:
    """Load a model.

    Args:
        files: its weights, see `weight_files`.
        config: of its folder.
        dtype: float32 or bfloat16, to compute in.
        device: to compute on.

    Raises:
        UnsupportedByDecoder: the decoder does not compute such a model; no weights were read.
        ModelError: its files do not belong together.
    """
    if not is_known(config):
        known = ", ".join((SUPPORTED_ARCHITECTURES | IMAGE_ARCHITECTURES).values())
        name = architecture_name(config.architectures, config.model_type)
        raise UnsupportedByDecoder(f"architecture {name} is not supported by the lean decoder; supported: {known}")
    text = text_config(config)
    shape = decoder_config(text)
    rotaries = rotary_embeddings(text, shape.head_dim, device)
    rename = decoder_name if takes_images(config) else None
    encoder = None
    with torch.inference_mode():
        weights = load_weights(files, shape, dtype, device, rename)
        if takes_images(config):
            encoder = ImageEncoder(load_vision_tower(files, config, dtype, device))
    return ModelParts(
        architecture=IMAGE_ARCHITECTURES.get(config.model_type, shape.architecture),
        implementation="lean",
        text=text,
        network=Decoder(shape, weights, rotaries),
        shape=AttentionShape(shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.sliding_windows),
        adapters=AdapterStore(shape, dtype, device, rename or str),
        weights_bytes=weights.num_bytes + (encoder.num_bytes if encoder is not None else 0),
        images=encoder,
    )
