"""Bodies of `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, by vLLM's names."""

from typing import Literal

from msgspec import Struct


class LoadAdapterRequest(Struct, kw_only=True):
    """Asks to load an adapter."""

    lora_name: str
    lora_path: str
    """Folder beneath the server's `--lora-dir`."""
    load_inplace: bool = False
    """Take the place of an adapter of the same name."""


class UnloadAdapterRequest(Struct, kw_only=True):
    """Asks to unload an adapter."""

    lora_name: str


class AdapterUnloaded(Struct, kw_only=True):
    """Says that an adapter is not served any more."""

    id: str
    object: Literal["model"] = "model"
    deleted: Literal[True] = True
