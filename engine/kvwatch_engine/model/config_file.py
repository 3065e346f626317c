"""Reads a model folder's configuration, and refuses what no path can compute."""

import json
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from kvwatch_engine.contracts.errors import ModelError

STATE_SPACE_TYPES = frozenset(
    {
        "bamba",
        "falcon_h1",
        "falcon_mamba",
        "granitemoehybrid",
        "jamba",
        "lfm2",
        "mamba",
        "mamba2",
        "minimax",
        "nemotron_h",
        "qwen3_next",
        "recurrent_gemma",
        "rwkv",
        "zamba",
        "zamba2",
    }
)
"""transformers' types of models with layers that keep a state."""

_STATE_SPACE_KEYS = ("mamba_", "ssm_", "linear_conv_", "conv_L_cache", "hybrid_override_pattern")
"""What keys of other such configurations begin with."""


def read_config(folder: Path) -> PreTrainedConfig:
    """Read a model folder's configuration.

    Raises:
        ModelError: there is none, it cannot be read, or it is of a kind that is not supported.
    """
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelError(f"{folder} has no config.json; give a Hugging Face model folder") from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path} holds a {type(raw).__name__} instead of an object")
    _check_supported(raw)
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds, and all mean the same to a user
        raise ModelError(f"{path} is not a valid configuration: {error}") from error


def architecture_name(architectures: list[str] | None, model_type: object) -> str:
    """Return how messages name an architecture; some configurations give their model type only."""
    return architectures[0] if architectures else f"of model type {model_type!r}"


def stateful_error(name: str) -> ModelError:
    """Return the refusal of an architecture whose layers keep a state."""
    return ModelError(
        f"architecture {name} is not supported: some of its layers keep a recurrent state, which is no sequence of "
        "keys and values and does not fit the blocks of a KV cache; serve a model with attention in every layer"
    )


def _check_supported(raw: dict[str, Any]) -> None:
    """Refuse what transformers does not know, or what would load and then compute something else.

    Raises:
        ModelError: says what is not supported.
    """
    model_type = raw.get("model_type")
    name = architecture_name(raw.get("architectures"), model_type)
    if model_type in STATE_SPACE_TYPES or any(key.startswith(_STATE_SPACE_KEYS) for key in raw):
        raise stateful_error(name)
    if model_type not in CONFIG_MAPPING:
        raise ModelError(
            f"architecture {name} is not supported: the transformers that is installed does not know it, and code that "
            "comes with a model is never run"
        )
    quantization = raw.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else "unknown"
        raise ModelError(f"weights quantised with {method!r} are not supported; use plain weights or a GGUF file")
