"""Counters and histograms of one engine, fed generically by the events' declarations.

Knows nothing of any single event or metric: a new feed in `kvwatch.telemetry.events` is counted here without a change.
"""

from collections.abc import Collection, Iterable

from kvwatch.errors import SchemaError
from kvwatch.ledger.feeds import (
    Choices,
    CounterFamily,
    FeedFunction,
    HistogramFamily,
    all_labels,
    compile_feed,
    divisor_of,
    label_choices,
    make_family,
)
from kvwatch.ledger.series import TIER, SeriesSettings
from kvwatch.ledger.view import HistogramSample, Sample
from kvwatch.telemetry.schema import Event, EventSpec, Metric, Registry

FIRST_TIER = "device"
"""The tier that every engine has."""


class MetricStore:
    """Values of every counter and histogram that events feed. Observatory thread only.

    All series exist from the beginning, at 0: a counter that appears only with its first increment would hide that
    increment from `rate()`. No event can add one. Series of a tier exist as soon as the engine is known to have it.
    """

    def __init__(
        self, registry: Registry, settings: SeriesSettings | None = None, foreign: Collection[Metric] | None = None
    ) -> None:
        """Make the series.

        Args:
            registry: Declares what feeds what.
            settings: Allow-lists of labels and further bounds of histograms.
            foreign: For a foreign engine the metrics that its events can feed: the others would stand at 0 for ever.
        """
        self._settings = settings or SeriesSettings()
        self._foreign = foreign
        self._families: dict[Metric, CounterFamily | HistogramFamily] = {}
        self._choices: list[tuple[CounterFamily | HistogramFamily, Choices]] = []
        self._tiers = {FIRST_TIER}
        self.feeds: dict[type[Event], tuple[FeedFunction, ...]] = {
            spec.cls: tuple(self._compile(spec)) for spec in registry
        }
        """For each event class: functions to be called with all events of that class."""

    def feed(self, events: Iterable[Event]) -> None:
        """Count events, in any order."""
        by_class: dict[type[Event], list[Event]] = {}
        for event in events:
            cls = type(event)
            if cls in by_class:
                by_class[cls].append(event)
            else:
                by_class[cls] = [event]
        for cls, found in by_class.items():
            for feed in self.feeds[cls]:
                feed(found)

    def open_tiers(self, tiers: Collection[str]) -> None:
        """Let the series of these tiers exist, at 0 where they are new; an engine without a tier shows none of it."""
        new = set(tiers) - self._tiers
        if not new:
            return
        self._tiers |= new
        for family, choices in self._choices:
            if TIER in choices:
                self._touch(family, choices)

    def counter(self, metric: Metric, divisor: int = 1) -> CounterFamily:
        """Return a counter that the caller feeds itself, in integers of 1/`divisor` of the metric's unit."""
        family = self._family(metric, divisor)
        assert isinstance(family, CounterFamily)
        if not metric.labels:
            family.touch(())
        return family

    def counters(self) -> list[Sample]:
        """Return all counters as they are now."""
        return [
            Sample(family.metric, labels, _in_base_unit(amount, family.divisor))
            for family in self._families.values()
            if isinstance(family, CounterFamily)
            for labels, amount in family.cells.items()
        ]

    def histograms(self) -> list[HistogramSample]:
        """Return all histograms as they are now."""
        return [
            HistogramSample(
                family.metric, labels, tuple(cell.counts), _in_base_unit(cell.total, family.divisor), family.buckets
            )
            for family in self._families.values()
            if isinstance(family, HistogramFamily)
            for labels, cell in family.cells.items()
        ]

    def _compile(self, spec: EventSpec) -> list[FeedFunction]:
        functions = []
        for feed in spec.feeds:
            if self._foreign is not None and feed.metric not in self._foreign:
                continue
            family = self._family(feed.metric, divisor_of(feed.amount))
            choices = label_choices(feed, spec, self._settings)
            self._choices.append((family, {name: self._begins(spec, name, of) for name, of in choices.items()}))
            self._touch(*self._choices[-1])
            functions.append(compile_feed(feed, family, choices))
        return functions

    def _begins(self, spec: EventSpec, label: str, choices: tuple[str, ...]) -> tuple[str, ...]:
        """Return the values of a label whose series exist from the beginning in this kind of engine."""
        foreign = spec.fields[label].foreign_values if label in spec.fields else ()
        if not foreign:
            return choices
        return tuple(value for value in choices if (value in foreign) == (self._foreign is not None))

    def _touch(self, family: CounterFamily | HistogramFamily, choices: Choices) -> None:
        if TIER in choices:
            choices = {**choices, TIER: tuple(tier for tier in choices[TIER] if tier in self._tiers)}
        for labels in all_labels(choices):
            family.touch(labels)

    def _family(self, metric: Metric, divisor: int) -> CounterFamily | HistogramFamily:
        family = self._families.get(metric)
        if family is None:
            family = self._families[metric] = make_family(metric, divisor, self._settings)
        elif family.divisor != divisor:
            raise SchemaError(f"{metric.name} is fed with scales 1/{family.divisor} and 1/{divisor}; use one")
        return family


def _in_base_unit(amount: int, divisor: int) -> float:
    return amount / divisor if divisor != 1 else amount
