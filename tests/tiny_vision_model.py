"""A tiny random LLaVA: transformers' CLIP vision tower and projector before a Llama decoder, with a real processor.

Its chat template writes the parts of a message in their order, so that text may stand before, between and after images.
"""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tiny_models import END_OF_TEXT, IM_END, VOCAB_SIZE, tiny_tokenizer, with_random_weights
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoTokenizer,
    CLIPImageProcessorPil,
    GenerationConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    SiglipImageProcessorPil,
)

IMAGE = "<image>"
IMAGE_SIZE, PATCH_SIZE = 24, 8
NUM_IMAGE_TOKENS = (IMAGE_SIZE // PATCH_SIZE) ** 2

Changes = dict[str, Any]

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


def random_vision_model(
    *, seed: int = 0, vision: Changes | None = None, text: Changes | None = None, **config: Any
) -> PreTrainedModel:
    """Return a random LLaVA in float32.

    Args:
        seed: of the weights.
        vision: overrides of the vision tower's configuration, `model_type` included.
        text: likewise of the decoder's.
        **config: likewise of the whole model's.
    """
    text_config = AutoConfig.for_model(**{
        "model_type": "llama", "vocab_size": VOCAB_SIZE + 8, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "tie_word_embeddings": False, **(text or {}),
    })  # fmt: skip
    vision_config = AutoConfig.for_model(**{
        "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 2, "image_size": IMAGE_SIZE, "patch_size": PATCH_SIZE, **(vision or {}),
    })  # fmt: skip
    placeholder = vision_tokenizer().convert_tokens_to_ids(IMAGE)
    whole = LlavaConfig(
        vision_config=vision_config, text_config=text_config, **{"image_token_index": placeholder, **config}
    )
    return with_random_weights(lambda: LlavaForConditionalGeneration(whole), seed)


def make_tiny_vision_model(folder: Path, *, chat_template: str = CHAT_TEMPLATE, **config: Any) -> Path:
    """Save a random LLaVA, see `random_vision_model`, with tokenizer and processor as a folder; return the folder."""
    model = random_vision_model(**config)
    tokenizer = vision_tokenizer(chat_template)
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.convert_tokens_to_ids(IM_END), tokenizer.convert_tokens_to_ids(END_OF_TEXT)],
    )
    model.save_pretrained(folder)
    square = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    has_class_token = model.config.vision_config.model_type == "clip_vision_model"
    image_processor = (
        CLIPImageProcessorPil(size={"shortest_edge": IMAGE_SIZE}, crop_size=square)
        if has_class_token
        else SiglipImageProcessorPil(size=square)
    )
    LlavaProcessor(
        image_processor=image_processor, tokenizer=tokenizer, patch_size=PATCH_SIZE,
        vision_feature_select_strategy=model.config.vision_feature_select_strategy,
        num_additional_image_tokens=int(has_class_token), image_token=IMAGE, chat_template=chat_template,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def load_processor(folder: Path) -> LlavaProcessor:
    """Return transformers' own processor of a folder, without torchvision."""
    values = json.loads((folder / "processor_config.json").read_text())
    names = ("patch_size", "vision_feature_select_strategy", "num_additional_image_tokens", "image_token")
    return LlavaProcessor(
        image_processor=AutoImageProcessor.from_pretrained(folder, backend="pil"),
        tokenizer=AutoTokenizer.from_pretrained(folder),
        **{name: values[name] for name in names},
    )


def picture(seed: int, width: int = 40, height: int = 32) -> Image.Image:
    """Return an RGB image of coloured noise; the same seed gives the same one."""
    generator = torch.Generator().manual_seed(seed)
    small = torch.randint(0, 256, (height // 4, width // 4, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(small.numpy()).resize((width, height), Image.Resampling.BICUBIC)
