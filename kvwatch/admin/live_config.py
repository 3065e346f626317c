"""The configuration as the API shows it: live and declared values, their sources, what can change, what reverts when.

Values only; reading them from engines and changing them is `change_desk`'s. Texts for files are written here.
"""

import json
from collections.abc import Mapping, Sequence

import msgspec

from kvwatch.admin.engines import AdminEngine
from kvwatch.control import LIVE_SETTINGS, ChangeKind, SettingsState, SettingState, SettingValue


class ConfigSetting(msgspec.Struct, frozen=True, kw_only=True):
    """One setting."""

    key: str
    brief: str
    value: SettingValue
    """What is in force."""
    declared: SettingValue
    """What flags, environment and file said at the start, or what was declared since."""
    source: str | None
    """Where the declared value comes from; none for an engine in another process."""
    has_drifted: bool
    """Whether the two differ."""
    change: ChangeKind | None
    """How it can change while the engine runs; none if it cannot."""
    unit: str = ""
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    expires_at: str | None = None
    """When the value in force reverts to the declared one."""


class ConfigAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """All settings. The ETag of this answer is what a change names in `If-Match`."""

    engine: str
    dp_rank: int
    run: str
    """Names this run of the engine: what was read of an earlier one is out of date."""
    version: int
    """Grows with each change."""
    is_rebuild_allowed: bool
    """Whether settings that change by `rebuild` can change here."""
    settings: list[ConfigSetting]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A setting whose value in force is not the declared one."""

    key: str
    declared: SettingValue
    live: SettingValue
    expires_at: str | None = None


class DiffAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What is live and not declared, and how it would be declared."""

    engine: str
    dp_rank: int
    version: int
    differences: list[Difference]
    toml: str
    """Lines for the file that `--config` names."""
    helm_values: str
    """The same as values of the Helm chart."""


def config_answer(engine: AdminEngine, state: SettingsState, expiries: Mapping[str, str]) -> ConfigAnswer:
    """Return everything that is known of an engine's settings.

    Args:
        engine: The engine.
        state: Its live settings.
        expiries: When live values revert, by key.
    """
    live = {str(each.key): each for each in state.settings}
    fixed = [
        ConfigSetting(
            key=each.key,
            brief=each.brief,
            value=each.value,
            declared=each.value,
            source=each.source,
            has_drifted=False,
            change=None,
        )
        for each in engine.declared
        if each.key not in live
    ]
    sources = {each.key: each.source for each in engine.declared}
    changeable = [_changeable(each, sources.get(key), expiries.get(key)) for key, each in live.items()]
    return ConfigAnswer(
        engine=engine.name,
        dp_rank=engine.dp_rank,
        run=engine.epoch,
        version=state.version,
        is_rebuild_allowed=state.is_rebuild_allowed,
        settings=[*changeable, *fixed],
    )


def diff_answer(engine: AdminEngine, state: SettingsState, expiries: Mapping[str, str]) -> DiffAnswer:
    """Return what has drifted."""
    found = [
        Difference(key=each.key, declared=each.declared, live=each.live, expires_at=expiries.get(each.key))
        for each in state.settings
        if each.has_drifted
    ]
    values = [(each.key, each.live) for each in found]
    return DiffAnswer(
        engine=engine.name,
        dp_rank=engine.dp_rank,
        version=state.version,
        differences=found,
        toml="".join(f"{key} = {toml_value(value)}\n" for key, value in values),
        helm_values=_helm_values(values),
    )


def toml_value(value: SettingValue) -> str:
    """Return a value as TOML. Strings of JSON are strings of TOML; what is not set is the text `none`."""
    return json.dumps("none" if value is None else value)


def _helm_values(values: Sequence[tuple[str, SettingValue]]) -> str:
    if not values:
        return ""
    return "settings:\n" + "".join(f"  {key}: {json.dumps(value)}\n" for key, value in values)


def _changeable(state: SettingState, source: str | None, expires_at: str | None) -> ConfigSetting:
    known = LIVE_SETTINGS[state.key]
    return ConfigSetting(
        key=state.key,
        brief=known.brief,
        value=state.live,
        declared=state.declared,
        source=source,
        has_drifted=state.has_drifted,
        change=known.kind,
        unit=known.unit,
        minimum=known.minimum,
        maximum=known.maximum,
        choices=known.choices,
        expires_at=expires_at,
    )
