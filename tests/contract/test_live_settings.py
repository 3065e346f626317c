"""Settings that can change live are the settings of `serve`: type, bounds, choices and meaning are the same."""

from kvwatch.config import declared_settings
from kvwatch.control import LIVE_SETTINGS, LiveSetting
from kvwatch_engine.serve import ServeSettings

DECLARED = {each.name: each for each in declared_settings(ServeSettings)}
OPTIONAL_AT_START = {"num_blocks"}
"""Left out, they are found when the server starts; live they have a value."""


def type_of(live: LiveSetting) -> type:
    return {"int": int, "float": float, "bool": bool, "choice": str, "text": str}[live.type]


def test_each_live_setting_is_declared_as_serve_declares_it() -> None:
    for live in LIVE_SETTINGS.values():
        declared = DECLARED[live.key]
        assert declared.kind is type_of(live), live.key
        assert declared.choices == live.choices, live.key
        assert (declared.spec.minimum, declared.spec.maximum) == (live.minimum, live.maximum), live.key
        assert declared.is_optional == (live.is_optional or live.key in OPTIONAL_AT_START), live.key
        assert declared.spec.brief == live.brief, live.key
