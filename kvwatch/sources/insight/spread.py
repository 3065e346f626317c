"""A histogram that is filled by hand."""

from bisect import bisect_left

from kvwatch.ledger.view import HistogramSample
from kvwatch.telemetry.schema import Metric


class Spread:
    """Observations of one metric with one set of labels. One thread fills it, any reads it."""

    def __init__(self, metric: Metric, labels: tuple[str, ...]) -> None:
        self._metric = metric
        self._labels = labels
        self._counts = [0] * (len(metric.buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one observation, in the metric's unit."""
        self._counts[bisect_left(self._metric.buckets, value)] += 1
        self._sum += value

    def sample(self) -> HistogramSample:
        """Return what was observed so far."""
        return HistogramSample(self._metric, self._labels, tuple(self._counts), self._sum, self._metric.buckets)
