"""Full names and descriptions of metrics, as exporters, docs and dashboards use them."""

from collections.abc import Iterable

import msgspec

from kvwatch.telemetry.metrics import CATALOGUE
from kvwatch.telemetry.schema import EventSpec, Metric, MetricKind, Registry

PREFIX = "kvwatch_"


class MetricSpec(msgspec.Struct, frozen=True):
    """One metric under its full name."""

    name: str
    """As it is queried: with prefix, and `_total` for counters."""
    metric: Metric
    fed_by: tuple[str, ...]
    """Names of the events that feed it; empty when it is read from the ledger's state or from kvwatch itself."""

    @property
    def series_names(self) -> tuple[str, ...]:
        """Names under which its samples appear on the page."""
        if self.metric.kind is MetricKind.HISTOGRAM:
            return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
        return (self.name,)


def full_name(metric: Metric) -> str:
    """Return the name under which a metric is queried."""
    return f"{PREFIX}{metric.name}{'_total' if metric.kind is MetricKind.COUNTER else ''}"


def metric_specs(registry: Registry, catalogue: Iterable[Metric] = CATALOGUE) -> list[MetricSpec]:
    """Return every metric of the catalogue, in its order, with the events that feed it."""
    specs: list[EventSpec] = list(registry)
    return [
        MetricSpec(
            full_name(metric),
            metric,
            tuple(spec.name for spec in specs if any(feed.metric is metric for feed in spec.feeds)),
        )
        for metric in catalogue
    ]
