"""Views as OTLP metrics. Knows no metric by name: everything follows from the catalogue.

`kv_block_capacity` becomes `kvwatch.kv_block_capacity`. A collector that writes it to Prometheus turns the dot into an
underscore and adds `_total` to counters: the names, and so dashboards and alerts, are the same on both ways.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Metric as OtlpMetric
from opentelemetry.sdk.resources import Resource

from kvwatch.exporters.identity import COMMON_LABELS, EngineIdentity
from kvwatch.exporters.otel.spans import SCHEMA_URL, SCOPE
from kvwatch.exporters.otel.text import clean
from kvwatch.ledger.view import HistogramSample, Sample
from kvwatch.telemetry.metrics import CATALOGUE
from kvwatch.telemetry.schema import Metric, MetricKind

PREFIX = "kvwatch."

UNITS = {"seconds": "s", "bytes": "By", "tokens": "{token}", "blocks": "{block}", "ratio": "1", "1": ""}
"""Units of the catalogue in UCUM. A count without a word has none: `1` would make Prometheus call it a ratio."""


class Reading(msgspec.Struct, frozen=True):
    """Everything that is known at one moment."""

    samples: tuple[Sample | HistogramSample, ...]
    extra: tuple[OtlpMetric, ...]
    """Metrics that are in no catalogue of ours."""
    unix_ns: int


class MetricsEncoder:
    """Turns readings into what the SDK's exporters take. Any thread.

    Args:
        resource: Who sends them.
        identity: Labels of every point, the same as on the metrics page.
        begin_unix_ns: Time from which counters count.
    """

    def __init__(self, resource: Resource, identity: EngineIdentity, begin_unix_ns: int) -> None:
        self._resource = resource
        self._common = dict(zip(COMMON_LABELS, map(clean, identity.labels), strict=True))
        self._begin_unix_ns = begin_unix_ns

    def encode(self, reading: Reading) -> MetricsData:
        """Return every metric that has a sample, in the order of the catalogue, then the others."""
        by_name: dict[str, list[Sample | HistogramSample]] = defaultdict(list)
        for sample in reading.samples:
            by_name[sample.metric.name].append(sample)
        found = [
            self._metric(metric, by_name[metric.name], reading.unix_ns)
            for metric in CATALOGUE
            if metric.name in by_name
        ]
        scope = ScopeMetrics(SCOPE, [*found, *reading.extra], SCHEMA_URL)
        return MetricsData([ResourceMetrics(self._resource, [scope], self._resource.schema_url)])

    def _metric(self, metric: Metric, samples: Sequence[Sample | HistogramSample], unix_ns: int) -> OtlpMetric:
        data: Gauge | Sum | Histogram
        cumulative = AggregationTemporality.CUMULATIVE
        if metric.kind is MetricKind.HISTOGRAM:
            data = Histogram(list(self._histogram_points(samples, unix_ns)), cumulative)
        elif metric.kind is MetricKind.COUNTER:
            data = Sum(list(self._points(samples, self._begin_unix_ns, unix_ns)), cumulative, is_monotonic=True)
        else:
            data = Gauge(list(self._points(samples, None, unix_ns)))
        return OtlpMetric(PREFIX + metric.name, metric.brief, UNITS.get(metric.unit, metric.unit), data)

    def _attributes(self, sample: Sample | HistogramSample) -> dict[str, str]:
        """Return the labels of a point; an empty label is an absent one."""
        pairs = zip(sample.metric.labels, sample.labels, strict=True)
        return self._common | {name: clean(value) for name, value in pairs if value}

    def _points(
        self, samples: Iterable[Sample | HistogramSample], begin_unix_ns: int | None, unix_ns: int
    ) -> Iterable[NumberDataPoint]:
        for sample in samples:
            assert isinstance(sample, Sample)
            yield NumberDataPoint(
                attributes=self._attributes(sample),
                start_time_unix_nano=begin_unix_ns,  # type: ignore[arg-type]  # a gauge has none, and the encoder takes it
                time_unix_nano=unix_ns,
                # Neither a bool nor a number of numpy's is a number to protobuf.
                value=int(sample.value) if isinstance(sample.value, int) else float(sample.value),
            )

    def _histogram_points(
        self, samples: Iterable[Sample | HistogramSample], unix_ns: int
    ) -> Iterable[HistogramDataPoint]:
        for sample in samples:
            assert isinstance(sample, HistogramSample)
            yield HistogramDataPoint(
                attributes=self._attributes(sample),
                start_time_unix_nano=self._begin_unix_ns,
                time_unix_nano=unix_ns,
                count=sample.count,
                sum=sample.sum,
                bucket_counts=sample.counts,
                explicit_bounds=sample.bounds,
                min=None,  # type: ignore[arg-type]  # the ledger keeps no extremes, and the field is optional
                max=None,  # type: ignore[arg-type]
            )
