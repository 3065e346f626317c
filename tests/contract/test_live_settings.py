"""Settings that can change live are the settings of `serve`: type, bounds, choices and meaning are the same."""

import json
from pathlib import Path

import jsonschema_rs
import pytest
import yaml
from builders import NullModel, make_settings

from kvwatch.admin.engines import AdminEngine
from kvwatch.admin.live_config import diff_answer
from kvwatch.config import declared_settings
from kvwatch.control import LIVE_SETTINGS, LiveSetting, SettingsState, SettingState, SettingValue
from kvwatch.ledger.view import View
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.engine import Engine
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


@pytest.mark.parametrize("name", [name for name, each in DECLARED.items() if each.kind is float])
def test_no_number_is_so_large_that_what_is_computed_from_it_has_no_end(name: str) -> None:
    """Times become nanoseconds and deadlines: the largest float times a thousand million is infinite."""
    assert DECLARED[name].spec.maximum is not None


CHART = Path(__file__).parents[2] / "deploy" / "helm" / "kvwatch" / "values.schema.json"


def values_of(live: LiveSetting) -> list[SettingValue]:
    """Return some values that a setting can have live."""
    found: list[SettingValue] = [*live.choices, *([None] if live.is_optional else [])]
    low = live.minimum if live.minimum is not None else 1.0
    more: dict[str, list[SettingValue]] = {
        "int": [int(low), int(low) + 7], "float": [low, 0.5], "bool": [True, False], "text": ["0.05", "8"],
    }  # fmt: skip
    return found + more.get(live.type, [])


@pytest.mark.parametrize("live", LIVE_SETTINGS.values(), ids=lambda live: str(live.key))
def test_what_is_live_can_be_pasted_into_the_values_of_the_chart(live: LiveSetting) -> None:
    engine = Engine(make_settings(), NullModel(), EventLog(), lambda _outputs: None)
    offered = AdminEngine(labels={}, log=EventLog(), view=lambda: View(0, 0, 0, (), (), ()), control=engine)
    schema = json.loads(CHART.read_text(encoding="utf-8"))
    for value in values_of(live):
        state = SettingsState(1, [SettingState(live.key, value, "what was declared")], is_rebuild_allowed=True)

        pasted = yaml.safe_load(diff_answer(offered, state, {}).helm_values)

        assert pasted == {"settings": {live.key: value}}
        if value is not None:  # null takes a value away
            jsonschema_rs.validate(schema, pasted)
