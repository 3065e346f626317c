"""Our writer: the reference client's bytes, for a fraction of its time."""

from itertools import accumulate
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_exposition import reference_page

from kvwatch.derive.scenario import ScenarioClock, opening_snapshot, play
from kvwatch.exporters.exemplars import Exemplar, ExemplarStore
from kvwatch.exporters.identity import EngineIdentity
from kvwatch.exporters.prometheus.families import Family, HistogramSeries, ViewCollector
from kvwatch.exporters.prometheus.gateway import gateway_samples
from kvwatch.exporters.prometheus.labels import printable
from kvwatch.exporters.prometheus.writer import Format, PageWriter
from kvwatch.ledger.mirror import Mirror
from kvwatch.ledger.view import Sample
from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.schema import MetricKind

FORMS: tuple[Format, ...] = get_args(Format)

names = st.from_regex(r"[a-z]{1,8}(:[a-z]{1,4})?", fullmatch=True)
label_names = st.lists(st.sampled_from(["engine", "state", "tier", "Z", "a_b"]), unique=True, max_size=4).map(tuple)
values = st.text(alphabet='ab\\"\n{},=é🦊 ', max_size=8).map(printable)
numbers = st.one_of(st.integers(0, 10**15), st.floats(allow_nan=False).map(lambda value: value + 0.0))  # no -0.0


@st.composite
def exemplars(draw: st.DrawFn, num_buckets: int) -> tuple[tuple[int, Exemplar], ...]:
    buckets = sorted(draw(st.sets(st.integers(0, num_buckets - 1), max_size=3)))
    return tuple(
        (each, Exemplar(draw(st.floats(1e-6, 1e6)), "ab" * 16, "cd" * 8, draw(st.floats(1, 2e9)))) for each in buckets
    )


@st.composite
def histograms(draw: st.DrawFn) -> HistogramSeries:
    bounds = tuple(sorted(draw(st.sets(st.floats(1e-6, 1e8), max_size=5))))
    counts = list(accumulate(draw(st.lists(st.integers(0, 9), min_size=len(bounds) + 1, max_size=len(bounds) + 1))))
    return HistogramSeries(bounds, counts, draw(st.floats(0, 1e9)), draw(exemplars(len(counts))))


@st.composite
def families(draw: st.DrawFn) -> list[Family]:
    found = []
    for name in draw(st.lists(names, unique=True, max_size=4)):
        kind = draw(st.sampled_from(MetricKind))
        labels = draw(label_names)
        value: st.SearchStrategy[float | HistogramSeries] = histograms() if kind is MetricKind.HISTOGRAM else numbers
        brief = draw(st.text(alphabet='words \\"\n', max_size=12))
        rows = st.lists(st.tuples(st.tuples(*[values] * len(labels)), value), max_size=3, unique_by=lambda row: row[0])
        found.append(Family(name, kind, brief, labels, draw(rows)))
    return found


@settings(max_examples=120, deadline=None)
@given(families())
def test_whatever_the_families_are_both_formats_are_byte_for_byte_those_of_the_reference_client(
    shown: list[Family],
) -> None:
    writer = PageWriter()
    for form in FORMS:
        expected = reference_page(shown, form)

        assert writer.write(shown, form) == expected
        assert writer.write(shown, form) == expected, "the second time, from what was kept"


@settings(max_examples=50, deadline=None)
@given(families(), families())
def test_what_was_kept_of_one_page_does_not_leak_into_the_next(first: list[Family], second: list[Family]) -> None:
    used = {(family.name, family.kind, family.labels) for family in first}
    second = [each for each in second if each.name not in {name for name, _, _ in used}] + first
    writer = PageWriter()
    writer.write(first, "text")

    assert writer.write(second, "openmetrics") == reference_page(second, "openmetrics")


def played() -> Mirror:
    clock = ScenarioClock()
    log = EventLog(1024, clock)
    cursor = log.subscribe("test")
    mirror = Mirror(clock, 0)
    mirror.load(opening_snapshot())
    play(log, clock)
    mirror.apply(cursor.read(1024))
    mirror.publish()
    return mirror


@pytest.fixture
def collector() -> ViewCollector:
    mirror = played()
    store = ExemplarStore()
    for metric in (m.TIME_TO_FIRST_TOKEN, m.INTER_TOKEN_LATENCY, m.END_TO_END):
        for bound in metric.buckets:
            store.offer(metric, bound, "ab" * 16, "cd" * 8, 1.7e9)
    return ViewCollector(
        lambda: mirror.view, [lambda: gateway_samples(mirror.view)], EngineIdentity('a"b\\c\nd', 1, "tiny"),
        exemplars=store, has_vllm_aliases=True,
    )  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_the_page_of_a_busy_engine_is_that_of_the_reference_client(collector: ViewCollector, form: Format) -> None:
    page = PageWriter().write(collector.families(), form)

    assert page == reference_page(collector.families(), form)
    assert (b"trace_id" in page) == (form == "openmetrics")
    assert b"\nvllm:" in page


@pytest.mark.parametrize("form", FORMS)
def test_pages_made_of_what_was_kept_are_those_made_anew_while_values_marks_and_names_change(form: Format) -> None:
    clock = ScenarioClock()
    log = EventLog(1024, clock)
    cursor = log.subscribe("test")
    mirror = Mirror(clock, 0)
    mirror.load(opening_snapshot())
    play(log, clock)
    store = ExemplarStore()
    extra = [Sample(m.TELEMETRY_LAG, ("recorder",), 3)]
    kept = ViewCollector(lambda: mirror.view, [lambda: extra], EngineIdentity("e", 0, "tiny"), exemplars=store)
    writer = PageWriter()
    pages = set()

    def page() -> bytes:
        anew = ViewCollector(lambda: mirror.view, [lambda: extra], kept.identity, exemplars=store)
        written = writer.write(kept.families(), form)
        assert written == PageWriter().write(anew.families(), form)
        pages.add(written)
        return written

    while events := cursor.read(7):
        mirror.apply(events)
        mirror.publish()
        assert page() == page()
    num_pages = len(pages)
    assert num_pages > 3
    for bound in m.TIME_TO_FIRST_TOKEN.buckets:
        store.offer(m.TIME_TO_FIRST_TOKEN, bound, "ab" * 16, "cd" * 8, 1.7e9)
    assert (b"trace_id" in page()) == (form == "openmetrics")
    extra[0] = Sample(m.TELEMETRY_LAG, ("recorder",), 4)
    assert b'subscriber="recorder"} 4.0\n' in page()
    kept.identity = EngineIdentity("other", 0, "tiny")
    assert b'engine="e"' not in page()


def test_what_is_kept_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvwatch.exporters.prometheus import writer as module

    monkeypatch.setattr(module, "MAX_KEPT", 10)
    writer = PageWriter()
    for number in range(100):
        shown = [Family("x", MetricKind.GAUGE, "X.", ("a",), [((str(number),), number)])]
        assert writer.write(shown, "text") == reference_page(shown, "text")

        assert len(writer._scalars) <= 11
