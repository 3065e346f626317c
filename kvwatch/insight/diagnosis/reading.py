"""Two looks at one engine, and what grew between them.

Everything that a source does not tell raises `Unseen`: rules read on as if all were known, and whoever applies them
notes which could not judge. So no rule can mistake absent for zero.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvwatch.derive.metrics import full_name
from kvwatch.ledger.view import HistogramSample, Sample
from kvwatch.telemetry.schema import Metric


class Unseen(Exception):
    """A source does not tell a metric, or it began anew between the two looks. Never leaves this package."""

    def __init__(self, metric: Metric) -> None:
        super().__init__(full_name(metric))
        self.metric = metric


@dataclass(frozen=True, slots=True)
class Reading:
    """What one look at an engine found."""

    seconds: float
    """When it was taken, on any clock that only goes forward."""
    samples: Sequence[Sample | HistogramSample]
    """As the ledger's view and the metrics page have them."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Observations of a histogram between two looks."""

    count: int
    total: float
    """Sum of the observations, in the metric's unit."""

    @property
    def mean(self) -> float:
        """Mean observation; 0 when there was none."""
        return self.total / self.count if self.count else 0.0


class Observation:
    """An engine between two looks. Labels that a call leaves out are summed over.

    Args:
        before: The earlier look.
        now: The later one, of the same engine.
    """

    def __init__(self, before: Reading, now: Reading) -> None:
        self.seconds = now.seconds - before.seconds
        """Time between the two looks; above 0."""
        self._before = _by_name(before.samples)
        self._now = _by_name(now.samples)

    def knows(self, metric: Metric) -> bool:
        """Return whether the source tells this metric."""
        return metric.name in self._now

    def now(self, metric: Metric, **labels: str) -> float:
        """Return a gauge's or a counter's value at the later look.

        Raises:
            Unseen: no series fits.
        """
        return _total(self._now, metric, labels)

    def least(self, metric: Metric, **labels: str) -> float:
        """Return the smaller of a gauge's two values: what held at both looks.

        Raises:
            Unseen: no series fits.
        """
        return min(self.now(metric, **labels), _total(self._before, metric, labels))

    def most(self, metric: Metric, **labels: str) -> float:
        """Return the larger of a gauge's two values.

        Raises:
            Unseen: no series fits.
        """
        return max(self.now(metric, **labels), _total(self._before, metric, labels))

    def growth(self, metric: Metric, **labels: str) -> float:
        """Return what a counter grew by. A series that is new counts from 0 if others of its metric were there.

        Raises:
            Unseen: no series fits, or it is smaller than it was: the engine began anew.
        """
        if metric.name not in self._before:
            raise Unseen(metric)
        now = _total(self._now, metric, labels)
        before = _total(self._before, metric, labels, absent=0.0)
        if now < before:
            raise Unseen(metric)
        return now - before

    def spread(self, metric: Metric, **labels: str) -> Spread:
        """Return what a histogram observed between the looks.

        Raises:
            Unseen: no series fits, or it began anew.
        """
        now, before = _histograms(self._now, metric, labels), _histograms(self._before, metric, labels)
        if not now or metric.name not in self._before:
            raise Unseen(metric)
        count = sum(each.count for each in now) - sum(each.count for each in before)
        total = sum(each.sum for each in now) - sum(each.sum for each in before)
        if count < 0:
            raise Unseen(metric)
        return Spread(count, max(total, 0.0))


_Index = dict[str, list[Sample | HistogramSample]]


def _by_name(samples: Iterable[Sample | HistogramSample]) -> _Index:
    found: _Index = defaultdict(list)
    for sample in samples:
        found[sample.metric.name].append(sample)
    return dict(found)


def _matching(index: _Index, metric: Metric, labels: dict[str, str]) -> Iterable[Sample | HistogramSample]:
    wanted = [(metric.labels.index(name), value) for name, value in labels.items()]
    for sample in index.get(metric.name, ()):
        if all(sample.labels[place] == value for place, value in wanted):
            yield sample


def _total(index: _Index, metric: Metric, labels: dict[str, str], absent: float | None = None) -> float:
    values = [each.value for each in _matching(index, metric, labels) if isinstance(each, Sample)]
    if values:
        return sum(values)
    if absent is None:
        raise Unseen(metric)
    return absent


def _histograms(index: _Index, metric: Metric, labels: dict[str, str]) -> list[HistogramSample]:
    return [each for each in _matching(index, metric, labels) if isinstance(each, HistogramSample)]
