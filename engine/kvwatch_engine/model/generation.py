"""End tokens and sampling defaults of a model folder."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedConfig

from kvwatch_engine.contracts.errors import ModelError
from kvwatch_engine.contracts.model import SamplingDefaults
from kvwatch_engine.model.sources import has_tokenizer


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Return what generation_config.json says, without the defaults that transformers would add.

    Without that file it says nothing: empty.

    Raises:
        ModelError: the file is not a JSON object.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds a {type(values).__name__} instead of an object")
    return values


_RANGES = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1.0, 2.0**31),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.1, 10.0),
}
"""What a request may ask for, and so a model may recommend."""


def sampling_defaults(generation: dict[str, Any]) -> SamplingDefaults:
    """Return the sampling parameters that a generation configuration recommends.

    Raises:
        ModelError: one is out of the range that requests may ask for.
    """
    top_k = _number(generation, "top_k")
    return SamplingDefaults(
        temperature=_number(generation, "temperature"),
        top_p=_number(generation, "top_p"),
        top_k=None if top_k is None else int(top_k),
        min_p=_number(generation, "min_p"),
        repetition_penalty=_number(generation, "repetition_penalty"),
    )


def _number(values: dict[str, Any], key: str) -> float | None:
    value = values.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    low, high = _RANGES[key]
    if not low <= value <= high:  # also what is not a number
        raise ModelError(
            f"generation_config.json: {key} is {value}, but requests may ask for {low:g} to {high:g}; correct the file"
        )
    return float(value)


def eos_token_ids(tokenizer_folder: Path, generation: dict[str, Any], config: PreTrainedConfig) -> tuple[int, ...]:
    """Return the ids that end a sequence: of the generation configuration, else the model's, else the tokenizer's.

    A file that names none says nothing; the next one is asked. No end token at all gives an empty tuple.
    """
    for value in (generation.get("eos_token_id"), getattr(config, "eos_token_id", None)):
        ids = _as_ids(value)
        if ids:
            return ids
    if not has_tokenizer(tokenizer_folder):
        return ()
    return _as_ids(AutoTokenizer.from_pretrained(tokenizer_folder, local_files_only=True).eos_token_id)


def _as_ids(value: object) -> tuple[int, ...]:
    """Return token ids from a number, a list of numbers or nothing, each once, in order."""
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(dict.fromkeys(v for v in values if isinstance(v, int) and not isinstance(v, bool)))
