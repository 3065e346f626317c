"""Repeated measurements as one value: the median, with the lowest and the highest beside it."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Self


@dataclass(frozen=True, slots=True)
class Spread:
    """What was found in several rounds, or with several loads."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float], factor: float = 1.0) -> Self:
        """Return the spread of at least one value, times a factor of a unit."""
        scaled = [value * factor for value in values]
        return cls(median(scaled), min(scaled), max(scaled))

    @classmethod
    def ratio(cls, values: Sequence[float], base: Sequence[float]) -> Self:
        """Return the spread of the ratios pair by pair: what a pair has in common, such as its load, cancels."""
        return cls.of(one / other for one, other in zip(values, base, strict=True))

    def __str__(self) -> str:
        """Return it as it stands in a table."""
        if self.low == self.high:
            return shown(self.median)
        return f"{shown(self.median)} ({shown(self.low)} to {shown(self.high)})"


def shown(value: float) -> str:
    """Return a number with three significant digits, whole where it is large."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"
