"""A dead, slow, refusing or half-open collector changes neither latency nor memory.

What it does not take is counted, and the end is bounded.
"""

import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx
import pytest
from builders import FakeClock, NullModel, make_core, make_request, run_until_idle
from openai_server import MODEL, byte_level_tokenizer, save_tokenizer, wait_until
from otlp_engine import ObservedServer, observed_server
from otlp_receiver import dead_endpoint, grpc_collector, half_open_collector, http_collector, refuse, slow

from kvwatch.exporters.identity import EngineIdentity
from kvwatch.exporters.otel.part import OtelPart
from kvwatch.exporters.otel.settings import OtelSettings
from kvwatch.telemetry.log import EventLog

HI = [{"role": "user", "content": "hi"}]

Bad = Callable[[], AbstractContextManager[str]]


@contextmanager
def dead_grpc() -> Iterator[str]:
    yield dead_endpoint("grpc")


@contextmanager
def dead_http() -> Iterator[str]:
    yield dead_endpoint("http")


@contextmanager
def slow_grpc() -> Iterator[str]:
    with grpc_collector(slow(1.0)) as collected:
        yield collected.endpoint


@contextmanager
def refusing_grpc() -> Iterator[str]:
    with grpc_collector(refuse) as collected:
        yield collected.endpoint


@contextmanager
def refusing_http() -> Iterator[str]:
    with http_collector(status=503) as collected:
        yield collected.endpoint


@contextmanager
def half_open_grpc() -> Iterator[str]:
    with half_open_collector("grpc") as endpoint:
        yield endpoint


@contextmanager
def half_open_http() -> Iterator[str]:
    with half_open_collector("http") as endpoint:
        yield endpoint


BAD: list[Bad] = [dead_grpc, dead_http, slow_grpc, refusing_grpc, refusing_http, half_open_grpc, half_open_http]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"), byte_level_tokenizer())


def latencies(observed: ObservedServer, times: int) -> list[float]:
    body = {"model": MODEL, "messages": HI, "max_tokens": 4, "ignore_eos": True}
    found = []
    with httpx.Client() as client:
        for _ in range(times):
            begin = time.monotonic()
            answer = client.post(f"{observed.server.url}/v1/chat/completions", json=body, timeout=60)
            found.append(time.monotonic() - begin)
            assert answer.status_code == 200
    return found


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.__name__)
def test_requests_are_answered_as_ever_drops_are_on_the_metrics_page_and_the_end_is_bounded(
    folder: Path, bad: Bad
) -> None:
    with bad() as endpoint:
        more: dict[str, object] = {"export_timeout_seconds": 1.0, "max_queued_spans": 16}
        with observed_server(folder, NullModel(401), endpoint, None, **more) as observed:
            typical = statistics.median(latencies(observed, 40))
            # Nobody waits for a collector that takes a second, or for ever; a busy machine may still cost something.
            assert typical < 0.8
            wait_until(lambda: observed.dropped()["otlp_spans"] > 0, 60)
            page = httpx.get(f"{observed.server.url}/metrics", timeout=10).text
            assert 'subscriber="otlp_spans"' in page
            begin = time.monotonic()
            observed.observatory.stop(10)
            assert time.monotonic() - begin < 5
            assert not observed.observatory.is_running


class Offline:
    """The exporter on its own, with an engine that is stepped by hand: as fast as it can, which no server is."""

    def __init__(self, endpoint: str, **otel: object) -> None:
        self.clock = FakeClock()
        self.log = EventLog(1 << 12, self.clock)
        self.model = NullModel()
        self.model.on_step = lambda _: self.clock.advance(0.01)
        self.core = make_core(self.model, self.log)
        self.cursor = self.log.subscribe("otel")
        settings = OtelSettings(endpoint=endpoint, export_timeout_seconds=1.0, **otel)  # type: ignore[arg-type]
        self.part = OtelPart(settings, EngineIdentity("e"), self.clock, tuple)
        self.part.follower.load(self.core.snapshot())

    def request(self, number: int) -> None:
        self.core.add(make_request(f"r{number}", range(8), max_tokens=4), self.clock.monotonic_ns())
        run_until_idle(self.core)
        while events := self.cursor.read():
            self.part.follower.apply(events)


@pytest.mark.parametrize("bad", [dead_grpc, half_open_http], ids=lambda bad: bad.__name__)
def test_memory_stays_bounded_however_much_the_collector_does_not_take(bad: Bad) -> None:
    with bad() as endpoint:
        offline = Offline(endpoint, max_queued_spans=256)
        offline.part.open()
        try:
            for number in range(200):  # the queue is full, caches are warm
                offline.request(number)
            gc.collect()
            tracemalloc.start()
            for number in range(200, 1200):
                offline.request(number)
            gc.collect()
            grown, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        finally:
            offline.part.close()

        assert grown < 2 << 20, "a thousand traces would be more than 10 MB"
        lost = {sample.labels[0]: sample.value for sample in offline.part.samples() if "dropped" in sample.metric.name}
        assert lost["otlp_spans"] > 3_000


def test_a_collector_that_comes_back_is_used_again() -> None:
    state = {"is_down": True}

    def behave(context: object) -> None:
        if state["is_down"]:
            refuse(context)

    with grpc_collector(behave) as collected:
        offline = Offline(collected.endpoint, batch_seconds=0.01)
        offline.part.open()
        try:
            offline.request(0)
            wait_until(lambda: any(s.value for s in offline.part.samples() if "errors" in s.metric.name), 60)
            state["is_down"] = False
            offline.request(1)
            wait_until(lambda: len(collected.roots) >= 1, 60)
        finally:
            offline.part.close()


def test_what_was_sent_and_what_was_lost_add_up_to_what_there_was() -> None:
    with grpc_collector(slow(0.05)) as collected:
        offline = Offline(collected.endpoint, batch_seconds=0.001, max_queued_spans=64)
        offline.part.open()
        for number in range(500):
            offline.request(number)
        offline.part.close()

        lost = next(
            s.value for s in offline.part.samples() if s.labels == ("otlp_spans",) and "dropped" in s.metric.name
        )
        spans = collected.spans
        spans_of_one = 5  # SERVER, queue, prefill, its chunk, decode
        assert len(spans) + lost == 500 * spans_of_one
        assert 0 < lost < 500 * spans_of_one
        roots = {span.span_id for span in collected.roots}
        assert len(spans) == spans_of_one * len(roots), "traces are dropped whole"
