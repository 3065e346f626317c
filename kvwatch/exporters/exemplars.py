"""Exemplars: for a bucket of a latency histogram, the trace of one request that fell into it.

Whoever exports traces offers them; whoever renders histograms asks. The two do not know each other, the composition
root gives both the same store:

    exemplars.offer(metrics.TIME_TO_FIRST_TOKEN, event.ttft_ns / 1e9, trace_id, span_id, unix_seconds)

Only traces that were handed to their exporter are offered: an exemplar that leads nowhere is worse than none.
"""

from bisect import bisect_left
from collections.abc import Collection, Mapping

import msgspec

from kvwatch.telemetry.schema import Metric


class Exemplar(msgspec.Struct, frozen=True, gc=False):
    """One observation and the trace that it belongs to."""

    value: float
    """The observation in the metric's base unit."""
    trace_id: str
    """32 lower-case hexadecimal digits."""
    span_id: str
    """16 lower-case hexadecimal digits."""
    unix_seconds: float
    """When it was observed."""


class ExemplarStore:
    """The newest exemplar of each bucket. Any thread may call anything: a call changes or reads one entry.

    Memory: at most one exemplar for each bucket of each metric that is offered.

    Args:
        extra_bounds: Bounds that the operator added to those that a histogram declares, in base units.
    """

    def __init__(self, extra_bounds: Mapping[Metric, Collection[float]] | None = None) -> None:
        self._extra_bounds = extra_bounds or {}
        self._bounds: dict[str, list[float]] = {}
        self._newest: dict[tuple[str, int], Exemplar] = {}

    def offer(self, metric: Metric, value: float, trace_id: str, span_id: str, unix_seconds: float) -> None:
        """Keep an exported trace as the exemplar of the bucket that `value` falls into.

        Args:
            metric: A histogram without labels of its own.
            value: What was observed, in base units; times are ns / 1e9, so that bounds are met exactly.
            trace_id: 32 hexadecimal digits.
            span_id: 16 hexadecimal digits.
            unix_seconds: When it was observed.
        """
        bounds = self._bounds.get(metric.name)
        if bounds is None:
            bounds = self._bounds[metric.name] = sorted({*metric.buckets, *self._extra_bounds.get(metric, ())})
        bucket = bisect_left(bounds, value)
        self._newest[metric.name, bucket] = Exemplar(value, trace_id, span_id, unix_seconds)

    def knows(self, metric: Metric) -> bool:
        """Return whether anything was offered for a metric."""
        return metric.name in self._bounds

    def find(self, metric: Metric, bucket: int) -> Exemplar | None:
        """Return the exemplar of a metric's bucket number `bucket` (the last one is +Inf's), or None."""
        return self._newest.get((metric.name, bucket))
