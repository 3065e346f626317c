"""End tokens and sampling defaults."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import IM_END, tiny_tokenizer
from transformers import LlamaConfig

from kvwatch_engine.contracts.errors import ModelError
from kvwatch_engine.contracts.model import SamplingDefaults
from kvwatch_engine.model.generation import eos_token_ids, read_generation_config, sampling_defaults


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": 7}, 3, (7,)),
        ({"eos_token_id": [7, 9, 7]}, 3, (7, 9)),
        ({"eos_token_id": None}, 3, (3,)),
        ({}, [4, 5], (4, 5)),
        ({}, None, ()),
        ({"eos_token_id": 0}, 3, (0,)),
    ],
)
def test_end_tokens_come_from_the_first_file_that_names_some(
    tmp_path: Path, generation: dict[str, Any], config: Any, expected: tuple[int, ...]
) -> None:
    assert eos_token_ids(tmp_path, generation, LlamaConfig(eos_token_id=config)) == expected


def test_the_tokenizer_names_the_end_token_when_no_configuration_does(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)

    assert eos_token_ids(tmp_path, {}, LlamaConfig(eos_token_id=None)) == (tokenizer.convert_tokens_to_ids(IM_END),)


def test_sampling_defaults_are_what_the_file_says_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20, "do_sample": True}))

    assert sampling_defaults(read_generation_config(tmp_path)) == SamplingDefaults(temperature=0.6, top_k=20)


def test_a_missing_generation_configuration_recommends_nothing(tmp_path: Path) -> None:
    assert sampling_defaults(read_generation_config(tmp_path)) == SamplingDefaults()


def test_values_that_are_not_numbers_are_no_recommendation() -> None:
    assert sampling_defaults({"temperature": "hot", "top_p": None, "top_k": True}) == SamplingDefaults()


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_broken_generation_configuration_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)

    with pytest.raises(ModelError, match="generation_config"):
        read_generation_config(tmp_path)
