"""Percentiles, and how long requests waited."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from kvwatch.bench.outcome import RequestOutcome

STALL_FACTOR = 10
STALL_SECONDS = 0.25
"""A pause within an answer counts as waiting if it is longer than this, and than `STALL_FACTOR` times the run's median
pause between two pieces of text."""

FAIR_FACTOR = 5.0
FAIR_SECONDS = 2.0
"""A request waits fairly up to the larger of this and `FAIR_FACTOR` times the median wait of its scenario."""


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution in seconds. Percentiles are observed values (nearest rank), never interpolated."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


def quantiles(values: Iterable[float]) -> Quantiles | None:
    """Return the distribution of some values, None for none."""
    found = sorted(values)
    if not found:
        return None
    return Quantiles(
        count=len(found),
        mean=math.fsum(found) / len(found),
        p50=percentile(found, 50),
        p90=percentile(found, 90),
        p99=percentile(found, 99),
        max=found[-1],
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least `percent` % of the ordered values do not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def stall_threshold_seconds(outcomes: Iterable[RequestOutcome]) -> float:
    """Return from which length on a pause within an answer counts as waiting."""
    gaps = sorted(gap for outcome in outcomes for gap in outcome.gaps)
    return max(STALL_SECONDS, STALL_FACTOR * percentile(gaps, 50)) if gaps else STALL_SECONDS


def waiting_seconds(outcome: RequestOutcome, threshold_seconds: float) -> float:
    """Return how long a request waited, as far as its client can tell: an upper bound.

    All time until the first piece of text counts, though the prompt is computed in it, and every pause that is too long
    to be a step. The rest is service.
    """
    first = outcome.ttft_seconds
    if first is None:
        return outcome.e2e_seconds
    stalls = math.fsum(pause for pause in outcome.pauses if pause > threshold_seconds)
    return min(outcome.e2e_seconds, first + stalls)


def worst_wait_ratio(waits: Mapping[str, Sequence[float]]) -> float | None:
    """Return the largest wait in units of what is fair in its scenario; at most 1 when none waited unfairly.

    Args:
        waits: Scenario -> waiting seconds of each of its requests.
    """
    ratios = [
        max(found) / max(FAIR_FACTOR * percentile(sorted(found), 50), FAIR_SECONDS) for found in waits.values() if found
    ]
    return max(ratios, default=None)


def by_scenario(outcomes: Iterable[RequestOutcome]) -> dict[str, list[RequestOutcome]]:
    """Return the outcomes of each scenario, scenarios in the order of their names."""
    found: dict[str, list[RequestOutcome]] = defaultdict(list)
    for outcome in outcomes:
        found[outcome.scenario].append(outcome)
    return dict(sorted(found.items()))
