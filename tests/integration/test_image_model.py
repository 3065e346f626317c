"""Folders of models that take images: the names of several releases and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from image_oracle import Oracle
from safetensors.torch import load_file, save_file
from tiny_vision_model import IMAGE, NUM_IMAGE_TOKENS, make_tiny_vision_model

from kvwatch_engine.contracts.errors import ModelError
from kvwatch_engine.contracts.image import ImageInput
from kvwatch_engine.model.loader import load_model

Weights = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_vision_model(tmp_path)


def change_weights(folder: Path, change: Callable[[Weights], Weights]) -> None:
    file = folder / "model.safetensors"
    changed = {name: tensor.clone() for name, tensor in change(load_file(file)).items()}
    save_file(changed, file, {"format": "pt"})


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name, value in values.items():
        config[name] = {**config[name], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(config))


def test_a_folder_says_how_its_model_takes_images(folder: Path) -> None:
    model = load_model(str(folder), dtype="float32")

    assert model.info.architecture == "LlavaForConditionalGeneration"
    assert model.info.images == ImageInput(
        placeholder_id=512, num_tokens=NUM_IMAGE_TOKENS, pixel_shape=(3, 24, 24)
    )  # fmt: skip
    num_parameters = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    assert model.info.weights_bytes == 4 * num_parameters


def older(name: str) -> str:
    """Return a tensor's name as releases before transformers 5 wrote it."""
    return name.replace("vision_tower.", "vision_tower.vision_model.", 1)


def newer(name: str) -> str:
    """Return a tensor's name as the module tree of transformers 5 has it."""
    if name.startswith("language_model.lm_head."):
        return name.removeprefix("language_model.")
    return "model." + name.replace("language_model.model.", "language_model.", 1)


@pytest.mark.parametrize("rename", [older, newer])
def test_the_names_of_other_releases_mean_the_same_weights(folder: Path, rename: Callable[[str], str]) -> None:
    image = Oracle(folder).prompt(IMAGE, 1).images[0].image
    before = load_model(str(folder), dtype="float32")

    change_weights(folder, lambda weights: {rename(name): tensor for name, tensor in weights.items()})
    after = load_model(str(folder), dtype="float32")

    assert before.images is not None
    assert after.images is not None
    with torch.inference_mode():
        assert torch.equal(before.images.features(image), after.images.features(image))
    assert after.info.weights_bytes == before.info.weights_bytes


def without(prefix: str) -> Callable[[Weights], Weights]:
    return lambda weights: {name: tensor for name, tensor in weights.items() if not name.startswith(prefix)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("multi_modal_projector.linear_2.bias"), r"lack multi_modal_projector\.linear_2\.bias"),
        (without("vision_tower.embeddings"), r"lack vision_tower\.embeddings"),
        (lambda weights: {**weights, "vision_tower.extra": torch.zeros(1)}, r"not part of the vision tower: .*extra"),
        (lambda weights: {**weights, "extra": torch.zeros(1)}, r"are not part of .*extra"),
    ],
)
def test_weights_that_do_not_fit_are_refused(folder: Path, change: Callable[[Weights], Weights], message: str) -> None:
    change_weights(folder, change)
    with pytest.raises(ModelError, match=message):
        load_model(str(folder))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"vision_config": {"model_type": "pixtral"}},
            "vision tower of type pixtral is not supported; supported: clip",
        ),
        ({"text_config": {"model_type": "gpt2"}}, "decoder of type gpt2 is not supported; supported: llama"),
        ({"image_token_index": 520}, "image_token_index 520 is outside the vocabulary of 520"),
        (
            {"architectures": ["LlavaNextForConditionalGeneration"]},
            "LlavaNextForConditionalGeneration is not supported",
        ),
    ],
)
def test_other_kinds_of_vision_models_are_refused_with_what_is_supported(
    folder: Path, values: dict[str, Any], message: str
) -> None:
    change_config(folder, **values)
    with pytest.raises(ModelError, match=message):
        load_model(str(folder))
