"""Statistics for benchmarks that alternate two variants: the ratio of each pair, its middle and its interval."""

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_RESAMPLES = 4000


@dataclass(frozen=True)
class Estimate:
    """A median, or what stands for it, with its 95 % interval."""

    median: float
    low: float
    high: float

    def rounded(self, digits: int = 3) -> dict[str, float]:
        """Return it for JSON."""
        return {
            "median": round(self.median, digits),
            "low95": round(self.low, digits),
            "high95": round(self.high, digits),
        }


def estimate(values: Sequence[float]) -> Estimate:
    """Return the median of `values` with a bootstrap interval (percentile method, fixed seed)."""
    if len(values) < 2:
        return Estimate(values[0], math.nan, math.nan)
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    cut = int(0.025 * _RESAMPLES)
    return Estimate(statistics.median(values), medians[cut], medians[-cut - 1])


def pseudomedian(values: Sequence[float]) -> Estimate:
    """Return the median of the means of all pairs of `values` with a bootstrap interval (percentiles, fixed seed).

    As robust against a few spoilt values as a benchmark needs, and nearly as narrow as the mean where there are none:
    the median's interval is a quarter wider. Source: Hodges and Lehmann, "Estimates of location based on rank
    tests", 1963.
    """
    given = np.asarray(values, dtype=float)
    if len(given) < 2:
        return Estimate(float(given[0]), math.nan, math.nan)
    left, right = np.triu_indices(len(given))
    rng = np.random.default_rng(0)
    middles = sorted(
        float(np.median((drawn[left] + drawn[right]) / 2))
        for drawn in (rng.choice(given, len(given)) for _ in range(_RESAMPLES))
    )
    cut = int(0.025 * _RESAMPLES)
    return Estimate(float(np.median((given[left] + given[right]) / 2)), middles[cut], middles[-cut - 1])


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Return the ratio of two alternated series, pair by pair: drift of the machine's speed cancels."""
    return estimate([a / b for a, b in zip(numerators, denominators, strict=True)])
