"""Tiny random models with a small real tokenizer, on which everything up to the whole server can run in tests.

The weights are random but not degenerate: biases and norm weights, which transformers initialises to zeros and ones,
are random too, so that a decoder which forgot one of them fails.
"""

import json
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvwatch_engine.model.sources import default_cache_dir, resolve_source

Architecture = Literal["llama", "mistral", "qwen2", "qwen3", "gemma3"]
ARCHITECTURES: tuple[Architecture, ...] = ("llama", "mistral", "qwen2", "qwen3", "gemma3")

VOCAB_SIZE = 512
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

_CLASSES: dict[Architecture, tuple[type[Any], type[Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
}

_OWN_SHAPES: dict[Architecture, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},
    # Two layers with a window to one without: groups of one layer each. Positions turn differently in both kinds.
    "gemma3": {
        "head_dim": 16,
        "query_pre_attn_scalar": 11,
        "tie_word_embeddings": True,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
        },
    },
}

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}

_TEXT = """
A block holds the keys and values of a few tokens, and a table says which blocks a sequence uses. When two sequences
begin with the same words, they share the blocks of those words; before one of them writes, it gets a copy of its own.
The scheduler chooses what runs next: short steps for many readers, long prompts cut into chunks, nobody forgotten.
If memory runs out, somebody has to wait. Was passiert um 14:02 Uhr? Warum wurde die Antwort langsam? Größe, Straße,
naïve café, señor, 東京は今日も晴れです。 Привет, мир! def step(queue): return [run(item) for item in queue if item > 0]
print("hello, world"); x = {"a": 1, "b": [2, 3]}; assert x["b"][0] == 2  # 🙂
"""

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_tiny_model(architecture: Architecture, folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Save a random model with its tokenizer as a Hugging Face folder.

    Args:
        architecture: family of the model.
        folder: where to save it; created if it does not exist.
        seed: of the weights; the same seed gives the same model.
        **config: overrides of the configuration, by transformers' names.

    Returns:
        The folder.
    """
    model = random_model(architecture, seed=seed, **config)
    tokenizer = tiny_tokenizer()
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.convert_tokens_to_ids(IM_END), tokenizer.convert_tokens_to_ids(END_OF_TEXT)],
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def random_model(architecture: Architecture, *, seed: int = 0, **config: Any) -> PreTrainedModel:
    """Return a random model of transformers in float32, in evaluation mode, whose every parameter matters."""
    config_class, model_class = _CLASSES[architecture]
    shape = _SHAPE | _OWN_SHAPES.get(architecture, {}) | config
    return with_random_weights(
        lambda: model_class(config_class(**shape)), seed, norm_mean=0.0 if architecture == "gemma3" else 1.0
    )


def with_random_weights(make: Callable[[], PreTrainedModel], seed: int, *, norm_mean: float = 1.0) -> PreTrainedModel:
    """Return a model in evaluation mode, its weights drawn anew; the same seed gives the same ones.

    `norm_mean` is 0 for Gemma, whose norm weights are added to 1.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make().eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Wide enough that attention is not uniform and that the best two logits differ clearly.
                mean = norm_mean if "norm" in name or ".ln_" in name else 0.0
                fan_in = parameter[0].numel()
                parameter.normal_(mean, 0.3 if parameter.dim() == 1 else fan_in**-0.5 * 1.5)
    return model


@cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer trained on a few sentences: any text, at most 512 ids, ChatML template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


@cache
def embedded_model_folder() -> Path:
    """Return the converted folder of the embedded model; converts it if no earlier run did (some 20 s)."""
    return resolve_source("embedded", default_cache_dir()).folder


SHALLOW_LAYERS = (0, 1, 2, 3, 28, 29)
"""The embedded model's first and last layers. In between it learnt to make sense, and so to repeat itself."""


def make_shallow_model(folder: Path) -> Path:
    """Write a model of a few of the embedded one's layers, with its tokenizer; return the folder.

    It computes five times as fast. Its greedy texts are nonsense that never repeats itself: each token hangs on all
    before it, so that they show a wrong K/V sooner than the whole model's, which says one word again and again when it
    is asked random ones.
    """
    source = embedded_model_folder()
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": len(SHALLOW_LAYERS)}))
    kept = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        match = re.fullmatch(r"(model\.layers\.)(\d+)(\..+)", name)
        if match is None:
            kept[name] = tensor
        elif int(match[2]) in SHALLOW_LAYERS:
            kept[f"{match[1]}{SHALLOW_LAYERS.index(int(match[2]))}{match[3]}"] = tensor
    save_file(kept, folder / "model.safetensors")
    return folder
