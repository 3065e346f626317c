"""A view as metric families of the reference client, in the order of the catalogue."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import (
    Metric as Family,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvwatch.derive.metrics import PREFIX
from kvwatch.exporters.identity import COMMON_LABELS, EngineIdentity
from kvwatch.ledger.view import HistogramSample, Sample, View
from kvwatch.telemetry.metrics import CATALOGUE
from kvwatch.telemetry.schema import Metric, MetricKind

SampleSource = Callable[[], Iterable[Sample]]
"""Gives samples that no view contains, such as metrics of the observatory itself. Called from any thread."""


class ViewCollector(Collector):
    """Collects the newest view. Any thread; knows no metric by name."""

    def __init__(self, view: Callable[[], View], sources: Sequence[SampleSource], identity: EngineIdentity) -> None:
        self._view = view
        self._sources = sources
        self._common = tuple(_printable(value) for value in identity.labels)

    def collect(self) -> Iterator[Family]:
        """Yield one family for each metric that has a sample."""
        view = self._view()
        by_name: dict[str, list[Sample | HistogramSample]] = defaultdict(list)
        shown: tuple[Sample | HistogramSample, ...] = (*view.gauges, *view.counters, *view.histograms)
        for sample in shown:
            by_name[sample.metric.name].append(sample)
        for source in self._sources:
            for extra in source():
                by_name[extra.metric.name].append(extra)
        for metric in CATALOGUE:
            samples = by_name.get(metric.name)
            if samples:
                yield self._family(metric, samples)

    def _family(self, metric: Metric, samples: Sequence[Sample | HistogramSample]) -> Family:
        name, names = PREFIX + metric.name, (*COMMON_LABELS, *metric.labels)
        family: CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
        if metric.kind is MetricKind.COUNTER:
            family = CounterMetricFamily(name, metric.brief, labels=names)
        elif metric.kind is MetricKind.GAUGE:
            family = GaugeMetricFamily(name, metric.brief, labels=names)
        else:
            family = HistogramMetricFamily(name, metric.brief, labels=names)
        for sample in samples:
            labels = (*self._common, *map(_printable, sample.labels))
            if isinstance(sample, HistogramSample):
                assert isinstance(family, HistogramMetricFamily)
                family.add_metric(labels, _buckets(metric, sample), sample.sum)
            else:
                assert not isinstance(family, HistogramMetricFamily)
                family.add_metric(labels, sample.value)
        return family


def _buckets(metric: Metric, sample: HistogramSample) -> list[tuple[str, float]]:
    bounds = [*map(floatToGoString, metric.buckets), "+Inf"]
    return list(zip(bounds, accumulate(sample.counts), strict=True))


def _printable(label: str) -> str:
    """Replace what UTF-8 cannot express (lone surrogates); the format itself escapes everything else."""
    return label.encode("utf-8", "replace").decode("utf-8")
