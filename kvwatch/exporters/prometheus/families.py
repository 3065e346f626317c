"""A view as families of series, in the order of the catalogue. Knows no format."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
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


Samples = list[Sample | HistogramSample]

Series = tuple[tuple[str, ...], float | HistogramSeries]
"""Label values in the order of the family's labels, and the value."""


@dataclass(frozen=True, slots=True)
class Family:
    """All series of one metric. Never changed: writers keep what they wrote of it."""

    name: str
    """With prefix, without `_total`."""
    kind: MetricKind
    brief: str
    labels: tuple[str, ...]
    """Names of all labels, the common ones included."""
    series: Sequence[Series]


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a family was made of, and the family."""

    common: tuple[str, ...]
    samples: Samples
    family: Family


class ViewCollector:
    """Gives the newest view. Any thread; knows no metric of the catalogue by name.

    From one second to the next most series stand still: their families are given again as they are, so that a writer
    can tell by looking at no value.

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
        self._kept: dict[str, _Kept] = {}

    def families(self) -> Iterator[Family]:
        """Yield one family for each metric that has a sample."""
        view = self._view()
        common = tuple(printable(value) for value in self.identity.labels)
        by_metric: dict[str, Samples] = defaultdict(list)
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

    def _family(self, metric: Metric, samples: Samples, common: tuple[str, ...]) -> Family:
        if self._exemplars is not None and self._exemplars.knows(metric):  # marks come though nothing is counted
            return self._make_family(metric, samples, common)
        kept = self._kept.get(metric.name)
        if kept is None or kept.common != common or kept.samples != samples:
            family = self._make_family(metric, samples, common, kept if kept and kept.common == common else None)
            kept = self._kept[metric.name] = _Kept(common, samples, family)
        return kept.family

    def _make_family(
        self, metric: Metric, samples: Samples, common: tuple[str, ...], last: _Kept | None = None
    ) -> Family:
        """Return a family; `last` is what was made the last time with the same common labels."""
        if last is not None and [each.labels for each in last.samples] == [each.labels for each in samples]:
            label_sets = [labels for labels, _ in last.family.series]
        else:
            label_sets = [(*common, *map(printable, sample.labels)) for sample in samples]
        series = tuple(
            [
                (labels, self._histogram(sample) if isinstance(sample, HistogramSample) else sample.value)
                for labels, sample in zip(label_sets, samples, strict=True)
            ]
        )
        return Family(PREFIX + metric.name, metric.kind, metric.brief, (*COMMON_LABELS, *metric.labels), series)

    def _aliases(self, view: View) -> Iterator[Family]:
        for alias in alias_families(view, self.identity):
            histogram = None if alias.histogram is None else _cumulative(alias.histogram)
            series = tuple((labels, value if histogram is None else histogram) for labels, value in alias.values)
            yield Family(alias.name, alias.kind, alias.brief, alias.labels, series)

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
