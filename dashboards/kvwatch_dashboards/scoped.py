"""Queries of dashboards: those of promql.py, restricted to what the variables at the top select."""

from kvwatch.telemetry.schema import Metric
from kvwatch_dashboards import promql

WINDOW = "$__rate_interval"
WHOLE = "$__range"
BASE = 'job=~"$job",model_name=~"$model",engine=~"$engine",dp_rank=~"$dp_rank"'
_OWN = ("tier", "group")
"""Labels of metrics that have a variable."""


def scope(metric: Metric, labels: dict[str, str]) -> str:
    """Return the matchers for a metric: the common ones, and those of its tier and group unless they are given."""
    more = [f'{name}=~"${name}"' for name in _OWN if name in metric.labels and name not in labels]
    return ",".join((BASE, *more))


def value(metric: Metric, **labels: str) -> str:
    """Return a gauge with all its labels."""
    return promql.series(metric, scope=scope(metric, labels), **labels)


def gauge(metric: Metric, *keep: str, how: str = "sum", **labels: str) -> str:
    """Return a gauge, aggregated over its own labels but those to keep."""
    return promql.gauge(metric, scope=scope(metric, labels), keep=keep, how=how, **labels)


def rate(metric: Metric, *keep: str, **labels: str) -> str:
    """Return what a counter grows by in a second."""
    return promql.rate(metric, WINDOW, scope=scope(metric, labels), keep=keep, **labels)


def increase(metric: Metric, *keep: str, **labels: str) -> str:
    """Return what a counter has grown by within the step of the picture."""
    return promql.increase(metric, WINDOW, scope=scope(metric, labels), keep=keep, **labels)


def observations(metric: Metric, *keep: str, part: str = "_count", **labels: str) -> str:
    """Return a histogram's observations in a second, or their sum."""
    return promql.observations(metric, WINDOW, part, scope=scope(metric, labels), keep=keep, **labels)


def mean(metric: Metric, *keep: str, **labels: str) -> str:
    """Return the mean observation."""
    whole = observations(metric, *keep, **labels)
    return promql.ratio(observations(metric, *keep, part="_sum", **labels), whole)


def quantile(q: float, metric: Metric, *by: str, **labels: str) -> str:
    """Return a quantile over all selected engines; `by` keeps some labels apart."""
    return promql.quantile(q, metric, WINDOW, scope=scope(metric, labels), by=by, **labels)


def ratio(part: str, whole: str) -> str:
    """Return part / whole where there is a whole."""
    return promql.ratio(part, whole)


def age(metric: Metric) -> str:
    """Return the time since a timestamp."""
    return f"time() - {value(metric)}"


def or_none(expr: str, label: str) -> str:
    """Return a query whose series without a label have `none` there, so that a legend has something to show."""
    return f'label_replace({expr}, "{label}", "none", "{label}", "")'


def happened(metric: Metric, *keep: str, **labels: str) -> str:
    """Return the increase of what has happened at all within the picture: lines that are only 0 hide the others."""
    ever = promql.increase(metric, WHOLE, scope=scope(metric, labels), keep=keep, **labels)
    return f"({increase(metric, *keep, **labels)}) and ({ever} > 0)"


def time_ratio(metric: Metric, **labels: str) -> str:
    """Return the part of the time that a counter of seconds grew by; scrapes at unequal distances make no 101 %."""
    return f"clamp_max({rate(metric, **labels)}, 1)"
