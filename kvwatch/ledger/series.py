"""What a deployment decides about its series: who gets a series of their own, and further bounds of histograms.

Labels whose values come from requests (tenant, lora) have an allow-list: everything else becomes `other` before it is
counted, so that no caller can make series or memory grow. Knows no metric by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvwatch.telemetry.schema import Metric

OTHER = "other"
"""Stands for every value that is not allowed."""

TIER = "tier"
"""The label that says where blocks lie. Its series exist only for the tiers that an engine has."""

NONE = ""
"""The value of a request that has none; for Prometheus an empty label is an absent one."""


@dataclass(frozen=True, slots=True)
class SeriesSettings:
    """Allow-lists and bounds. Immutable; any thread."""

    allowed: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Label name to the values that keep their name; a label that is missing here allows none."""
    thresholds: Mapping[Metric, Sequence[float]] = field(default_factory=dict)
    """Histogram to bounds that are added to those that it declares, in base units."""

    def values(self, label: str) -> tuple[str, ...]:
        """Return every value that such a label can have, for series that exist from the beginning."""
        return (NONE, *sorted(self.allowed.get(label, frozenset()) - {NONE, OTHER}), OTHER)

    def bounds(self, metric: Metric) -> tuple[float, ...]:
        """Return the upper bounds of a histogram: its own and the added ones, ascending, each once."""
        added = self.thresholds.get(metric, ())
        return tuple(sorted({*metric.buckets, *added})) if added else metric.buckets
