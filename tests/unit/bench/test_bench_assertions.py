import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwatch.bench.assertions import assertable_names, parse_assertion
from kvwatch.errors import ConfigError

OPERATORS = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}


@given(
    name=st.sampled_from(assertable_names(["short", "early-stop"])), comparison=st.sampled_from(sorted(OPERATORS)),
    limit=st.floats(-1e6, 1e6, allow_nan=False).map(lambda value: round(value, 3)),
    value=st.floats(-1e6, 1e6, allow_nan=False), spaces=st.sampled_from(["", " "]),
)  # fmt: skip
def test_an_assertion_compares_the_number_that_it_names(
    name: str, comparison: str, limit: float, value: float, spaces: str
) -> None:
    assertion = parse_assertion(f"{name}{spaces}{comparison}{spaces}{limit}", ["short", "early-stop"])
    for number in (value, limit):
        result = assertion.check({name: number, "other": 0.0})
        assert result.is_met == OPERATORS[comparison](number, limit)
        assert result.value == number


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("ttft_p99<250ms", 0.25),
        ("ttft_p99<2s", 2),
        ("ttft_p99 <= 1.5", 1.5),
        ("hit_ratio>=40%", 0.4),
        ("itl_p50<1e-2", 0.01),
    ],
)
def test_units_are_understood(text: str, limit: float) -> None:
    assert parse_assertion(text, []).limit == pytest.approx(limit)


def test_what_the_run_does_not_tell_is_not_met() -> None:
    result = parse_assertion("preemptions==0", []).check({"preemptions": None})
    assert not result.is_met
    assert result.value is None
    assert not parse_assertion("preemptions!=1", []).check({}).is_met


@pytest.mark.parametrize(
    "text", ["", "ttft_p99", "ttft_p99<", "<2", "ttft_p99<two", "ttft_p99=2", "ttft_p99<2 hours", "a<b<c"]
)
def test_what_is_no_assertion_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"ttft_p99<2\.0"):
        parse_assertion(text, [])


def test_an_unknown_name_names_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match="did you mean ttft_p99"):
        parse_assertion("tfft_p99<2", [])
    with pytest.raises(ConfigError, match=r"did you mean long\.e2e_p50"):
        parse_assertion("long.e2e_p5<2", ["long"])
