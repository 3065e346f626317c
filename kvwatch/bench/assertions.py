"""`--assert "ttft_p99<2.0"`: what a run must fulfil, as text."""

import operator
import re
from collections.abc import Callable, Collection, Mapping

import msgspec

from kvwatch.config import unknown_name
from kvwatch.errors import ConfigError

QUANTILES = ("p50", "p90", "p99", "mean", "max")
TIMES = ("ttft", "itl", "e2e", "waiting", "service")
RUN_NAMES = (
    "ok", "hung_up", "failed", "interrupted", "not_sent", "retries", "errors", "error_ratio", "duration_seconds",
    "peak_concurrency", "output_tokens_per_second", "requests_per_second", "worst_wait_ratio", "preemptions",
    "num_recomputed_tokens", "hit_ratio", "waste_ratio", "waste_ratio_max", "min_free_blocks", "used_blocks_after",
    "limit_waste_ratio", "own_waste_ratio", "mean_length_tokens",
    "isolation_mismatches", "differing", "loop_lag_p99_seconds",
)  # fmt: skip
SCENARIO_NAMES = ("ok", "hung_up", "failed", "errors", "error_ratio", "worst_wait_ratio")

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_UNITS = {"": 1.0, "s": 1.0, "ms": 0.001, "%": 0.01}
_SHAPE = re.compile(
    r"\s*([\w.-]+?)\s*(<=|>=|==|!=|<|>)\s*([-+]?\d+(?:\.\d*)?(?:e[-+]?\d+)?)\s*(ms|s|%)?\s*", re.IGNORECASE
)


class Assertion(msgspec.Struct, frozen=True):
    """One comparison of a number of the report."""

    text: str
    name: str
    comparison: str
    limit: float

    def check(self, values: Mapping[str, float | None]) -> "AssertionResult":
        """Return whether it holds; what is not known does not."""
        value = values.get(self.name)
        is_met = value is not None and _OPERATORS[self.comparison](value, self.limit)
        return AssertionResult(text=self.text, value=value, is_met=is_met)


class AssertionResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of an assertion."""

    text: str
    value: float | None
    """None: the run does not tell, so the assertion is not met."""
    is_met: bool


def parse_assertion(text: str, scenarios: Collection[str]) -> Assertion:
    """Read one assertion: NAME COMPARISON NUMBER[ms|s|%], NAME perhaps with a scenario and a dot before it.

    Args:
        text: What the user wrote.
        scenarios: Scenarios of the run.

    Raises:
        ConfigError: it is none, or the run has no such number.
    """
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"--assert: {text!r} is no assertion; write for instance 'ttft_p99<2.0' or 'long.e2e_p50<=800ms'"
        )
    name, comparison, number, unit = match.groups()
    known = assertable_names(scenarios)
    if name not in known:
        raise unknown_name(name, known, "--assert:")
    return Assertion(text.strip(), name, comparison, float(number) * _UNITS[(unit or "").lower()])


def assertable_names(scenarios: Collection[str]) -> list[str]:
    """Return every name that can be asserted of a run with these scenarios."""
    times = [f"{time}_{quantile}" for time in TIMES for quantile in QUANTILES]
    return [*times, *RUN_NAMES, *(f"{each}.{name}" for each in sorted(scenarios) for name in (*times, *SCENARIO_NAMES))]
