"""Finds metric names in queries and says which of them, and of their labels, do not exist."""

import re
from collections.abc import Collection, Iterator

from kvwatch.derive.metrics import full_name
from kvwatch.telemetry.metrics import CATALOGUE
from kvwatch.telemetry.schema import Metric, MetricKind
from kvwatch_dashboards import promql

SELECTOR = re.compile(r"(?<![\w:])(kvwatch_\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"((?:[^"\\]|\\.)*)"')
OF_TARGETS = frozenset({*promql.COMMON, "le"})
PARTS = ("_bucket", "_sum", "_count")


def metric_of(name: str) -> Metric | None:
    """Return the metric of a series, which must have the suffix of its kind."""
    for metric in CATALOGUE:
        if metric.kind is MetricKind.HISTOGRAM and name in {full_name(metric) + part for part in PARTS}:
            return metric
        if metric.kind is not MetricKind.HISTOGRAM and name == full_name(metric):
            return metric
    return None


def wrong_selectors(text: str, of_targets: Collection[str] = ()) -> Iterator[str]:
    """Yield what a query asks for and no metric has; `of_targets` are labels that Prometheus adds where it runs."""
    for name, matchers in SELECTOR.findall(text):
        metric = metric_of(name)
        if metric is None:
            yield f"{name} is no metric"
            continue
        for label, _, _ in MATCHER.findall(matchers):
            if label not in OF_TARGETS | set(metric.labels) | set(of_targets):
                yield f"{name} has no label {label}"
