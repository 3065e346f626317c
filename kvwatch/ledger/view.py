"""The immutable view of one engine: what every exporter reads, from any thread."""

import msgspec

from kvwatch.telemetry.schema import Metric


class Sample(msgspec.Struct, frozen=True, gc=False):
    """One value of a counter or gauge; `labels` are values in the order of `metric.labels`."""

    metric: Metric
    labels: tuple[str, ...]
    value: float


class HistogramSample(msgspec.Struct, frozen=True, gc=False):
    """One histogram. `counts[i]` observations lie in (bound i-1, bound i]; the last are above all bounds."""

    metric: Metric
    labels: tuple[str, ...]
    counts: tuple[int, ...]
    sum: float
    bounds: tuple[float, ...]
    """Upper bounds in the metric's unit: those that it declares, and those that the operator added."""

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)


class View(msgspec.Struct, frozen=True):
    """State of one engine after event `seq`. Never changed after it was published.

    Gauges that are not known (nothing was loaded yet, nobody waits, no step was seen) are absent.
    """

    seq: int
    """Number of the newest event that is contained; -1 before any."""
    step: int
    time_ns: int
    """Monotonic time in ns as of which this is true: that of the newest event, or later if nothing happened since."""
    gauges: tuple[Sample, ...]
    counters: tuple[Sample, ...]
    histograms: tuple[HistogramSample, ...]

    def value(self, metric: Metric, *labels: str) -> float | None:
        """Return the value of one gauge or counter, or None when it is absent. O(samples)."""
        for sample in (*self.gauges, *self.counters):
            if sample.metric is metric and sample.labels == labels:
                return sample.value
        return None

    def histogram(self, metric: Metric, *labels: str) -> HistogramSample | None:
        """Return one histogram, or None when it is absent. O(histograms)."""
        for sample in self.histograms:
            if sample.metric is metric and sample.labels == labels:
                return sample
        return None
