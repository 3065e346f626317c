"""The stream beside the real engine: joined in the middle, starved for a while, and still exact."""

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from builders import NullModel, make_request, make_settings
from openai_server import wait_until
from stream_stage import LedgerMirror

from kvwatch.exporters.identity import EngineIdentity
from kvwatch.observatory import Observatory
from kvwatch.stream.access import StreamOptions
from kvwatch.stream.client import TelemetryClient
from kvwatch.stream.contract import SubscribeRequest
from kvwatch.stream.server import StreamServer
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.metrics import TELEMETRY_LAG
from kvwatch_engine.contracts.request import GenerationRequest
from kvwatch_engine.engine import Engine

CAPACITY = 2048


class Load:
    """A real engine that is never without work: random prompts, shared prefixes, forks, aborts."""

    def __init__(self) -> None:
        settings = make_settings(max_queued_requests=64)
        model = NullModel()
        model.block_size = settings.block_size
        self.log = EventLog(CAPACITY)
        self.engine = Engine(settings, model, self.log, lambda _outputs: None)
        self.server = StreamServer(self.log, self.engine, StreamOptions(listen="127.0.0.1:0"))
        self.observatory = Observatory(self.log, self.engine, EngineIdentity("test"), parts=[self.server])
        self._random = random.Random(11)
        self._is_paused = threading.Event()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._keep_busy)

    @property
    def address(self) -> str:
        assert self.server.address is not None
        return "{}:{}".format(*self.server.address)

    @property
    def lag(self) -> int:
        return int(next(sample.value for sample in self.server.samples() if sample.metric is TELEMETRY_LAG))

    def start(self) -> None:
        self.engine.start()
        self.observatory.start()
        assert self.server.is_serving.wait(10)
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join(10)
        self.engine.stop()
        self.observatory.stop()

    def rest(self) -> None:
        """Send nothing more and let the engine come to an end."""
        self._is_paused.set()
        wait_until(lambda: self.engine.num_live_requests == 0, 60)

    def go_on(self) -> None:
        """Send requests again."""
        self._is_paused.clear()

    def _keep_busy(self) -> None:
        number = 0
        while not self._is_over.wait(0.001):
            if self._is_paused.is_set() or self.engine.num_live_requests >= 12:
                continue
            number += 1
            self.engine.submit(self._request(f"r{number}"))
            if self._random.random() < 0.1:
                self.engine.abort(f"r{self._random.randrange(1, number + 1)}")

    def _request(self, name: str) -> GenerationRequest:
        pick = self._random
        prompt = [*range(4, 4 + 4 * pick.randrange(4)), *(pick.randrange(4, 50) for _ in range(pick.randrange(1, 20)))]
        return make_request(name, prompt, max_tokens=pick.randrange(1, 20), n=pick.choice([1, 1, 2]), ignore_eos=True)


@contextmanager
def busy_engine() -> Iterator[Load]:
    load = Load()
    load.start()
    try:
        yield load
    finally:
        load.stop()


def test_a_subscriber_that_joined_late_and_was_starved_is_healed_and_exact_while_the_engine_went_on() -> None:
    with busy_engine() as load, TelemetryClient(load.address) as client:
        wait_until(lambda: load.log.head > 500, 30)  # it joins in the middle
        mirror = LedgerMirror()
        stream = client.subscribe(SubscribeRequest(from_snapshot=True))
        mirror.catch_up(stream, lambda: mirror.num_snapshots == 1)

        # It reads nothing, for as long as it takes to be overtaken.
        wait_until(lambda: load.lag > 2 * CAPACITY, 120)
        steps = load.engine.snapshot().step
        wait_until(lambda: load.lag > 6 * CAPACITY, 120)
        assert load.engine.snapshot().step > steps

        load.rest()
        mirror.catch_up(stream, lambda: mirror.ledger.next_seq == load.log.head, 60)

        assert mirror.gaps, "it was not starved"
        assert mirror.num_snapshots == 1 + len(mirror.gaps)
        assert mirror.ledger.differences(load.engine.snapshot()) == []


def test_a_subscriber_of_a_running_engine_equals_it_after_every_pause() -> None:
    with busy_engine() as load, TelemetryClient(load.address) as client:
        mirror = LedgerMirror()
        stream = client.subscribe(SubscribeRequest(from_snapshot=True))
        for _ in range(4):
            time.sleep(0.3)
            load.rest()
            mirror.catch_up(stream, lambda: mirror.ledger.next_seq == load.log.head, 60)
            assert mirror.ledger.differences(load.engine.snapshot()) == []
            load.go_on()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_over_ten_thousand_steps_a_subscriber_that_starves_now_and_then_equals_the_engine_at_every_rest() -> None:
    with busy_engine() as load, TelemetryClient(load.address) as client:
        wait_until(lambda: load.log.head > 500, 60)
        mirror = LedgerMirror()
        stream = client.subscribe(SubscribeRequest(from_snapshot=True))
        mirror.catch_up(stream, lambda: mirror.num_snapshots == 1)
        num_rests = 0
        while num_rests < 6 or load.engine.snapshot().step < 10_000:
            wait_until(lambda: load.lag > 2 * CAPACITY, 120)  # it does not read
            mirror.catch_up(stream, lambda: load.lag < CAPACITY // 4, 120)  # now it does, while the engine goes on
            load.rest()
            mirror.catch_up(stream, lambda: mirror.ledger.next_seq == load.log.head, 60)
            assert mirror.ledger.differences(load.engine.snapshot()) == []
            num_rests += 1
            load.go_on()

        assert mirror.gaps


def test_the_engine_takes_as_many_steps_while_a_subscriber_does_not_read_as_without_one() -> None:
    """Not a measurement of speed: it would hang or crawl if a subscriber could hold the engine up."""
    with busy_engine() as load, TelemetryClient(load.address) as client:
        stream = client.subscribe(SubscribeRequest(from_snapshot=True))
        next(stream)
        wait_until(lambda: load.lag > 2 * CAPACITY, 120)

        begin = load.engine.snapshot().step
        wait_until(lambda: load.engine.snapshot().step > begin + 300, 60)
