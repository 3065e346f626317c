"""A tiny random LLaVA: transformers' CLIP vision tower and projector before a Llama decoder, with a real processor.

Its chat template writes the parts of a message in their order, so that text may stand before, between and after images.
"""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tiny_models import END_OF_TEXT, IM_END, VOCAB_SIZE, tiny_tokenizer, with_random_weights
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

IMAGE = "<image>"
IMAGE_SIZE, PATCH_SIZE = 24, 8
NUM_IMAGE_TOKENS = (IMAGE_SIZE // PATCH_SIZE) ** 2

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def vision_tokenizer(chat_template: str = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """Return the tiny tokenizer with a placeholder for images."""
    tokenizer = deepcopy(tiny_tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    tokenizer.chat_template = chat_template
    return tokenizer


def random_vision_model(*, seed: int = 0, vision: dict[str, Any] | None = None, **config: Any) -> PreTrainedModel:
    """Return a random LLaVA in float32; `vision` and `config` override its configuration, by transformers' names."""
    text_config = LlamaConfig(
        vocab_size=VOCAB_SIZE + 8, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    vision_config = CLIPVisionConfig(**{
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
        "image_size": IMAGE_SIZE, "patch_size": PATCH_SIZE, "projection_dim": 16, **(vision or {}),
    })  # fmt: skip
    placeholder = vision_tokenizer().convert_tokens_to_ids(IMAGE)
    whole = LlavaConfig(
        **{"vision_config": vision_config, "text_config": text_config, "image_token_index": placeholder, **config}
    )
    return with_random_weights(lambda: LlavaForConditionalGeneration(whole), seed)


def make_tiny_vision_model(
    folder: Path, *, seed: int = 0, chat_template: str = CHAT_TEMPLATE, vision: dict[str, Any] | None = None,
    **config: Any,
) -> Path:  # fmt: skip
    """Save a random LLaVA with tokenizer and image processor as a Hugging Face folder; return the folder."""
    model = random_vision_model(seed=seed, vision=vision, **config)
    tokenizer = vision_tokenizer(chat_template)
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.convert_tokens_to_ids(IM_END), tokenizer.convert_tokens_to_ids(END_OF_TEXT)],
    )
    model.save_pretrained(folder)
    image_processor = CLIPImageProcessorPil(
        size={"shortest_edge": IMAGE_SIZE}, crop_size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    )
    LlavaProcessor(
        image_processor=image_processor, tokenizer=tokenizer, patch_size=PATCH_SIZE,
        vision_feature_select_strategy="default", num_additional_image_tokens=1, image_token=IMAGE,
        chat_template=chat_template,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def load_processor(folder: Path) -> LlavaProcessor:
    """Return transformers' own processor of a folder, without torchvision."""
    return LlavaProcessor(
        image_processor=AutoImageProcessor.from_pretrained(folder, backend="pil"),
        tokenizer=AutoTokenizer.from_pretrained(folder), patch_size=PATCH_SIZE,
        vision_feature_select_strategy="default", num_additional_image_tokens=1, image_token=IMAGE,
    )  # fmt: skip


def picture(seed: int, width: int = 40, height: int = 32) -> Image.Image:
    """Return an RGB image of coloured noise; the same seed gives the same one."""
    generator = torch.Generator().manual_seed(seed)
    small = torch.randint(0, 256, (height // 4, width // 4, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(small.numpy()).resize((width, height), Image.Resampling.BICUBIC)
