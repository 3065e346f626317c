"""docs/bench.md says what the code does."""

import re
from pathlib import Path
from typing import get_args, get_type_hints

import msgspec

from kvwatch.bench.assertions import assertable_names
from kvwatch.bench.outcome import ERROR_KINDS
from kvwatch.bench.report import Report
from kvwatch.bench.saved import SavedRequest
from kvwatch.bench.scenarios import SCENARIOS

PAGE = (Path(__file__).parents[3] / "docs" / "bench.md").read_text(encoding="utf-8")
WORDS = set(re.findall(r"`([^`\n]+)`", PAGE))


def structs_of(kind: object) -> set[type[msgspec.Struct]]:
    """All structs that a type is made of."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = get_type_hints(kind)
        return {kind}.union(*(structs_of(hints[name]) for name in kind.__struct_fields__))
    return set().union(*map(structs_of, get_args(kind))) if get_args(kind) else set()


def test_every_field_of_the_report_is_documented() -> None:
    structs = structs_of(Report)
    assert len(structs) > 10
    missing = {f"{kind.__name__}.{name}" for kind in structs for name in kind.__struct_fields__ if name not in WORDS}
    assert missing == set()


def test_every_field_of_a_saved_request_is_documented() -> None:
    assert set(SavedRequest.__struct_fields__) <= WORDS


def test_every_scenario_is_documented_with_its_weight() -> None:
    found = dict(re.findall(r"^\| `([a-z-]+)` \| (\d+) \|", PAGE, re.MULTILINE))
    assert found == {name: str(scenario.mixed_weight) for name, scenario in SCENARIOS.items()}


def test_every_kind_of_error_is_documented() -> None:
    assert set(ERROR_KINDS) <= WORDS


def test_every_name_that_can_be_asserted_is_documented() -> None:
    for name in assertable_names([]):
        time, _, quantile = name.rpartition("_")
        assert name in WORDS or {time, f"_{quantile}"} <= WORDS, name
