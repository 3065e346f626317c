"""Checkpoints in other dtypes, in shards and as GGUF files of several quantisations load as what they are."""

from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest
import torch
from grouped_models import Reference
from model_families import family
from model_trial import engine_for, prompts
from safetensors.torch import load_file
from tiny_gguf import make_tiny_gguf
from tiny_models import make_tiny_model
from transformers import AutoModelForCausalLM

from kvwatch_engine.contracts.errors import ModelError
from kvwatch_engine.contracts.model import TextSource
from kvwatch_engine.model.gguf_conversion import convert_gguf
from kvwatch_engine.model.loader import load_model
from kvwatch_engine.model.weights import weight_files

QUANTISATIONS = {"F16": 0.001, "BF16": 0.01, "Q8_0": 0.02, "Q5_1": 0.1, "Q5_0": 0.1, "Q4_1": 0.15, "Q4_0": 0.2}
QUANTISATIONS |= dict.fromkeys(("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"), 0.005)
"""Type of the file -> most that a weight may be off, as a part of the largest of its tensor. Of the later ones the
blocks are given, and only what is converted is rounded, to bfloat16."""


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", QUANTISATIONS)
def test_gguf_files_of_every_common_quantisation_are_converted_and_served(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"tiny.{kind}.gguf"
    original = make_tiny_gguf(path, kind=gguf.GGMLQuantizationType[kind])

    folder = convert_gguf(path, tmp_path / "models")

    tensors = load_file(folder / "model.safetensors")
    parameters = dict(original.named_parameters())
    assert tensors.keys() == parameters.keys()
    for name, tensor in tensors.items():
        expected = parameters[name].detach()
        assert float((tensor.float() - expected).abs().max()) <= QUANTISATIONS[kind] * float(expected.abs().max()), name
    model = load_model(str(path), dtype="float32", cache_dir=tmp_path)
    assert model.info.folder == folder
    reference, asked = Reference.load(folder), prompts()[:2]
    for prompt, (answer,) in zip(asked, engine_for(model).run(asked, 8), strict=True):
        reference.check(prompt, answer, reference.answer(prompt, 8))
    assert reference.num_excused <= 1


@pytest.mark.parametrize("title", ["Llama", "Gemma 2"])
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_half_checkpoints_in_shards_compute_as_transformers_does(
    title: str, stored: torch.dtype, tmp_path: Path
) -> None:
    folder = family(title).make(tmp_path / "whole")
    AutoModelForCausalLM.from_pretrained(folder, dtype=stored).save_pretrained(folder, max_shard_size="40KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    assert len(weight_files(folder)) > 2

    model = load_model(str(folder), dtype="float32")

    reference, asked = Reference.load(folder), prompts()
    for prompt, (answer,) in zip(asked, engine_for(model).run(asked, 8), strict=True):
        reference.check(prompt, answer, reference.answer(prompt, 8))
    assert reference.num_excused <= 1


@pytest.mark.parametrize("dtype", ["float16", "int8", ""])
def test_dtypes_that_are_not_computed_in_are_refused(dtype: str, tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path)

    with pytest.raises(ModelError, match=f"dtype '{dtype}' is not supported; use auto, float32, bfloat16"):
        load_model(str(folder), dtype=dtype)


def test_a_missing_shard_of_the_general_path_is_named(tmp_path: Path) -> None:
    folder = family("Gemma 2").make(tmp_path / "whole")
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="100KB")
    gone = sorted(folder.glob("model-*.safetensors"))[1]
    gone.unlink()

    with pytest.raises(ModelError, match=rf"lacks {gone.name}"):
        load_model(str(folder))


def test_end_tokens_come_from_the_given_tokenizer_where_the_model_names_none(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "model", eos_token_id=None)
    (folder / "generation_config.json").unlink()
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for path in folder.glob("tokenizer*"):
        path.rename(tokenizer / path.name)

    assert load_model(str(folder)).info.eos_token_ids == ()
    assert load_model(str(folder), texts=TextSource(tokenizer)).info.eos_token_ids == (2,)
