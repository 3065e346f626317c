"""The table of settings that can change live."""

from typing import get_args

import pytest

from kvwatch.control import LIVE_SETTINGS, ChangeKind
from kvwatch.control.settings import SettingValue
from kvwatch.telemetry.events.control import SettingKey


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_blocks", 2), ("watermark", "0.05"), ("max_prefill_chunk", None), ("reserve_prompt", False),
        ("preemption_mode", "swap"), ("trace_ratio", 1), ("trace_ratio", 0.25), ("block_size", 1024),
        ("kv_dtype", "int8"),
    ],
)  # fmt: skip
def test_a_value_of_the_right_type_within_bounds_has_no_problem(key: SettingKey, value: SettingValue) -> None:
    assert LIVE_SETTINGS[key].problem(value) == ""


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("num_blocks", 1, "less than 2; give at least that"),
        ("max_num_seqs", 5000, "more than 4096; give at most that"),
        ("num_blocks", True, "not an integer"),
        ("num_blocks", 2.5, "not an integer"),
        ("num_blocks", None, "cannot be unset; give an integer"),
        ("reserve_prompt", 1, "not true or false"),
        ("trace_ratio", float("nan"), "not a finite number"),
        ("trace_ratio", float("inf"), "not a finite number"),
        ("trace_ratio", 1.5, "more than 1"),
        ("victim_policy", "oldest", "not one of newest, least-computed, lowest-priority"),
        ("watermark", 8, "not text"),
        ("block_size", [16], "not an integer"),
    ],
)
def test_a_wrong_value_is_refused_with_the_remedy(key: SettingKey, value: object, said: str) -> None:
    assert said in LIVE_SETTINGS[key].problem(value)


def test_events_can_name_every_setting_that_can_change_and_no_other() -> None:
    assert tuple(LIVE_SETTINGS) == get_args(SettingKey)


def test_only_what_the_layout_of_the_cache_depends_on_needs_a_rebuild() -> None:
    assert {key for key, each in LIVE_SETTINGS.items() if each.kind is ChangeKind.REBUILD} == {"block_size", "kv_dtype"}
