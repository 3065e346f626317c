"""Reads the `adapter_config.json` of a PEFT folder: which layers an adapter changes, and how much.

What would load and then compute something else is refused by name. A key that is not known here is harmless only while
it holds nothing. Regular expressions of adapters are never run: one that never ends would stop the server. Patterns of
ranks and alphas are read as far as they are names.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvwatch_engine.contracts.errors import AdapterError

CONFIG_FILE: Final = "adapter_config.json"

_HARMLESS = frozenset(
    {
        "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "ensure_weight_tying", "eva_config",
        "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha",
        "lora_dropout", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern",
        "revision", "runtime_config", "target_modules", "task_type", "use_rslora",
    }
)  # fmt: skip
"""Keys that are read here, or that matter while an adapter is trained only."""

_HARMLESS_INITS = ("gaussian", "eva", "orthogonal")
"""Initialisations, beside the default, that leave the base model's weights alone; an adapter fits no other ones."""

_REASONS: Final = {
    "use_dora": "DoRA scales rows of the base model's weights, whose lengths are not known once these are packed",
    "modules_to_save": "layers of its own in place of the base model's (embeddings, output projection) share no batch",
    "trainable_token_indices": "embeddings of its own share no batch",
    "lora_bias": "trained biases are not computed",
    "layer_replication": "all adapters share the base model's layers as they are",
    "target_parameters": "only whole linear layers are computed with adapters",
}
"""Why what adapters may have is refused."""

_PATTERN = re.compile(r"(\^?)((?:[A-Za-z0-9_]|\\?\.)+)\$?")
"""A regular expression that says no more than a name does: `^` makes it a whole one."""
_MAX_RANK = 1 << 16
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """An adapter's configuration, as far as it matters when it is served."""

    rank: int
    alpha: float
    is_rank_stabilised: bool
    """Whether alpha is divided by the root of the rank instead of the rank."""
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: tuple[str, ...] | None
    """Ends of the names of modules that it changes; none if that is for its weights to tell."""
    exclude_modules: tuple[str, ...]
    layer_indices: frozenset[int] | None
    """Layers that it changes; none is all."""

    def rank_of(self, module: str) -> int:
        """Return the rank of a module."""
        return self.rank_pattern.get(_key(self.rank_pattern, module), self.rank)

    def scaling_of(self, module: str) -> float:
        """Return the factor on a module's product."""
        alpha = self.alpha_pattern.get(_key(self.alpha_pattern, module), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)

    def targets(self, module: str) -> bool | None:
        """Return whether it changes a module, by its full name; None if only the weights tell."""
        if any(_ends_with(module, name) for name in self.exclude_modules):
            return False
        layer = _LAYER.search(module)
        if self.layer_indices is not None and (layer is None or int(layer[1]) not in self.layer_indices):
            return False
        if self.target_modules is None:
            return None
        return any(_ends_with(module, name) for name in self.target_modules)


def parse_config(content: bytes) -> LoraConfig:
    """Read a configuration.

    Raises:
        AdapterError: it is not JSON, a value is wrong, or it asks for something that is not supported.
    """
    try:
        raw = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{CONFIG_FILE} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise AdapterError(f"{CONFIG_FILE} holds a {type(raw).__name__} instead of an object")
    _refuse_unsupported(raw)
    return LoraConfig(
        rank=_rank("r", raw.get("r", 8)),
        alpha=_number("lora_alpha", raw.get("lora_alpha", 8)),
        is_rank_stabilised=bool(raw.get("use_rslora")),
        rank_pattern={name: _rank(f"rank_pattern.{name}", value) for name, value in _pattern(raw, "rank_pattern")},
        alpha_pattern={name: _number(f"alpha_pattern.{name}", value) for name, value in _pattern(raw, "alpha_pattern")},
        target_modules=_names(raw, "target_modules"),
        exclude_modules=_names(raw, "exclude_modules") or (),
        layer_indices=_layer_indices(raw.get("layers_to_transform")),
    )


def _refuse_unsupported(raw: dict[str, object]) -> None:
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise AdapterError(f"peft_type is {_shown(kind)}; only LORA is supported")
    if raw.get("bias", "none") != "none":
        raise AdapterError(f"bias is {_shown(raw['bias'])}: trained biases are not supported; use bias none")
    init = raw.get("init_lora_weights", True)
    if not (init is None or isinstance(init, bool) or init in _HARMLESS_INITS):
        raise AdapterError(
            f"init_lora_weights is {_shown(init)}, which changes the base model's weights; save the adapter converted "
            "to a plain one"
        )
    for key, value in raw.items():
        if key not in _HARMLESS and value:
            raise AdapterError(_not_supported(key[:64]))
    if raw.get("exclude_modules") and isinstance(raw["exclude_modules"], str):
        raise AdapterError("exclude_modules is a regular expression, which is not supported; give a list of names")


def _not_supported(key: str) -> str:
    reason = _REASONS.get(key)
    if reason is None:
        return f"{key} is not supported; it must be absent or empty"
    return f"{key} is not supported: {reason}; merge the adapter into the base model, and serve that"


def _rank(key: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_RANK:
        raise AdapterError(f"{key[:128]} is {_shown(value)}; it must be a whole number from 1 on")
    return value


def _number(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e6:  # NaN is not below either
        raise AdapterError(f"{key[:128]} is {_shown(value)}; it must be a number within 1,000,000 of zero")
    return float(value)


def _names(raw: dict[str, object], key: str) -> tuple[str, ...] | None:
    """Return a list of names; None for a regular expression or `all-linear`, whose weights tell what they change."""
    value = raw.get(key)
    if value is None or isinstance(value, str):
        return None
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise AdapterError(f"{key} is no list of names")
    return tuple(value)


def _pattern(raw: dict[str, object], key: str) -> list[tuple[str, object]]:
    """Return names and values of a pattern; `^` marks a name that is a whole one. Of equal names the first counts."""
    value = raw.get(key) or {}
    if not isinstance(value, dict):
        raise AdapterError(f"{key} is {_shown(value)}; it must be an object")
    found: dict[str, object] = {}
    for pattern, each in value.items():
        match = _PATTERN.fullmatch(pattern)
        if match is None:
            raise AdapterError(
                f"{key} has the key {_shown(pattern)}: regular expressions are not supported, write names of modules"
            )
        found.setdefault(match[1] + match[2].replace("\\", ""), each)
    return list(found.items())


def _layer_indices(value: object) -> frozenset[int] | None:
    if value is None or value == []:
        return None
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(index, int) and not isinstance(index, bool) for index in values):
        raise AdapterError(f"layers_to_transform is {_shown(value)}; it must be a list of layers' numbers")
    return frozenset(values)


def _key(pattern: Mapping[str, object], module: str) -> str:
    """Return the first key of a pattern that means a module; the module's name if there is none."""
    return next((key for key in pattern if _means(key, module)), module)


def _means(key: str, module: str) -> bool:
    return module == key[1:] if key.startswith("^") else _ends_with(module, key)


def _ends_with(module: str, name: str) -> bool:
    return module == name or module.endswith(f".{name}")


def _shown(value: object) -> str:
    return repr(value)[:64]
