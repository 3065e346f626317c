"""Compiles an event's declared feeds into functions that change counters and histograms.

Quantities are added as the integers that the events carry (ns, tokens, blocks) and become base units only when they
are read: sums stay exact, and an observation that lies on a bucket's bound falls into that bucket.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain, product, repeat
from operator import attrgetter
from typing import Any

from kvwatch.errors import SchemaError
from kvwatch.ledger.series import OTHER, SeriesSettings
from kvwatch.telemetry.schema import Amount, Event, EventSpec, Feed, Metric, MetricKind, label_values

Labels = tuple[str, ...]
Choices = Mapping[str, tuple[str, ...]]
"""For each label of a metric: the values that it can have."""
FeedFunction = Callable[[Sequence[Any]], None]
"""Takes events of the class it was compiled for: many at once, so that what they have in common is done once."""


class Family:
    """All series of one metric. `divisor` turns the integers that are added into the metric's base unit."""

    __slots__ = ("divisor", "metric")

    def __init__(self, metric: Metric, divisor: int) -> None:
        self.metric = metric
        self.divisor = divisor


class CounterFamily(Family):
    """Series of a counter."""

    __slots__ = ("cells",)

    def __init__(self, metric: Metric, divisor: int) -> None:
        super().__init__(metric, divisor)
        self.cells: defaultdict[Labels, int] = defaultdict(int)

    def touch(self, labels: Labels) -> None:
        """Let the series exist, at 0 when it is new."""
        self.cells[labels] += 0


class HistogramCell:
    """One series of a histogram."""

    __slots__ = ("counts", "total")

    def __init__(self, num_bounds: int) -> None:
        self.counts = [0] * (num_bounds + 1)
        self.total = 0


class HistogramFamily(Family):
    """Series of a histogram."""

    __slots__ = ("bounds", "buckets", "cells")

    def __init__(self, metric: Metric, divisor: int, buckets: Sequence[float]) -> None:
        super().__init__(metric, divisor)
        self.buckets = tuple(buckets)
        """Upper bounds in the metric's base unit."""
        self.bounds = [round(bound * divisor) if divisor > 1 else bound for bound in self.buckets]
        """Upper bounds in the unit of the observations."""
        self.cells: dict[Labels, HistogramCell] = {}

    def touch(self, labels: Labels) -> HistogramCell:
        """Return the series, empty when it is new."""
        cell = self.cells.get(labels)
        if cell is None:
            cell = self.cells[labels] = HistogramCell(len(self.bounds))
        return cell


def divisor_of(amount: Amount) -> int:
    """Return the integer by which quantities of this amount are divided to get base units.

    Raises:
        SchemaError: the scale is neither 1 nor one over an integer.
    """
    divisor = round(1 / amount.scale)
    if divisor < 1 or abs(divisor * amount.scale - 1) > 1e-9:
        raise SchemaError(
            f"scale {amount.scale} of field {amount.field} must be 1 or one over an integer, such as 1e-9"
        )
    return divisor


def label_choices(feed: Feed, spec: EventSpec, settings: SeriesSettings) -> Choices:
    """Return the values that each label can have.

    A label whose values the event does not declare is open: callers choose them. It has those that the settings give,
    so that no caller can make series.
    """
    known = {name: (value,) for name, value in feed.constants} | dict(feed.metric.label_values)
    return {name: known.get(name) or label_values(spec, name) or settings.values(name) for name in feed.metric.labels}


def all_labels(choices: Choices) -> list[Labels]:
    """Return every combination of labels."""
    return list(product(*choices.values()))


def compile_feed(feed: Feed, family: Family, choices: Choices) -> FeedFunction:
    """Return a function that adds to `family` what events contribute.

    Raises:
        SchemaError: the form of the amount does not suit the kind of the metric.
    """
    if isinstance(family, CounterFamily):
        return _counter_feed(feed, family, choices)
    assert isinstance(family, HistogramFamily)
    return _histogram_feed(feed, family, choices)


def _fixed_labels(feed: Feed) -> Labels | None:
    """Return the labels when no event can change them."""
    constants = dict(feed.constants)
    if any(name not in constants for name in feed.metric.labels):
        return None
    return tuple(constants[name] for name in feed.metric.labels)


def _labels_getter(feed: Feed, choices: Choices) -> Callable[[Event], Labels]:
    names, constants = feed.metric.labels, dict(feed.constants)
    if any(OTHER in values for values in choices.values()):
        known = [(name, frozenset(choices[name])) for name in names]
        return lambda event: tuple(
            constants[name] if name in constants else _fold(getattr(event, name), values) for name, values in known
        )
    if not constants and len(names) > 1:
        return attrgetter(*names)
    return lambda event: tuple(constants[n] if n in constants else getattr(event, n) for n in names)


def _fold(value: str, known: Collection[str]) -> str:
    return value if value in known else OTHER


# ---------------------------------------------------------------- counters


def _counter_feed(feed: Feed, family: CounterFamily, choices: Choices) -> FeedFunction:
    measure = _measure(feed)
    skips_nothing = feed.amount.form == "field"
    cells, fixed = family.cells, _fixed_labels(feed)
    if fixed is not None:

        def add_up(events: Sequence[Event]) -> None:
            amount = sum(measure(events))
            if amount or not skips_nothing:
                cells[fixed] += amount

        return add_up
    labels = _labels_getter(feed, choices)

    def add_each(events: Sequence[Event]) -> None:
        for event, amount in zip(events, measure(events), strict=True):
            if amount or not skips_nothing:  # nothing of a tier that the engine has not must make a series of it
                cells[labels(event)] += amount

    return add_each


def _measure(feed: Feed) -> Callable[[Sequence[Event]], Iterable[int]]:
    """Return a function that gives what each event adds to a counter."""
    form = feed.amount.form
    if form == "one":
        return lambda events: repeat(1, len(events))
    quantity = attrgetter(feed.amount.field)
    if form == "field":
        return lambda events: [quantity(event) or 0 for event in events]
    if form == "size":
        return lambda events: map(len, map(quantity, events))
    if form == "sum":
        return lambda events: map(sum, map(quantity, events))
    raise SchemaError(f"counter {feed.metric.name} cannot be fed by {form!r}; use one, field, size or sum")


# ---------------------------------------------------------------- histograms


def _histogram_feed(feed: Feed, family: HistogramFamily, choices: Choices) -> FeedFunction:
    observe = _observer(feed, family.bounds)
    fixed = _fixed_labels(feed)
    if fixed is not None:
        cell = family.touch(fixed)
        return lambda events: observe(cell, events)
    labels = _labels_getter(feed, choices)

    def observe_each(events: Sequence[Event]) -> None:
        for event in events:
            observe(family.touch(labels(event)), (event,))

    return observe_each


def _observer(feed: Feed, bounds: list[float]) -> Callable[[HistogramCell, Sequence[Event]], None]:
    """Return a function that enters what events let a histogram observe."""
    form, quantity = feed.amount.form, attrgetter(feed.amount.field)
    if form == "field":
        return lambda cell, events: _observe(
            cell, bounds, [value for value in map(quantity, events) if value is not None]
        )
    if form == "each":
        return lambda cell, events: _observe(cell, bounds, list(chain.from_iterable(map(quantity, events))))
    if form != "weighted":
        raise SchemaError(f"histogram {feed.metric.name} cannot be fed by {form!r}; use field, each or weighted")
    weights = attrgetter(feed.amount.weights)

    def observe_weighted(cell: HistogramCell, events: Sequence[Event]) -> None:
        counts = cell.counts
        for event in events:
            for value, weight in zip(quantity(event), weights(event), strict=True):
                counts[bisect_left(bounds, value)] += weight
                cell.total += value * weight

    return observe_weighted


def _observe(cell: HistogramCell, bounds: list[float], values: list[int]) -> None:
    """Enter observations. Those of a while mostly fall into few buckets: of each run of them one place is looked up."""
    values.sort()
    counts, num_bounds, num_values = cell.counts, len(bounds), len(values)
    cell.total += sum(values)
    start = 0
    while start < num_values:
        bucket = bisect_left(bounds, values[start])
        end = bisect_right(values, bounds[bucket], start) if bucket < num_bounds else num_values
        counts[bucket] += end - start
        start = end


def make_family(metric: Metric, divisor: int, settings: SeriesSettings) -> CounterFamily | HistogramFamily:
    """Return an empty family for a metric that events can feed.

    Raises:
        SchemaError: the metric is a gauge; gauges are read from the ledger's state.
    """
    if metric.kind is MetricKind.COUNTER:
        return CounterFamily(metric, divisor)
    if metric.kind is MetricKind.HISTOGRAM:
        return HistogramFamily(metric, divisor, settings.bounds(metric))
    raise SchemaError(f"gauge {metric.name} cannot be fed by an event; read it from the ledger's state")
