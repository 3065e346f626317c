"""Counters and histograms that only grow, though the engine that is asked begins again at zero.

    engine   0 5 9 | restart | 2 4          ours   0 5 9 11 13

One reading that is smaller than the last means that the engine has begun anew. What it counted after the last scrape
and before its end is lost: nobody knows it.
"""

from collections.abc import Iterable

from kvwatch.ledger.view import HistogramSample, Sample
from kvwatch.telemetry.schema import Metric, MetricKind

Key = tuple[Metric, tuple[str, ...]]


class Totals:
    """The series of one rank. One thread at a time."""

    def __init__(self) -> None:
        self._readings: dict[Key, Sample | HistogramSample] = {}
        self._before: dict[Key, Sample | HistogramSample] = {}
        """What earlier lives of the engine had counted."""

    def update(self, samples: Iterable[Sample | HistogramSample]) -> list[Sample | HistogramSample]:
        """Take what a page says; return what we say: gauges as they are, the others going on.

        A counter that the page does not have any more keeps its value.
        """
        gauges: list[Sample | HistogramSample] = []
        for sample in samples:
            if sample.metric.kind is MetricKind.GAUGE:
                gauges.append(sample)
                continue
            key = (sample.metric, sample.labels)
            last = self._readings.get(key)
            if last is not None and _began_anew(last, sample):
                before = self._before.get(key)
                self._before[key] = last if before is None else _added(before, last)
            self._readings[key] = sample
        return [*gauges, *self.counters()]

    def counters(self) -> list[Sample | HistogramSample]:
        """Return counters and histograms as they were last known."""
        return [
            reading if key not in self._before else _added(self._before[key], reading)
            for key, reading in self._readings.items()
        ]


def _began_anew(last: Sample | HistogramSample, now: Sample | HistogramSample) -> bool:
    if isinstance(last, HistogramSample) and isinstance(now, HistogramSample):
        return last.bounds != now.bounds or any(b < a for a, b in zip(last.counts, now.counts, strict=True))
    assert isinstance(last, Sample), "a metric has one kind"
    assert isinstance(now, Sample), "a metric has one kind"
    return now.value < last.value


def _added(before: Sample | HistogramSample, now: Sample | HistogramSample) -> Sample | HistogramSample:
    if isinstance(before, HistogramSample) and isinstance(now, HistogramSample):
        if (
            before.bounds != now.bounds
        ):  # another version with other buckets: its predecessor's cannot be laid over them
            return now
        counts = tuple(a + b for a, b in zip(before.counts, now.counts, strict=True))
        return HistogramSample(now.metric, now.labels, counts, before.sum + now.sum, now.bounds)
    assert isinstance(before, Sample), "a metric has one kind"
    assert isinstance(now, Sample), "a metric has one kind"
    return Sample(now.metric, now.labels, before.value + now.value)
