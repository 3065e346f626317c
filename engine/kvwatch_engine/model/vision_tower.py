"""The vision part of a LLaVA model: transformers' own vision tower and projector, with the weights of a folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, PreTrainedConfig
from transformers.initialization import no_init_weights
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

from kvwatch_engine.contracts.errors import ModelError
from kvwatch_engine.contracts.image import ImageInput
from kvwatch_engine.model.llava import PROJECTOR, TOWER, vision_name
from kvwatch_engine.model.weights import TensorFiles

_COMPUTED_SUFFIX = "position_ids"
"""Old checkpoints carry tables that are computed from the configuration."""


class VisionTower:
    """Turns one prepared image into what the decoder takes in place of its placeholder tokens."""

    def __init__(self, config: PreTrainedConfig, tower: Any, projector: Any) -> None:
        """Put the parts together.

        Args:
            config: of the whole model.
            tower: transformers' vision model, with its weights.
            projector: transformers' projector, with its weights.
        """
        layers = config.vision_feature_layer
        self._layers: list[int] = [layers] if isinstance(layers, int) else list(layers)
        self._num_skipped = int(config.vision_feature_select_strategy == "default")  # the class token
        self._tower = tower
        self._projector = projector
        self._parameters = [*tower.parameters(), *projector.parameters()]
        vision = config.vision_config
        self.input = ImageInput(
            placeholder_id=int(config.image_token_id),
            num_tokens=int(tower.embeddings.num_positions) - self._num_skipped,
            pixel_shape=(int(vision.num_channels), int(vision.image_size), int(vision.image_size)),
        )

    @property
    def num_bytes(self) -> int:
        """Memory that its weights take."""
        return sum(parameter.nbytes for parameter in self._parameters)

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the features of one image.

        Always alone: in a batch the last bits would depend on the other images, and so would the K/V that others share.

        Args:
            pixels: f32[channels, height, width], on any device.

        Returns:
            `dtype[num_tokens, hidden_size]` of the decoder.
        """
        weight = self._parameters[0]
        batch = pixels.to(weight.device, weight.dtype)[None]
        hidden = self._tower(pixel_values=batch, output_hidden_states=True).hidden_states
        chosen = torch.cat([hidden[layer][:, self._num_skipped :] for layer in self._layers], dim=-1)
        features: torch.Tensor = self._projector(chosen)[0]
        assert len(features) == self.input.num_tokens, f"{len(features)} features, {self.input.num_tokens} placeholders"
        return features


def load_vision_tower(
    files: Sequence[Path], config: PreTrainedConfig, dtype: torch.dtype, device: torch.device
) -> VisionTower:
    """Load the vision part of a model.

    Args:
        files: the whole model's, see `weight_files`.
        config: of the whole model.
        dtype: float32 or bfloat16, to compute in.
        device: to compute on.

    Raises:
        ModelError: tensors are missing, of the wrong shape, or left over.
    """
    with no_init_weights():
        tower = AutoModel.from_config(config.vision_config, dtype=dtype).eval().requires_grad_(requires_grad=False)
        projector = LlavaMultiModalProjector(config).to(dtype).eval().requires_grad_(requires_grad=False)
    with TensorFiles(files, torch.device("cpu"), vision_name) as tensors:
        for prefix, module in ((TOWER, tower), (PROJECTOR, projector)):
            for name, parameter in module.named_parameters():
                stored = vision_name(prefix + name)
                assert stored is not None, "it has the prefix of a vision part"
                parameter.copy_(tensors.take(stored, tuple(parameter.shape)))
        left = [name for name in tensors.remaining if not name.endswith(_COMPUTED_SUFFIX)]
    if left:
        raise ModelError(f"{len(left)} weights are not part of the vision tower: {', '.join(left[:5])}")
    return VisionTower(config, tower.to(device), projector.to(device))
