"""The same families written by the reference client of Prometheus: the oracle of our own writer."""

from collections.abc import Iterable, Iterator

from prometheus_client import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from kvwatch.exporters.prometheus.families import Family, HistogramSeries
from kvwatch.exporters.prometheus.writer import Format
from kvwatch.telemetry.schema import MetricKind


class ReferenceCollector(Collector):
    """Hands families to the reference client."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = list(families)

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            if family.kind is MetricKind.HISTOGRAM:
                yield self._histogram(family)
                continue
            cls = CounterMetricFamily if family.kind is MetricKind.COUNTER else GaugeMetricFamily
            made = cls(family.name, family.brief, labels=family.labels)
            for labels, value in family.series:
                assert not isinstance(value, HistogramSeries)
                made.add_metric(labels, value)
            yield made

    def _histogram(self, family: Family) -> HistogramMetricFamily:
        made = HistogramMetricFamily(family.name, family.brief, labels=family.labels)
        for labels, value in family.series:
            assert isinstance(value, HistogramSeries)
            bounds = [*(floatToGoString(bound) for bound in value.bounds), "+Inf"]  # type: ignore[no-untyped-call]
            marks = {
                bucket: Exemplar({"trace_id": e.trace_id, "span_id": e.span_id}, e.value, e.unix_seconds)
                for bucket, e in value.exemplars
            }
            buckets = [
                (bound, count, marks[index]) if index in marks else (bound, count)
                for index, (bound, count) in enumerate(zip(bounds, value.counts, strict=True))
            ]
            made.add_metric(labels, buckets, value.sum)
        return made


def reference_page(families: Iterable[Family], form: Format) -> bytes:
    """Return the page that the reference client writes."""
    collector = ReferenceCollector(families)
    if form == "openmetrics":
        # Its default turns colons into underscores, which both OpenMetrics and Prometheus allow in names.
        page: bytes = openmetrics.generate_latest(collector, "allow-utf-8")  # type: ignore[no-untyped-call]
        return page
    return generate_latest(collector)
