"""Counters and histograms, fed by declarations alone."""

from typing import Annotated, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwatch.errors import SchemaError
from kvwatch.ledger.series import SeriesSettings
from kvwatch.ledger.store import MetricStore
from kvwatch.telemetry import events as ev
from kvwatch.telemetry import metrics
from kvwatch.telemetry.schema import (
    REGISTRY,
    Amount,
    Event,
    EventSpec,
    Feed,
    FieldSpec,
    Metric,
    MetricKind,
    Registry,
    amount_of,
    each_of,
    label,
    one,
    size_of,
    sum_of,
    value,
    weighted,
)

COUNTER = Metric(MetricKind.COUNTER, "things", "Things.", "1", ("color",))
BY_COLOR = Metric(MetricKind.HISTOGRAM, "colored_seconds", "Wait.", "seconds", ("color",), buckets=(0.1, 1.0))
BOUNDS_NS = st.sampled_from([100_000_000, 300_000_000, 1_000_000_000])
SECONDS = Metric(MetricKind.HISTOGRAM, "wait_seconds", "Wait.", "seconds", buckets=(0.1, 0.3, 1.0))


class Happened(Event):
    color: Literal["red", "green"]
    waits_ns: list[int]
    weights: list[int]
    wait_ns: int | None = None


FIELDS: dict[str, tuple[FieldSpec, object]] = {
    "color": (label(1, "Color."), Literal["red", "green"]),
    "waits_ns": (value(2, "Waits.", "ns"), list[int]),
    "weights": (value(3, "Weights.", "1"), list[int]),
    "wait_ns": (value(4, "Wait.", "ns"), int | None),
}


def make_store(*feeds: Feed) -> MetricStore:
    registry = Registry()
    fields = {name: spec for name, (spec, _) in FIELDS.items()}
    types = {name: hint for name, (_, hint) in FIELDS.items()}
    registry.add(EventSpec(1, "test.happened", "It happened.", Happened, fields, types, feeds))
    return MetricStore(registry)


def happened(*waits_ns: int, weights: tuple[int, ...] = (), wait_ns: int | None = None) -> Happened:
    return Happened(color="red", waits_ns=list(waits_ns), weights=list(weights), wait_ns=wait_ns)


def counts(store: MetricStore) -> dict[tuple[str, ...], float]:
    return {sample.labels: sample.value for sample in store.counters()}


def test_series_whose_labels_are_known_in_advance_begin_at_zero() -> None:
    store = make_store(COUNTER.count())

    assert counts(store) == {("red",): 0, ("green",): 0}


@pytest.mark.parametrize(
    ("amount", "expected"), [(one(), 1), (size_of("waits_ns"), 3), (sum_of("weights"), 9), (amount_of("wait_ns"), 7)]
)
def test_a_counter_adds_what_its_declaration_says(amount: Amount, expected: int) -> None:
    store = make_store(COUNTER.count(amount))

    store.feed([happened(1, 2, 3, weights=(4, 5, 0), wait_ns=7)])

    assert counts(store) == {("red",): expected, ("green",): 0}


HAPPENINGS = st.builds(
    lambda color, weighted_waits, wait_ns: Happened(
        color=color,
        waits_ns=[wait for wait, _ in weighted_waits],
        weights=[weight for _, weight in weighted_waits],
        wait_ns=wait_ns,
    ),
    st.sampled_from(["red", "green"]),
    st.lists(st.tuples(st.integers(0, 2 * 10**9) | BOUNDS_NS, st.integers(0, 9)), max_size=5),
    st.none() | st.integers(0, 2 * 10**9) | BOUNDS_NS,
)


@settings(max_examples=100, deadline=None)
@given(events=st.lists(HAPPENINGS, max_size=12))
def test_events_that_are_fed_together_count_as_much_as_fed_one_by_one(events: list[Happened]) -> None:
    feeds = (
        *(COUNTER.count(amount) for amount in (one(), size_of("waits_ns"), sum_of("weights"), amount_of("wait_ns"))),
        COUNTER.count(size_of("weights"), color="blue"),
        SECONDS.observe(amount_of("wait_ns", 1e-9)),
        SECONDS.observe(each_of("waits_ns", 1e-9)),
        SECONDS.observe(weighted("waits_ns", "weights", 1e-9)),
        BY_COLOR.observe(each_of("waits_ns", 1e-9)),
    )
    at_once, one_by_one = make_store(*feeds), make_store(*feeds)

    at_once.feed(events)
    for event in events:
        one_by_one.feed([event])

    assert counts(at_once) == counts(one_by_one)
    assert at_once.histograms() == one_by_one.histograms()
    waits = [wait for event in events for wait in event.waits_ns]
    observed = {h.labels: h.counts for h in at_once.histograms() if h.metric is BY_COLOR}
    assert sum(map(sum, observed.values())) == len(waits)
    assert sum(counts[0] for counts in observed.values()) == sum(wait <= 100_000_000 for wait in waits)


def test_a_constant_label_needs_no_field() -> None:
    store = make_store(COUNTER.count(color="blue"))

    store.feed([happened()])

    assert counts(store) == {("blue",): 1}


def test_an_observation_on_a_bound_falls_into_its_bucket_although_it_is_measured_in_ns() -> None:
    store = make_store(SECONDS.observe(each_of("waits_ns", 1e-9)))

    store.feed([happened(100_000_000, 300_000_000, 300_000_001, 1_000_000_000, 1_000_000_001)])

    (histogram,) = store.histograms()
    assert histogram.counts == (1, 1, 2, 1)
    assert histogram.count == 5


def test_sums_are_exact_however_many_observations() -> None:
    store = make_store(SECONDS.observe(amount_of("wait_ns", 1e-9)))

    for _ in range(1000):
        store.feed([happened(wait_ns=100_000_000)])

    assert store.histograms()[0].sum == 100.0  # ten times 0.1 alone is not 1.0 in floating point


def test_what_was_never_measured_is_observed_nowhere() -> None:
    """vllm#49135: requests that end before a milestone must not yield latencies as long as the host is up."""
    store = make_store(SECONDS.observe(amount_of("wait_ns", 1e-9)), COUNTER.count(amount_of("wait_ns")))

    store.feed([happened(wait_ns=None)])

    assert store.histograms()[0].count == 0
    assert counts(store)[("red",)] == 0


def test_a_weight_observes_as_often_as_it_says() -> None:
    store = make_store(SECONDS.observe(weighted("waits_ns", "weights", 1e-9)))

    store.feed([happened(50_000_000, 2_000_000_000, weights=(10, 3))])

    (histogram,) = store.histograms()
    assert histogram.counts == (10, 0, 0, 3)
    assert histogram.sum == 6.5


@pytest.mark.parametrize(
    "feed",
    [
        COUNTER.count(each_of("waits_ns")),
        SECONDS.observe(one()),
        SECONDS.observe(size_of("waits_ns")),
        COUNTER.count(amount_of("wait_ns", 0.3)),
        Feed(Metric(MetricKind.GAUGE, "level", "Level.", "1"), one()),
    ],
)
def test_a_feed_that_does_not_suit_its_metric_is_refused(feed: Feed) -> None:
    with pytest.raises(SchemaError, match=r"use |must be|read it from"):
        make_store(feed)


def test_two_feeds_of_one_metric_must_agree_on_the_unit() -> None:
    with pytest.raises(SchemaError, match="wait_seconds is fed with scales"):
        make_store(SECONDS.observe(amount_of("wait_ns", 1e-9)), SECONDS.observe(amount_of("wait_ns", 1e-3)))


def test_an_event_may_only_give_labels_that_it_declares_as_such() -> None:
    registry = Registry()
    hint = Annotated[int, value(1, "Not a label.", "1")]
    spec = EventSpec(
        1, "test.bad", "Bad.", Happened, {"color": value(1, "x", "1")}, {"color": hint}, (COUNTER.count(),)
    )

    with pytest.raises(SchemaError, match="whose label color is no label field"):
        registry.add(spec)


def test_every_declared_feed_compiles_and_every_event_class_has_an_entry() -> None:
    store = MetricStore(REGISTRY)

    assert set(store.feeds) == {spec.cls for spec in REGISTRY}


def test_an_aborted_request_is_counted_once_and_adds_no_phantom_latency() -> None:
    """vllm#55634, #31503: aborts were missing from the counter, or added samples of steps that never were."""
    store = MetricStore(REGISTRY)

    event = ev.RequestFinished(
        request="r",
        reason="abort",
        prompt_tokens=5,
        generated_tokens=0,
        cached_tokens=0,
        num_preemptions=0,
        peak_blocks=None,
        queue_ns=None,
        prefill_ns=None,
        decode_ns=None,
        end_to_end_ns=None,
    )
    store.feed([event])

    finished = {s.labels: s.value for s in store.counters() if s.metric is metrics.REQUESTS_FINISHED and s.value}
    observed = {h.metric.name: h.count for h in store.histograms() if h.count}
    assert finished == {("abort", "", ""): 1}
    assert observed == {"request_prompt_tokens": 1, "request_generated_tokens": 1}


def test_fifty_adapters_and_a_thousand_tenants_add_no_series_to_any_store() -> None:
    """llm-d-batch-gateway#202, vllm#11117 (O70): one series for each tenant or adapter that callers name."""
    store = MetricStore(REGISTRY, SeriesSettings({"tenant": frozenset({"t7"})}))
    before = {(sample.metric.name, sample.labels) for sample in store.counters()}
    for number in range(1000):
        store.feed([finished(f"r{number}", tenant=f"t{number}", lora=f"adapter-{number % 50}")])
    store.feed([finished("plain", tenant="", lora="")])

    counted = {s.labels: s.value for s in store.counters() if s.metric is metrics.REQUESTS_FINISHED and s.value}
    assert {(sample.metric.name, sample.labels) for sample in store.counters()} == before
    assert counted == {("stop", "other", "t7"): 1, ("stop", "other", "other"): 999, ("stop", "", ""): 1}


def finished(request: str, *, tenant: str, lora: str) -> ev.RequestFinished:
    return ev.RequestFinished(request, "stop", 1, 1, 0, 0, 1, 1, 1, 1, 1, tenant=tenant, lora=lora)
