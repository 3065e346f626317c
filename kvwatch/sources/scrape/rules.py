"""What one of our series is made of: which foreign rows, and under which labels. Data and pure functions.

Engines rename their metrics from version to version: a rule lists all names that a quantity had, newest first, and the
first that the page has is taken. What a page has under none of them is absent, not zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kvwatch.telemetry.schema import Metric

Fidelity = Literal["exact", "derived"]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a page."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class FromLabel:
    """A label's value is that of a foreign label, translated."""

    label: str
    values: Mapping[str, str]
    """Foreign value -> ours."""
    otherwise: str
    """For values that this version does not know."""

    def of(self, row: Row) -> str:
        """Return our value for a row."""
        return self.values.get(row.labels.get(self.label, ""), self.otherwise)


@dataclass(frozen=True, slots=True)
class Rule:
    """One of our series, or several that differ in a label that the rows give."""

    metric: Metric
    names: tuple[str, ...]
    """Names of one quantity, newest first. Histograms without `_bucket`."""
    labels: tuple[str | FromLabel, ...] = ()
    """In the order of the metric's labels."""
    fidelity: Fidelity = "exact"
    note: str = ""
    """For derived values: how, or what is different."""
    plus: tuple[str, ...] = ()
    """Names of further quantities that are added."""
    per: str = ""
    """Name of the gauge by which the sum is divided; without it the series is absent."""
    minus: float = 0
    """Is subtracted from the sum."""
    from_label: str = ""
    """The value stands in this label of the row, not behind it."""
    total_where_empty: str = ""
    """A row in which this label is not empty is a part of the one in which it is."""

    def labels_of(self, row: Row) -> tuple[str, ...]:
        """Return the values of the metric's labels for a row."""
        return tuple(each if isinstance(each, str) else each.of(row) for each in self.labels)


@dataclass(frozen=True, slots=True)
class Dialect:
    """How the metrics of one make of engine are read."""

    prefix: str
    """Of every name that matters; others are passed over unread."""
    rules: tuple[Rule, ...]
    rank_label: str
    """Label with the number of the data-parallel rank; rows without it belong to rank 0."""
    only: Mapping[str, str]
    """Rows that have one of these labels with another value are left out: ranks that say the same once more."""
