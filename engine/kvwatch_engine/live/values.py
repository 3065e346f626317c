"""The engine's settings by the keys under which people know them. Pure."""

import difflib
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from kvwatch.control import LIVE_SETTINGS, ChangeKind, Changes, SettingKey, SettingValue, setting_of
from kvwatch.errors import ChangeRefused, ConfigError
from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.memory.sizing import parse_watermark, watermark_ratio
from kvwatch_engine.resize import with_num_blocks

_FIELDS: Final[Mapping[str, str]] = {"prefix_cache": "enable_prefix_cache"}
"""Keys whose field in `EngineSettings` has another name."""

OUTSIDE_KEYS: Final[frozenset[SettingKey]] = frozenset({"trace_ratio", "log_level"})
"""Settings of the process that the engine itself does not know."""

_OWN_KEYS: Final = tuple(key for key in LIVE_SETTINGS if key not in OUTSIDE_KEYS)


def live_values(settings: EngineSettings) -> dict[SettingKey, SettingValue]:
    """Return the value of each of the engine's own settings that can change live."""
    return {key: _value(settings, key) for key in _OWN_KEYS}


def text_of(value: SettingValue) -> str:
    """Return a value as text for events and logs."""
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_changes(changes: Changes) -> None:
    """Refuse what no engine could be given.

    Raises:
        ChangeRefused: a key is unknown, or a value is of the wrong type or out of its bounds.
    """
    for key, value in changes.items():
        setting = setting_of(key)
        if setting is None:
            raise unknown_key(key)
        problem = setting.problem(value)
        if problem:
            raise ChangeRefused(problem)


def wanted_settings(settings: EngineSettings, changes: Changes) -> EngineSettings:
    """Return the settings that hold after changes that `check_changes` allows; those of others are left out.

    Raises:
        ChangeRefused: two settings contradict each other.
    """
    known = set(_OWN_KEYS) - {"num_blocks", "watermark"}
    plain = {_FIELDS.get(key, key): value for key, value in changes.items() if key in known}
    wanted = replace(settings, **plain)  # type: ignore[arg-type]  # their types were checked
    num_blocks = changes.get("num_blocks")
    if isinstance(num_blocks, int):
        wanted = with_num_blocks(wanted, num_blocks)
    watermark = changes.get("watermark")
    if isinstance(watermark, str):
        wanted = _with_watermark(wanted, watermark)
    if wanted.max_batch_tokens < wanted.max_num_seqs:
        raise ChangeRefused(
            f"max_batch_tokens {wanted.max_batch_tokens} is less than max_num_seqs {wanted.max_num_seqs}; each running "
            "sequence needs a token a step: raise one or lower the other"
        )
    return wanted


def unknown_key(key: str) -> ChangeRefused:
    """Return the refusal of a key that names no live setting; it suggests the nearest that does."""
    near = difflib.get_close_matches(key, LIVE_SETTINGS, n=1, cutoff=0.5)
    remedy = f"did you mean {near[0]}?" if near else f"known: {', '.join(LIVE_SETTINGS)}"
    return ChangeRefused(f"setting {key} is unknown, or cannot change live; {remedy}")


def is_rebuild(key: SettingKey) -> bool:
    """Whether a setting can only change by laying the cache out anew."""
    return LIVE_SETTINGS[key].kind is ChangeKind.REBUILD


def _value(settings: EngineSettings, key: str) -> SettingValue:
    if key == "watermark":
        ratio = settings.watermark_ratio
        return str(settings.watermark_blocks) if ratio is None else str(ratio)
    value: SettingValue = getattr(settings, _FIELDS.get(key, key))
    return value


def _with_watermark(settings: EngineSettings, text: str) -> EngineSettings:
    try:
        blocks = parse_watermark(text, settings.num_blocks - 1, "watermark")
    except ConfigError as error:
        raise ChangeRefused(str(error)) from error
    return replace(settings, watermark_blocks=blocks, watermark_ratio=watermark_ratio(text))
