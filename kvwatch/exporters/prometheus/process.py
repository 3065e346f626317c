"""Metrics of the observatory itself, read when a page is rendered."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from kvwatch import __version__
from kvwatch.ledger.view import Sample
from kvwatch.telemetry import metrics as m


class SubscriberCounts(Protocol):
    """What a subscriber of the log tells about itself. Any thread may read it."""

    @property
    def name(self) -> str:
        """Value of the label `subscriber`."""
        ...

    @property
    def lag(self) -> int:
        """Events appended and not yet read."""
        ...

    @property
    def num_gaps(self) -> int:
        """Times events were lost."""
        ...

    @property
    def num_dropped(self) -> int:
        """Events lost."""
        ...

    @property
    def num_errors(self) -> int:
        """Errors inside the subscriber."""
        ...


def subscriber_samples(subscribers: Iterable[SubscriberCounts]) -> Iterable[Sample]:
    """Return what subscribers of one log tell about themselves, as it is now."""
    for each in subscribers:
        labels = (each.name,)
        yield Sample(m.TELEMETRY_GAPS, labels, each.num_gaps)
        yield Sample(m.TELEMETRY_DROPPED, labels, each.num_dropped)
        yield Sample(m.TELEMETRY_LAG, labels, each.lag)
        yield Sample(m.TELEMETRY_ERRORS, labels, each.num_errors)


class ProcessMetrics:
    """A source of samples for `ViewCollector`.

    Args:
        subscribers: Returns the subscribers of the log.
        cpu_seconds: Returns the processor time used so far by each of the observatory's threads.
    """

    def __init__(
        self, subscribers: Callable[[], Sequence[SubscriberCounts]], cpu_seconds: Callable[[], Mapping[str, float]]
    ) -> None:
        self._subscribers = subscribers
        self._cpu_seconds = cpu_seconds

    def __call__(self) -> Iterable[Sample]:
        """Return the samples as they are now."""
        yield Sample(m.BUILD_INFO, (__version__,), 1)
        yield from subscriber_samples(self._subscribers())
        for thread, seconds in self._cpu_seconds().items():
            yield Sample(m.TELEMETRY_CPU, (thread,), seconds)
