"""Exemplars: traces for buckets of latencies, in OpenMetrics only."""

import time
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_engine import ManualClock, NaiveEngine
from prometheus_client.openmetrics import parser
from prometheus_client.samples import Sample as ParsedSample

from kvwatch.exporters.exemplars import ExemplarStore
from kvwatch.exporters.identity import EngineIdentity
from kvwatch.exporters.prometheus.families import ViewCollector
from kvwatch.exporters.prometheus.page import MetricsPage
from kvwatch.ledger.mirror import Mirror
from kvwatch.ledger.series import SeriesSettings
from kvwatch.observatory import Observatory
from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.events import FirstToken
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.snapshot import EngineSnapshot, TierState

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
SLO = (0.033, 0.3)


def empty_snapshot() -> EngineSnapshot:
    tier = TierState("device", 9, [0] * 9, [None] * 9, [0] * 9)
    return EngineSnapshot(
        seq=0, step=0, time_ns=0, block_size_tokens=4, block_bytes=1, watermark_blocks=0, max_queued_requests=1,
        max_queued_tokens=1, tiers=[tier], sequences=[], requests=[],
    )  # fmt: skip


class Page:
    """A page over a mirror that was told some times to the first token, in ns."""

    def __init__(self, *ttfts_ns: int, series: SeriesSettings | None = None) -> None:
        self.clock = ManualClock()
        series = series or SeriesSettings()
        self.exemplars = ExemplarStore(series.thresholds)
        log = EventLog(256, self.clock)
        mirror = Mirror(self.clock, 0, series=series)
        mirror.load(empty_snapshot())
        cursor = log.subscribe("test")
        for index, ttft_ns in enumerate(ttfts_ns):
            log.append(FirstToken(f"r{index}", ttft_ns))
        mirror.apply(cursor.read())
        mirror.publish()
        collector = ViewCollector(lambda: mirror.view, [], EngineIdentity("x"), exemplars=self.exemplars)
        self._page = MetricsPage(collector, self.clock, 0)

    def text(self, accept: str = OPENMETRICS) -> str:
        return self._page.render(accept).body.decode()

    def buckets(self) -> Iterator[ParsedSample]:
        for family in parser.text_string_to_metric_families(self.text()):  # type: ignore[no-untyped-call]
            if family.name == "kvwatch_time_to_first_token_seconds":
                yield from (sample for sample in family.samples if sample.name.endswith("_bucket"))

    def exemplified(self) -> dict[str, ParsedSample]:
        return {sample.labels["le"]: sample for sample in self.buckets() if sample.exemplar}


def test_an_exported_trace_is_the_exemplar_of_the_bucket_that_its_latency_fell_into() -> None:
    page = Page(30_000_000, 700_000_000)
    page.exemplars.offer(m.TIME_TO_FIRST_TOKEN, 0.7, TRACE, SPAN, 1_700_000_000.5)

    shown = page.exemplified()

    assert list(shown) == ["0.75"]
    exemplar = shown["0.75"].exemplar
    assert exemplar is not None
    assert exemplar.labels == {"trace_id": TRACE, "span_id": SPAN}
    assert (exemplar.value, float(exemplar.timestamp or 0)) == (0.7, 1_700_000_000.5)


def test_the_newest_exemplar_of_a_bucket_is_shown() -> None:
    page = Page(30_000_000)
    page.exemplars.offer(m.TIME_TO_FIRST_TOKEN, 0.03, "0" * 31 + "1", SPAN, 1.0)
    page.exemplars.offer(m.TIME_TO_FIRST_TOKEN, 0.031, "0" * 31 + "2", SPAN, 2.0)

    exemplar = page.exemplified()["0.04"].exemplar

    assert exemplar is not None
    assert exemplar.labels["trace_id"] == "0" * 31 + "2"


def test_a_bucket_that_has_counted_nothing_shows_none() -> None:
    page = Page(30_000_000)
    page.exemplars.offer(m.TIME_TO_FIRST_TOKEN, 5000.0, TRACE, SPAN, 1.0)

    assert page.exemplified() == {}


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 4_000_000_000_000), min_size=1, max_size=30))
def test_every_exemplar_lies_within_its_bucket_and_every_bucket_that_counted_has_one(times: list[int]) -> None:
    page = Page(*times, series=SeriesSettings(thresholds={m.TIME_TO_FIRST_TOKEN: SLO}))
    for ttft_ns in times:
        page.exemplars.offer(m.TIME_TO_FIRST_TOKEN, ttft_ns / 1e9, TRACE, SPAN, 1.0)

    low, before = float("-inf"), 0.0
    for bucket in page.buckets():
        high = float(bucket.labels["le"])
        assert (bucket.exemplar is not None) == (bucket.value > before)
        if bucket.exemplar is not None:
            assert low < bucket.exemplar.value <= high
        low, before = high, bucket.value


@pytest.mark.parametrize("bound", m.TIME_TO_FIRST_TOKEN.buckets)
def test_a_latency_on_a_bound_has_its_exemplar_where_it_is_counted(bound: float) -> None:
    page = Page(round(bound * 1e9))
    page.exemplars.offer(m.TIME_TO_FIRST_TOKEN, round(bound * 1e9) / 1e9, TRACE, SPAN, 1.0)

    assert [float(each) for each in page.exemplified()] == [bound]


def test_the_observatory_shows_exemplars_thresholds_and_aliases_that_it_was_given() -> None:
    log = EventLog(4096)
    engine = NaiveEngine(log)
    series = SeriesSettings(thresholds={m.TIME_TO_FIRST_TOKEN: SLO})
    exemplars = ExemplarStore(series.thresholds)
    observatory = Observatory(
        log, engine, EngineIdentity("x", 0, "tiny"), metrics_listen="127.0.0.1:0", series=series, exemplars=exemplars,
        has_vllm_aliases=True, view_interval_seconds=0, render_interval_seconds=0,
    )  # fmt: skip
    observatory.start()
    try:
        deadline = time.monotonic() + 60
        while not observatory.view.gauges and time.monotonic() < deadline:
            time.sleep(0.005)  # it counts from its first snapshot on
        exemplars.offer(m.TIME_TO_FIRST_TOKEN, 0.033, TRACE, SPAN, 1.5)
        with engine.lock:
            log.append(FirstToken("r", 33_000_000))
        assert observatory.metrics_address is not None
        host, port = observatory.metrics_address
        line = f'le="0.033",model_name="tiny"}} 1.0 # {{span_id="{SPAN}",trace_id="{TRACE}"}} 0.033 1.5'
        while line not in (text := scrape(host, port)):
            assert time.monotonic() < deadline, text[-3000:]
            time.sleep(0.02)
        assert 'vllm:num_requests_running{engine="0",model_name="tiny"}' in text
    finally:
        observatory.stop()


def scrape(host: str, port: int) -> str:
    url = f"http://{host}:{port}/metrics"
    return httpx.get(url, headers={"Accept": OPENMETRICS}, timeout=5, trust_env=False).text


def test_the_text_format_has_no_exemplars() -> None:
    page = Page(30_000_000)
    page.exemplars.offer(m.TIME_TO_FIRST_TOKEN, 0.03, TRACE, SPAN, 1.0)

    assert TRACE in page.text()
    assert TRACE not in page.text("text/plain")


def test_exemplars_take_bounded_memory() -> None:
    store = ExemplarStore()
    for number in range(5_000):
        store.offer(m.TIME_TO_FIRST_TOKEN, number / 7, f"{number:032x}", SPAN, 1.0)

    found = [store.find(m.TIME_TO_FIRST_TOKEN, bucket) for bucket in range(100)]

    assert sum(each is not None for each in found) <= len(m.TIME_TO_FIRST_TOKEN.buckets) + 1
