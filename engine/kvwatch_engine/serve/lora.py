"""Reads what was set about LoRA adapters: part of the composition root of `kvwatch serve`."""

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvwatch.errors import ConfigError
from kvwatch.exporters.prometheus.settings import MAX_NAMES
from kvwatch_engine.contracts.adapter import check_adapter_name
from kvwatch_engine.contracts.errors import AdapterError
from kvwatch_engine.serve.settings import ServeSettings

if TYPE_CHECKING:
    from kvwatch_engine.model.adapters import AdapterStore
    from kvwatch_engine.server.adapters import AdapterOptions

Loras = tuple[tuple[str, Path], ...]
"""Names and folders of adapters."""


def lora_settings(settings: ServeSettings) -> Loras:
    """Read the adapters that are served from the start on, before a model is loaded for them.

    Raises:
        ConfigError: one is malformed or named twice, there are too many, or a folder is not there.
    """
    found: dict[str, Path] = {}
    for text in settings.lora:
        name, equals, folder = text.partition("=")
        if not equals or not folder:
            raise ConfigError(f"--lora {text!r} is not NAME=DIR; name the adapter and its folder")
        try:
            check_adapter_name(name)
        except AdapterError as error:
            raise ConfigError(f"--lora: {error}") from error
        if name in found:
            raise ConfigError(f"--lora: {name!r} is given twice; choose another name for one of the folders")
        found[name] = _folder(folder, "--lora")
    if len(found) > settings.max_loras:
        raise ConfigError(f"--lora: {len(found)} adapters, but --max-loras is {settings.max_loras}; raise it")
    if settings.lora_dir is not None:
        _folder(settings.lora_dir, "--lora-dir")
    return tuple(found.items())


def allowing_series(settings: ServeSettings, loras: Loras) -> ServeSettings:
    """Return settings by which these adapters have series of their own, as far as there is room for more names."""
    names = [name.strip() for name in (settings.metrics_loras or "").split(",") if name.strip()]
    more = [name for name, _ in loras if name not in names][: max(0, MAX_NAMES - len(names))]
    return msgspec.structs.replace(settings, metrics_loras=",".join(names + more)) if more else settings


def adapter_options(settings: ServeSettings, loras: Loras, store: "AdapterStore") -> "AdapterOptions":
    """Return what the server may load into a model's store, whose limit is set here."""
    from kvwatch_engine.server.adapters import AdapterOptions

    store.max_rank = settings.max_lora_rank
    folder = None if settings.lora_dir is None else _folder(settings.lora_dir, "--lora-dir")
    return AdapterOptions(memory=store, max_adapters=settings.max_loras, at_start=loras, folder=folder)


def _folder(text: str, flag: str) -> Path:
    try:
        folder = Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{flag}: the ~ of {text!r} names nobody here; write the folder in full") from error
    if not folder.is_dir():
        raise ConfigError(f"{flag}: {text!r} is no folder; give one that exists")
    return folder
