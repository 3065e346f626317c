"""Turns declared metrics into queries: the only place that does. An unknown metric or label fails while building.

Metrics come as the constants of `kvwatch.telemetry.metrics`, so that a type checker sees a misspelt one. Sums leave out the
labels that the metric declares itself and keep all others, also those that only an installation knows (instance, pod).
"""

from kvwatch.derive.metrics import full_name
from kvwatch.telemetry.schema import Metric, MetricKind

COMMON = ("job", "instance", "engine", "dp_rank", "model_name")
"""Labels that every series has, beside those that the metric declares."""

Labels = dict[str, str]


class QueryError(ValueError):
    """A query asks for what its metric does not have."""


def series(
    metric: Metric, suffix: str = "", *, scope: str = "", offset: str = "", window: str = "", **labels: str
) -> str:
    """Return a selector, such as `kvwatch_requests{state="running"}`.

    Args:
        metric: What is asked for.
        suffix: `_bucket`, `_count` or `_sum` of a histogram.
        scope: Further matchers, as dashboards have them: `job=~"$job"`.
        offset: How long ago.
        window: Range, such as `5m`.
        labels: Wanted values; one that begins with `~` is a regular expression, with `!` excluded.

    Raises:
        QueryError: the metric has no such label, or no such part.
    """
    known = {*COMMON, *metric.labels, *(["le"] if metric.kind is MetricKind.HISTOGRAM else [])}
    for name in labels:
        if name not in known:
            raise QueryError(f"{full_name(metric)} has no label {name!r}; it has {sorted(known)}")
    if bool(suffix) is not (metric.kind is MetricKind.HISTOGRAM):
        raise QueryError(f"{full_name(metric)} is a {metric.kind}: {suffix or 'a plain selector'} is not to be had")
    matchers = [each for each in (scope, *(_matcher(name, value) for name, value in labels.items())) if each]
    text = full_name(metric) + suffix + (f"{{{','.join(matchers)}}}" if matchers else "")
    return text + (f"[{window}]" if window else "") + (f" offset {offset}" if offset else "")


def without(
    metric: Metric, query: str, *, keep: tuple[str, ...] = (), also: tuple[str, ...] = (), how: str = "sum"
) -> str:
    """Return an aggregation over the metric's own labels, less those to keep."""
    gone = [*(name for name in metric.labels if name not in keep), *also]
    return f"{how} without ({', '.join(gone)}) ({query})" if gone else query


def gauge(metric: Metric, *, scope: str = "", keep: tuple[str, ...] = (), how: str = "sum", **labels: str) -> str:
    """Return a gauge, summed over the labels that it declares."""
    _must_be(metric, MetricKind.GAUGE)
    return without(metric, series(metric, scope=scope, **labels), keep=keep, how=how)


def rate(
    metric: Metric, window: str = "5m", *, scope: str = "", keep: tuple[str, ...] = (), offset: str = "", **labels: str
) -> str:
    """Return what a counter grows by in a second, summed over the labels that it declares."""
    _must_be(metric, MetricKind.COUNTER)
    grown = f"rate({series(metric, scope=scope, window=window, offset=offset, **labels)})"
    return without(metric, grown, keep=keep)


def increase(metric: Metric, window: str = "15m", *, scope: str = "", keep: tuple[str, ...] = (), **labels: str) -> str:
    """Return what a counter has grown by, summed over the labels that it declares."""
    _must_be(metric, MetricKind.COUNTER)
    return without(metric, f"increase({series(metric, scope=scope, window=window, **labels)})", keep=keep)


def observations(
    metric: Metric,
    window: str = "5m",
    part: str = "_count",
    *,
    scope: str = "",
    keep: tuple[str, ...] = (),
    **labels: str,
) -> str:
    """Return a histogram's observations in a second (`_count`), or their sum (`_sum`)."""
    grown = f"rate({series(metric, part, scope=scope, window=window, **labels)})"
    return without(metric, grown, keep=keep)


def mean(metric: Metric, window: str = "5m", *, scope: str = "", **labels: str) -> str:
    """Return the mean observation, from its parts."""
    total = observations(metric, window, "_sum", scope=scope, keep=(), **labels)
    return ratio(total, observations(metric, window, scope=scope, keep=(), **labels))


def quantile(
    q: float, metric: Metric, window: str = "5m", *, scope: str = "", by: tuple[str, ...] = (), **labels: str
) -> str:
    """Return a quantile over everything that `by` does not keep apart; buckets are added up, quantiles never are."""
    kept = ", ".join(("le", *by))
    grown = f"rate({series(metric, '_bucket', scope=scope, window=window, **labels)})"
    return f"histogram_quantile({q:g}, sum by ({kept}) ({grown}))"


def late_ratio(metric: Metric, bound_seconds: float, window: str) -> str:
    """Return the part of a histogram's observations above one of its bounds.

    Raises:
        QueryError: that is none of its bounds.
    """
    if bound_seconds not in metric.buckets:
        raise QueryError(f"{bound_seconds} is no bound of {full_name(metric)}; it has {metric.buckets}")
    in_time = f"rate({series(metric, '_bucket', window=window, le=repr(float(bound_seconds)))})"
    return f"1 - {without(metric, in_time, also=('le',))} / ({observations(metric, window)} > 0)"


def ratio(part: str, whole: str) -> str:
    """Return part / whole where there is a whole; both are sums."""
    return f"{part} / ({whole} > 0)"


def _matcher(name: str, value: str) -> str:
    if value.startswith("!~"):
        return f'{name}!~"{value[2:]}"'
    if value.startswith("!"):
        return f'{name}!="{value[1:]}"'
    if value.startswith("~"):
        return f'{name}=~"{value[1:]}"'
    return f'{name}="{value}"'


def _must_be(metric: Metric, kind: MetricKind) -> None:
    if metric.kind is not kind:
        raise QueryError(f"{full_name(metric)} is a {metric.kind}, not a {kind}")
