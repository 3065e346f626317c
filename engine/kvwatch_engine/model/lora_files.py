"""From the files of a PEFT folder to an adapter's weights, every tensor checked before any of them is used.

    adapter_config.json         see `lora_config.py`
    adapter_model.safetensors   base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight ...

Files are read whole and once, up to a bound that the model's shape and the rank limit give: one that changes while it
is mapped would bring the process down. Nothing is ever unpickled. Messages name files, never the folder.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from kvwatch_engine.contracts.errors import AdapterError
from kvwatch_engine.model.decoder import LinearName
from kvwatch_engine.model.decoder_config import DecoderConfig
from kvwatch_engine.model.lora import LoraLinear, LoraModule, LoraWeights, Projection, projections
from kvwatch_engine.model.lora_config import CONFIG_FILE, LoraConfig, parse_config

WEIGHTS_FILE: Final = "adapter_model.safetensors"

_MAX_CONFIG_BYTES = 1 << 20
_MAX_HEADER_BYTES = 16 << 20
_FILE_DTYPE_BYTES = 4
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<matrix>[AB])\.weight")


@dataclass(frozen=True, slots=True)
class LoraTarget:
    """What adapters have to fit."""

    config: DecoderConfig
    dtype: torch.dtype
    device: torch.device
    max_rank: int
    decoder_name: Callable[[str], str | None] = str
    """Gives a module's name in a decoder of its own; None if it is part of something else. For most models the same."""

    @property
    def max_file_bytes(self) -> int:
        """Bytes of the largest file of weights that can be right."""
        features = sum(each.in_features + each.out_features for each in projections(self.config))
        return self.config.num_layers * features * self.max_rank * _FILE_DTYPE_BYTES + _MAX_HEADER_BYTES


def read_adapter(folder: Path, target: LoraTarget) -> LoraWeights:
    """Read an adapter.

    Raises:
        AdapterError: a file is missing, damaged or too large; a tensor is missing, left over, of the wrong shape or
            dtype, or holds what is no number; or it asks for something that is not supported.
    """
    described = _read(folder, CONFIG_FILE, _MAX_CONFIG_BYTES)
    config = parse_config(described)
    if (highest := max([config.rank, *config.rank_pattern.values()])) > target.max_rank:
        raise AdapterError(f"its rank is {highest}, but the limit is {target.max_rank}; raise --max-lora-rank")
    content = _read(folder, WEIGHTS_FILE, target.max_file_bytes)
    try:
        tensors = load(content)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise AdapterError(f"{WEIGHTS_FILE} is not a readable safetensors file: {error}") from error
    fingerprint = sha256(sha256(described).digest() + sha256(content).digest()).hexdigest()
    return _Assembly(config, target, _by_module(tensors, target)).weights(fingerprint)


def _read(folder: Path, name: str, limit: int) -> bytes:
    """Return a file's content.

    Raises:
        AdapterError: it is missing, no regular file, unreadable, or longer than `limit` bytes.
    """
    path = folder / name
    try:
        if not path.is_file():  # a pipe would never end
            raise AdapterError(_missing(folder, name))
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise AdapterError(f"{name} cannot be read ({error.strerror})") from error
    if len(content) > limit:
        raise AdapterError(f"{name} is longer than {limit} bytes, more than an adapter of this model can have")
    return content


def _missing(folder: Path, name: str) -> str:
    if name == WEIGHTS_FILE and (folder / "adapter_model.bin").is_file():
        return "adapter_model.bin is a pickle, which is never loaded; save the adapter as safetensors"
    return f"the adapter has no {name}; give a folder that PEFT's save_pretrained wrote"


@dataclass(frozen=True, slots=True)
class _Module:
    """What the file has of one module."""

    name: str
    """As the adapter calls it."""
    matrices: dict[str, torch.Tensor]
    """By `A` and `B`."""


def _by_module(tensors: Mapping[str, torch.Tensor], target: LoraTarget) -> dict[str, _Module]:
    """Return the modules by their names in the decoder; those that are not of it keep their own.

    Raises:
        AdapterError: a tensor is neither A nor B of a module, or two names mean one module.
    """
    found: dict[str, _Module] = {}
    others = []
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            others.append(name)
            continue
        module, matrix = match["module"], match["matrix"]
        entry = found.setdefault(target.decoder_name(module) or module, _Module(module, {}))
        if entry.name != module:
            raise AdapterError(f"{entry.name[:128]} and {module[:128]} are the same module of this model")
        entry.matrices[matrix] = tensor
    if others:
        raise AdapterError(
            f"{len(others)} tensors are no LoRA matrices of linear layers, and nothing else is supported: "
            f"{_some(others)}"
        )
    return found


class _Assembly:
    """Puts the matrices of modules where the fused layers want them."""

    def __init__(self, config: LoraConfig, target: LoraTarget, modules: Mapping[str, _Module]) -> None:
        self._config = config
        self._target = target
        self._modules = dict(modules)
        self._rank = 0

    def weights(self, fingerprint: str) -> LoraWeights:
        layers = tuple(self._layer(index) for index in range(self._target.config.num_layers))
        if self._modules:
            known = ", ".join(each.module for each in projections(self._target.config))
            raise AdapterError(
                f"{len(self._modules)} modules are not of this model, or not supported: {_some(self._modules)}; "
                f"an adapter may change {known} of {self._target.config.num_layers} layers"
            )
        num_bytes = sum(linear.num_bytes for layer in layers for linear in layer.values())
        if not num_bytes:
            raise AdapterError("it changes no layer at all")
        return LoraWeights(layers, num_bytes, self._rank, fingerprint)

    def _layer(self, index: int) -> dict[LinearName, LoraLinear]:
        fused: dict[LinearName, list[LoraModule]] = {}
        for projection in projections(self._target.config):
            module = self._module(f"model.layers.{index}.{projection.module}", projection)
            if module is not None:
                fused.setdefault(projection.fused, []).append(module)
        return {name: LoraLinear(modules) for name, modules in fused.items()}

    def _module(self, name: str, projection: Projection) -> LoraModule | None:
        found = self._modules.pop(name, None)
        if found is None:
            if self._config.targets(name):
                raise AdapterError(f"{name} is among its target_modules, but {WEIGHTS_FILE} has no matrices for it")
            return None
        # Its configuration knows it by the adapter's name.
        if self._config.targets(found.name) is False:
            raise AdapterError(f"{WEIGHTS_FILE} has matrices for {name}, which is not among its target_modules")
        rank = self._config.rank_of(found.name)
        self._rank = max(self._rank, rank)
        a = self._matrix(found, "A", (rank, projection.in_features))
        b = self._matrix(found, "B", (projection.out_features, rank)).float() * self._config.scaling_of(found.name)
        return LoraModule(projection, self._kept(f"{name}.lora_A", a), self._kept(f"{name}.lora_B", b))

    def _matrix(self, module: _Module, which: str, shape: tuple[int, int]) -> torch.Tensor:
        tensor, name = module.matrices.get(which), f"{module.name}.lora_{which}"
        if tensor is None:
            raise AdapterError(f"{WEIGHTS_FILE} lacks {name}")
        if tuple(tensor.shape) != shape:
            raise AdapterError(f"{name} has shape {tuple(tensor.shape)}, but model and configuration ask for {shape}")
        if tensor.dtype not in _DTYPES:
            raise AdapterError(f"{name} is of {tensor.dtype}; supported: {', '.join(map(str, _DTYPES))}")
        return tensor

    def _kept(self, name: str, matrix: torch.Tensor) -> torch.Tensor:
        kept = matrix.to(self._target.device, self._target.dtype, copy=True)
        if not bool(torch.isfinite(kept).all()):
            raise AdapterError(f"{name} holds values that are no finite numbers in {self._target.dtype}")
        return kept


def _some(names: Mapping[str, object] | list[str]) -> str:
    shown = sorted(name[:128] for name in names)[:3]
    return ", ".join(shown) + (", ..." if len(names) > len(shown) else "")
