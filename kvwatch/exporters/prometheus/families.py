"""A view as families of series, in the order of the catalogue. Knows no format."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from kvwatch.derive.metrics import PREFIX
from kvwatch.exporters.exemplars import Exemplar, ExemplarStore
from kvwatch.exporters.identity import COMMON_LABELS, EngineIdentity
from kvwatch.exporters.prometheus.aliases import alias_families
from kvwatch.exporters.prometheus.labels import printable
from kvwatch.ledger.view import HistogramSample, Sample, View
from kvwatch.telemetry.metrics import CATALOGUE
from kvwatch.telemetry.schema import Metric, MetricKind

SampleSource = Callable[[], Iterable[Sample | HistogramSample]]
"""Gives samples that no view contains, such as metrics of the observatory itself. Called from any thread."""


@dataclass(frozen=True, slots=True)
class HistogramSeries:
    """One series of a histogram, ready to be written."""

    bounds: tuple[float, ...]
    """Upper bounds, ascending, without +Inf."""
    counts: Sequence[int]
    """Observations at or below each bound, and at last all."""
    sum: float
    exemplars: tuple[tuple[int, Exemplar], ...] = ()
    """Buckets by number, ascending, and the trace of an observation that each has counted."""


Series = tuple[tuple[str, ...], float | HistogramSeries]
"""Label values in the order of the family's labels, and the value."""


@dataclass(frozen=True, slots=True)
class Family:
    """All series of one metric."""

    name: str
    """With prefix, without `_total`."""
    kind: MetricKind
    brief: str
    labels: tuple[str, ...]
    """Names of all labels, the common ones included."""
    series: list[Series] = field(default_factory=list)


class ViewCollector:
    """Gives the newest view. Any thread; knows no metric of the catalogue by name.

    Args:
        view: Returns the newest view.
        sources: Further samples.
        identity: Labels of every series; may be replaced later.
        exemplars: Traces for buckets.
        has_vllm_aliases: Whether vLLM's names are offered too.
    """

    def __init__(
        self,
        view: Callable[[], View],
        sources: Sequence[SampleSource],
        identity: EngineIdentity,
        *,
        exemplars: ExemplarStore | None = None,
        has_vllm_aliases: bool = False,
    ) -> None:
        self._view = view
        self._sources = sources
        self.identity = identity
        """Labels of every series."""
        self._exemplars = exemplars
        self._has_vllm_aliases = has_vllm_aliases

    def families(self) -> Iterator[Family]:
        """Yield one family for each metric that has a sample."""
        view = self._view()
        common = tuple(printable(value) for value in self.identity.labels)
        by_metric: dict[str, list[Sample | HistogramSample]] = defaultdict(list)
        shown: tuple[Sample | HistogramSample, ...] = (*view.gauges, *view.counters, *view.histograms)
        for sample in shown:
            by_metric[sample.metric.name].append(sample)
        for source in self._sources:
            for extra in source():
                by_metric[extra.metric.name].append(extra)
        for metric in CATALOGUE:
            samples = by_metric.get(metric.name)
            if samples:
                yield self._family(metric, samples, common)
        if self._has_vllm_aliases:
            yield from self._aliases(view)

    def _family(self, metric: Metric, samples: Sequence[Sample | HistogramSample], common: tuple[str, ...]) -> Family:
        family = Family(PREFIX + metric.name, metric.kind, metric.brief, (*COMMON_LABELS, *metric.labels))
        for sample in samples:
            labels = (*common, *map(printable, sample.labels))
            value = self._histogram(sample) if isinstance(sample, HistogramSample) else sample.value
            family.series.append((labels, value))
        return family

    def _aliases(self, view: View) -> Iterator[Family]:
        for alias in alias_families(view, self.identity):
            family = Family(alias.name, alias.kind, alias.brief, alias.labels)
            for labels, value in alias.values:
                family.series.append((labels, value if alias.histogram is None else _cumulative(alias.histogram)))
            yield family

    def _histogram(self, sample: HistogramSample) -> HistogramSeries:
        if self._exemplars is None or sample.labels:
            return _cumulative(sample)
        return _cumulative(sample, tuple(self._found(self._exemplars, sample)))

    @staticmethod
    def _found(exemplars: ExemplarStore, sample: HistogramSample) -> Iterator[tuple[int, Exemplar]]:
        """Yield the exemplars of observations that the buckets have counted."""
        bounds = (float("-inf"), *sample.bounds, float("inf"))
        for bucket, count in enumerate(sample.counts):
            found = exemplars.find(sample.metric, bucket) if count else None
            if found is not None and bounds[bucket] < found.value <= bounds[bucket + 1]:
                yield bucket, found


def _cumulative(sample: HistogramSample, exemplars: tuple[tuple[int, Exemplar], ...] = ()) -> HistogramSeries:
    return HistogramSeries(sample.bounds, list(accumulate(sample.counts)), sample.sum, exemplars)
