"""Loading: folders whole and sharded, names that do not exist, damaged files."""

import json
import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import ARCHITECTURES, Architecture, make_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvwatch_engine.contracts.errors import ModelError
from kvwatch_engine.contracts.model import SamplingDefaults
from kvwatch_engine.model.loader import load_model
from kvwatch_engine.model.sources import default_cache_dir, resolve_source
from kvwatch_engine.model.weights import weight_files


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(original, tmp_path / "tiny-llama"))


def change_tensor(folder: Path, name: str, change: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    if change == "drop":
        del tensors[name]
    elif change == "cut":
        tensors[name] = tensors[name][:-1].clone()
    elif change == "add":
        tensors[name] = torch.zeros(3)
    else:
        tensors[name].view(-1)[-1] += 1e-3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_folder_says_what_the_model_is(architecture: Architecture, tmp_path: Path) -> None:
    folder = make_tiny_model(architecture, tmp_path / "my-model")

    info = load_model(str(folder), dtype="float32").info

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert info.name == "my-model"
    assert info.folder == folder
    assert info.architecture.lower() == f"{architecture}forcausallm"
    assert (info.num_layers, info.num_heads, info.num_kv_heads, info.head_dim) == (3, 4, 2, 16)
    assert (info.hidden_size, info.vocab_size, info.max_position) == (64, 512, 512)
    assert info.eos_token_ids == tuple(tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))
    assert info.sampling_defaults == SamplingDefaults()
    assert (info.dtype, info.dtype_reason) == ("float32", "as requested")


def test_weights_bytes_count_every_parameter_once(original: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32)

    info = load_model(str(original), dtype="float32").info

    assert info.weights_bytes == sum(parameter.nbytes for parameter in reference.parameters())


def test_bfloat16_halves_the_weights(original: Path) -> None:
    whole = load_model(str(original), dtype="float32").info.weights_bytes

    assert 2 * load_model(str(original), dtype="bfloat16").info.weights_bytes == whole


def test_the_served_name_replaces_the_folders_name(original: Path) -> None:
    assert load_model(str(original), served_name="assistant").info.name == "assistant"


def test_the_cache_spec_has_the_models_shape(original: Path) -> None:
    spec = load_model(str(original), dtype="bfloat16").cache_spec(8)

    assert (spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.block_size) == (3, 2, 16, 8)
    assert spec.dtype == "bfloat16"


def test_sharded_folders_load_the_same_weights(original: Path, tmp_path: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32)
    reference.save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(weight_files(tmp_path)) > 2

    whole, sharded = load_model(str(original), dtype="float32"), load_model(str(tmp_path), dtype="float32")

    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert torch.equal(whole.decoder.logits(hidden), sharded.decoder.logits(hidden))
    assert sharded.info.weights_bytes == whole.info.weights_bytes


def test_the_fingerprint_is_the_same_for_a_copy_and_changes_with_a_single_value(original: Path, folder: Path) -> None:
    fingerprint = load_model(str(original)).info.weights_fingerprint

    assert load_model(str(folder)).info.weights_fingerprint == fingerprint
    change_tensor(folder, "model.layers.1.mlp.down_proj.weight", "touch")
    assert load_model(str(folder)).info.weights_fingerprint != fingerprint


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model.layers.1.mlp.up_proj.weight", "drop", r"lack model\.layers\.1\.mlp\.up_proj\.weight"),
        ("model.norm.weight", "cut", r"norm\.weight has shape \(63,\), but the configuration asks for \(64,\)"),
        ("model.layers.0.self_attn.q_proj.bias", "add", "1 weights are not part of LlamaForCausalLM: model.layers.0"),
    ],
)
def test_weights_that_do_not_fit_the_configuration_are_refused(
    folder: Path, name: str, change: str, message: str
) -> None:
    change_tensor(folder, name, change)

    with pytest.raises(ModelError, match=message):
        load_model(str(folder))


def test_tables_that_old_checkpoints_carry_are_ignored(folder: Path) -> None:
    change_tensor(folder, "model.layers.0.self_attn.rotary_emb.inv_freq", "add")

    assert load_model(str(folder)).info.num_layers == 3


def test_a_truncated_weight_file_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])

    with pytest.raises(ModelError, match=r"model\.safetensors is not a readable safetensors file"):
        load_model(str(folder))


def test_a_folder_without_safetensors_is_refused_with_the_remedy(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")

    with pytest.raises(ModelError, match=r"lacks model\.safetensors; only safetensors weights"):
        load_model(str(folder))


@pytest.mark.parametrize("index", ["{", "{}", '{"weight_map": []}'])
def test_a_broken_index_of_shards_is_refused(folder: Path, index: str) -> None:
    (folder / "model.safetensors.index.json").write_text(index)

    with pytest.raises(ModelError, match="not a valid index"):
        load_model(str(folder))


def test_a_missing_shard_is_named(folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(ModelError, match=r"lacks model-00002-of-00002\.safetensors"):
        load_model(str(folder))


def test_an_index_cannot_name_files_outside_of_the_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.safetensors").write_bytes(b"")
    index = {"weight_map": {"a": "../secret.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(ModelError, match=r"lacks secret\.safetensors"):
        load_model(str(folder))


@pytest.mark.parametrize("source", ["./no/such/folder", "/no/such/model.gguf", "missing.gguf", "a b", "", "a/b/c"])
def test_names_that_mean_nothing_are_refused_with_the_choices(source: str) -> None:
    with pytest.raises(ModelError, match="does not exist: give a folder"):
        resolve_source(source)


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")

    with pytest.raises(ModelError, match=r"give a Hugging Face folder or a \.gguf file"):
        resolve_source(str(tmp_path / "model.bin"))


def test_hub_names_fail_cleanly_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    with pytest.raises(ModelError, match=r"nor could it be downloaded .* give a local folder"):
        resolve_source("no-such-owner/no-such-model")


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVWATCH_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/shared")
    assert default_cache_dir() == Path("/shared/kvwatch")
    monkeypatch.setenv("KVWATCH_CACHE_DIR", "/own")
    assert default_cache_dir() == Path("/own")
    monkeypatch.delenv("KVWATCH_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "kvwatch"
