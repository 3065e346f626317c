"""The observatory: one thread, started and stopped beside an engine that it cannot harm."""

import asyncio
import signal
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
from naive_engine import NaiveEngine
from starlette.testclient import TestClient

from kvwatch.errors import ConfigError, ExporterError
from kvwatch.exporters.identity import EngineIdentity
from kvwatch.observatory import Observatory
from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.log import EventLog

IDENTITY = EngineIdentity("test", 0, "tiny")


class Stage:
    def __init__(self, metrics_listen: str | None = "127.0.0.1:0", capacity: int = 4096) -> None:
        self.log = EventLog(capacity)
        self.engine = NaiveEngine(self.log)
        self.observatory = Observatory(
            self.log,
            self.engine,
            IDENTITY,
            metrics_listen=metrics_listen,
            view_interval_seconds=0,
            render_interval_seconds=0,
        )

    def get(self, path: str) -> httpx.Response:
        address = self.observatory.metrics_address
        assert address is not None
        return httpx.get(f"http://{address[0]}:{address[1]}{path}", timeout=5, trust_env=False)

    def wait_until_shown(self) -> None:
        deadline = time.monotonic() + 60
        while self.observatory.view.seq + 1 != self.log.head or not self.observatory.view.gauges:
            assert time.monotonic() < deadline, "the view does not catch up"
            time.sleep(0.005)


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.observatory.stop()


def test_what_the_engine_does_is_on_the_listener_a_moment_later(stage: Stage) -> None:
    stage.observatory.start()
    stage.wait_until_shown()
    stage.engine.step([(0, 0), (1, 0), (11, 1)])
    stage.wait_until_shown()

    page = stage.get("/metrics").text

    common = 'dp_rank="0",engine="test"'
    used = len(stage.engine.used())
    assert f'kvwatch_kv_blocks{{{common},group="0",model_name="tiny",state="used",tier="device"}} {used}.0' in page
    assert f'kvwatch_requests{{{common},model_name="tiny",state="running"}} 1.0' in page
    assert f'kvwatch_telemetry_lag_events{{{common},model_name="tiny",subscriber="ledger"}} 0.0' in page
    assert (stage.get("/health").status_code, stage.get("/ready").status_code) == (200, 200)


def test_it_can_be_started_before_the_engine_answers(stage: Stage) -> None:
    stage.engine.is_answering = False
    stage.observatory.start()
    assert stage.get("/metrics").status_code == 200
    assert stage.get("/health").status_code == 503

    stage.engine.is_answering = True

    stage.wait_until_shown()


def test_the_api_server_may_mount_the_same_page_on_its_own_loop(stage: Stage) -> None:
    stage.observatory.start()
    stage.wait_until_shown()
    client = TestClient(stage.observatory.metrics_app)

    mounted = client.get("/metrics").text
    listener = stage.get("/metrics").text

    def pool(page: str) -> list[str]:
        return [line for line in page.splitlines() if line.startswith("kvwatch_kv_")]

    assert pool(mounted) == pool(listener) != []
    assert client.post("/metrics").status_code == 405


def test_events_are_recorded_only_while_it_runs(stage: Stage) -> None:
    states = [stage.log.active]
    for change in (stage.observatory.start, stage.observatory.stop):
        change()
        states.append(stage.log.active)

    assert states == [False, True, False]


def test_stopping_shows_what_was_left_closes_the_port_and_may_be_repeated() -> None:
    stage = Stage()
    stage.observatory.start()
    stage.wait_until_shown()
    stage.engine.step([(0, 0), (0, 0)])
    started = time.monotonic()

    stage.observatory.stop()
    stage.observatory.stop()

    assert time.monotonic() - started < 45
    assert not stage.observatory.is_running
    assert stage.observatory.metrics_address is None
    assert stage.observatory.view.value(m.REQUESTS, "waiting") == 2


def test_stopping_without_a_start_does_nothing() -> None:
    Stage().observatory.stop()


def test_the_page_answers_while_the_engine_is_in_a_long_step() -> None:
    """ROCm/rocm-aic#134 (O71): under load the page took longer than scrapers wait, and whole minutes were missing."""
    release, is_asked = threading.Event(), threading.Event()

    class Busy(NaiveEngine):
        def snapshot(self, timeout_seconds: float = 5.0):  # type: ignore[no-untyped-def]  # noqa: ANN202
            is_asked.set()
            release.wait(60)  # a step, between two of which it is answered
            return super().snapshot(timeout_seconds)

    stage = Stage()
    observatory = Observatory(stage.log, Busy(stage.log), IDENTITY, metrics_listen="127.0.0.1:0")
    observatory.start()
    try:
        assert is_asked.wait(60)
        assert observatory.metrics_address is not None
        url = "http://{}:{}/metrics".format(*observatory.metrics_address)
        pages = [httpx.get(url, timeout=30, trust_env=False) for _ in range(3)]
        assert not release.is_set(), "the step lasts"
    finally:
        release.set()
        observatory.stop()

    assert [page.status_code for page in pages] == [200] * 3
    assert all("kvwatch_telemetry_lag_events" in page.text for page in pages)


def test_stopping_is_bounded_in_time_even_if_the_engine_hangs_in_a_snapshot() -> None:
    release = threading.Event()

    class Hanging(NaiveEngine):
        def snapshot(self, timeout_seconds: float = 5.0):  # type: ignore[no-untyped-def]  # noqa: ANN202
            release.wait(timeout_seconds)
            return super().snapshot(timeout_seconds)

    log = EventLog(64)
    observatory = Observatory(log, Hanging(log), IDENTITY)
    observatory.start()
    time.sleep(0.1)
    started = time.monotonic()

    observatory.stop(timeout_seconds=0.3)

    assert time.monotonic() - started < 4
    release.set()
    observatory.stop()
    assert not observatory.is_running


def test_a_taken_port_is_an_error_of_the_start_and_leaves_nothing_behind(stage: Stage) -> None:
    stage.observatory.start()
    host, port = stage.observatory.metrics_address or ("", 0)
    second = Stage(f"{host}:{port}")

    with pytest.raises(ExporterError, match="choose another address with --metrics-listen"):
        second.observatory.start()

    assert not second.observatory.is_running
    assert not second.log.active
    second.observatory.stop()


def test_a_malformed_address_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="--metrics-listen"):
        Stage("nonsense").observatory.start()


def test_it_starts_once(stage: Stage) -> None:
    stage.observatory.start()

    with pytest.raises(ExporterError, match="started before"):
        stage.observatory.start()


def test_without_an_address_there_is_no_listener_but_there_are_views() -> None:
    stage = Stage(metrics_listen=None)
    stage.observatory.start()
    stage.wait_until_shown()

    assert stage.observatory.metrics_address is None
    stage.observatory.stop()


def test_the_process_keeps_its_signal_handlers(stage: Stage) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    stage.observatory.start()
    stage.get("/health")

    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_subscriber_made_to_lose_events_counts_the_gap_and_is_right_again() -> None:
    stage = Stage(capacity=8)
    stage.observatory.start()
    stage.wait_until_shown()
    with stage.engine.lock:
        for _ in range(40):
            stage.engine.step([(0, 0)])
    stage.wait_until_shown()

    view, page = stage.observatory.view, stage.get("/metrics").text

    assert view.value(m.REQUESTS, "waiting") == 40
    gaps = [line for line in page.splitlines() if line.startswith("kvwatch_telemetry_gaps_total")]
    assert float(gaps[0].rsplit(" ", 1)[1]) >= 1
    stage.observatory.stop()


def test_many_scrapers_from_two_loops_get_the_same_bytes_within_the_interval() -> None:
    log = EventLog(64)
    engine = NaiveEngine(log)
    observatory = Observatory(
        log, engine, IDENTITY, metrics_listen="127.0.0.1:0", view_interval_seconds=0, render_interval_seconds=60
    )
    observatory.start()
    host, port = observatory.metrics_address or ("", 0)
    url = f"http://{host}:{port}/metrics"
    mounted = TestClient(observatory.metrics_app).get("/metrics").content

    async def scrape() -> list[bytes]:
        async with httpx.AsyncClient(trust_env=False) as client:
            return [response.content for response in await asyncio.gather(*(client.get(url) for _ in range(20)))]

    bodies = asyncio.run(scrape())

    assert set(bodies) == {mounted}
    observatory.stop()


def test_a_listener_that_fails_does_not_end_the_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise OSError("no more file descriptors")

    monkeypatch.setattr("uvicorn.Server.startup", fail)
    stage = Stage()
    stage.observatory.start()
    stage.engine.step([(0, 0)])

    stage.wait_until_shown()

    assert stage.observatory.is_running
    stage.observatory.stop()
    assert not stage.observatory.is_running


def test_a_thread_that_cannot_begin_is_an_error_of_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no more file descriptors")

    monkeypatch.setattr("uvicorn.Config", fail)
    stage = Stage()

    with pytest.raises(ExporterError, match="no more file descriptors"):
        stage.observatory.start()

    stage.observatory.stop()
    assert not stage.log.active
