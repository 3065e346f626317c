"""Reading a model's configuration: what is supported, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from kvwatch_engine.contracts.errors import ModelError
from kvwatch_engine.model.config_file import read_config
from kvwatch_engine.model.decoder_config import decoder_config

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 4}


def folder_with(tmp_path: Path, config: object) -> Path:
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "bamba", "architectures": ["BambaForCausalLM"]},
            "BambaForCausalLM is not supported: some of its layers keep a recurrent state",
        ),
        (
            {"model_type": "jamba", "architectures": ["JambaForCausalLM"]},
            "JambaForCausalLM is not supported: some of its layers keep a recurrent state, which",
        ),
        (
            {"model_type": "brand_new", "architectures": ["NewForCausalLM"], "mamba_d_state": 16},
            "NewForCausalLM is not supported: some of its layers keep a recurrent state",
        ),
        ({"model_type": "no_such_model"}, "of model type 'no_such_model' is not supported: the transformers that is"),
        ({}, "of model type None is not supported"),
        (LLAMA | {"quantization_config": {"quant_method": "gptq"}}, "quantised with 'gptq' are not supported"),
        (LLAMA | {"num_attention_heads": "many"}, "not a valid configuration"),
        ("{", "is not JSON"),
        ("[]", "holds a list instead of an object"),
    ],
)
def test_what_cannot_be_computed_is_refused_with_its_name(tmp_path: Path, config: object, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_config(folder_with(tmp_path, config))


def test_a_folder_without_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        read_config(tmp_path)


def test_other_activations_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match="activation 'gelu' is not supported; supported: silu, gelu_pytorch_tanh"):
        decoder_config(LlamaConfig(hidden_act="gelu"))


@pytest.mark.parametrize("longest", [0, 1])
def test_a_context_that_holds_no_prompt_with_an_answer_is_refused(longest: int) -> None:
    with pytest.raises(ModelError, match=f"max_position_embeddings is {longest}"):
        decoder_config(LlamaConfig(max_position_embeddings=longest))


def test_an_architecture_may_be_left_out_of_the_file(tmp_path: Path) -> None:
    config = read_config(folder_with(tmp_path, {key: LLAMA[key] for key in LLAMA if key != "architectures"}))

    assert decoder_config(config).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LlamaConfig(num_hidden_layers=2), (False, False, False, False)),
        (LlamaConfig(num_hidden_layers=2, attention_bias=True), (True, True, False, False)),
        (LlamaConfig(num_hidden_layers=2, mlp_bias=True), (False, False, True, False)),
        (MistralConfig(num_hidden_layers=2), (False, False, False, False)),
        (Qwen2Config(num_hidden_layers=2), (True, False, False, False)),
        (Qwen3Config(num_hidden_layers=2), (False, False, False, True)),
        (Qwen3Config(num_hidden_layers=2, attention_bias=True), (True, True, False, True)),
    ],
)
def test_biases_and_head_norms_follow_family_and_configuration(config: Any, expected: tuple[bool, ...]) -> None:
    shape = decoder_config(config)

    assert (shape.has_qkv_bias, shape.has_output_bias, shape.has_mlp_bias, shape.has_qk_norm) == expected


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (LlamaConfig(num_hidden_layers=2), (None, None)),
        (MistralConfig(num_hidden_layers=2), (4096, 4096)),
        (MistralConfig(num_hidden_layers=2, sliding_window=None), (None, None)),
        (Qwen2Config(num_hidden_layers=2, sliding_window=9), (None, None)),
        (
            Qwen2Config(num_hidden_layers=3, use_sliding_window=True, sliding_window=9, max_window_layers=2),
            (None, None, 9),
        ),
    ],
)
def test_sliding_windows_follow_family_and_configuration(config: Any, windows: tuple[int | None, ...]) -> None:
    assert decoder_config(config).sliding_windows == windows
