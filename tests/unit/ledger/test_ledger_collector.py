"""The collector: batches, gaps, snapshots, its own errors."""

import asyncio
import threading
import time

import structlog
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_engine import ManualClock, NaiveEngine

from kvwatch.ledger.collector import BATCH, Collector
from kvwatch.ledger.mirror import Mirror
from kvwatch.telemetry import events as ev
from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.clock import SystemClock
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.snapshot import EngineSnapshot

ACTS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 30)), max_size=8)


class Stage:
    def __init__(self, capacity: int = 4096) -> None:
        self.clock = ManualClock()
        self.log = EventLog(capacity, self.clock)
        self.engine = NaiveEngine(self.log)
        self.mirror = Mirror(self.clock, 0)
        self.collector = Collector(self.log, self.engine.snapshot, self.mirror)

    def drain(self) -> None:
        while self.collector.drain():
            pass

    def differences(self) -> list[str]:
        return self.mirror.ledger.differences(self.engine.snapshot())


def test_a_late_subscriber_begins_with_a_snapshot_and_has_lost_nothing() -> None:
    log = EventLog(4096, ManualClock())
    engine = NaiveEngine(log)
    engine.step([(0, 0), (1, 0), (11, 2)])
    mirror = Mirror(log.clock, 0)
    collector = Collector(log, engine.snapshot, mirror)
    engine.step([(0, 0)])

    assert collector.heal()
    while collector.drain():
        pass

    assert mirror.ledger.differences(engine.snapshot()) == []
    assert (collector.num_gaps, collector.num_dropped) == (0, 0)


def test_a_subscriber_that_was_lapped_heals_and_counts_what_it_lost() -> None:
    stage = Stage(capacity=8)
    stage.collector.heal()
    for _ in range(5):
        stage.engine.step([(0, 0), (1, 0), (11, 1)])
    lag = stage.collector.lag

    stage.drain()
    assert stage.collector.needs_snapshot
    assert stage.collector.heal()
    stage.drain()

    assert stage.differences() == []
    assert (stage.collector.num_gaps, stage.collector.num_dropped) == (1, lag)
    assert stage.mirror.num_violations == 0


@settings(max_examples=80, deadline=None)
@given(steps=st.lists(st.tuples(ACTS, st.booleans()), max_size=14), capacity=st.integers(2, 40))
def test_however_often_events_are_lost_the_healed_ledger_equals_the_engine(
    steps: list[tuple[list[tuple[int, int]], bool]], capacity: int
) -> None:
    stage = Stage(capacity)
    stage.collector.heal()
    for acts, is_drained in steps:
        stage.engine.step(acts)
        if is_drained:
            stage.drain()
    stage.drain()
    if stage.collector.needs_snapshot:
        stage.collector.heal()
        stage.drain()

    assert stage.differences() == []
    assert stage.mirror.num_violations == 0
    assert stage.collector.num_errors == 0


def test_a_batch_is_bounded_so_that_the_interpreter_is_never_held_for_long() -> None:
    stage = Stage()
    stage.collector.heal()
    for _ in range(BATCH + 10):
        stage.engine.queue()

    assert stage.collector.drain() == BATCH
    assert stage.collector.drain() == 10


def test_an_event_that_breaks_the_ledger_is_counted_logged_once_and_healed() -> None:
    stage = Stage()
    stage.collector.heal()
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            stage.log.append(ev.BlocksAllocated(request="r", sequence=0, block_ids=[10_000], reason="decode"))
            assert stage.collector.drain() == 0
            assert stage.collector.heal()

    stage.engine.step([(0, 0), (1, 0)])
    stage.drain()
    assert stage.collector.num_errors == 2
    assert len(logs) == 1
    assert "IndexError" in logs[0]["error"]
    assert stage.differences() == []


def test_without_a_snapshot_nothing_is_applied_and_it_is_tried_again() -> None:
    stage = Stage()
    stage.engine.is_answering = False
    stage.engine.step([(0, 0)])

    assert not stage.collector.heal()
    assert stage.collector.drain() == 0
    stage.engine.is_answering = True
    assert stage.collector.heal()

    assert stage.differences() == []
    assert stage.collector.num_errors == 0


def test_counters_go_on_over_a_gap() -> None:
    stage = Stage(capacity=16)
    stage.collector.heal()
    stage.engine.queue()
    stage.drain()
    for _ in range(40):
        stage.engine.queue()
    stage.drain()
    stage.collector.heal()
    stage.engine.queue()
    stage.drain()
    stage.mirror.publish()

    assert stage.mirror.view.value(m.TELEMETRY_EVENTS, "request.queued") == 2
    assert stage.mirror.view.value(m.REQUESTS, "waiting") == 42


def test_finishing_applies_what_is_left_shows_it_and_detaches() -> None:
    stage = Stage()
    stage.collector.heal()
    stage.engine.queue()

    stage.collector.finish()
    stage.collector.finish()

    assert stage.mirror.view.value(m.REQUESTS, "waiting") == 1
    assert not stage.log.active


def test_a_collector_on_its_own_thread_keeps_up_with_an_engine_on_another_and_loses_itself_never() -> None:
    log = EventLog(256, SystemClock())  # small: the engine laps the collector again and again
    engine = NaiveEngine(log, num_blocks=40)
    mirror = Mirror(log.clock, 0)
    collector = Collector(log, engine.snapshot, mirror)
    stop = threading.Event()
    laws: list[tuple[float, float]] = []

    def collect() -> None:
        async def run() -> None:
            ending = asyncio.Event()
            task = asyncio.create_task(collector.run(ending))
            while not stop.is_set():
                view = mirror.view
                capacity = view.value(m.KV_BLOCK_CAPACITY, "device")
                if capacity is not None:
                    blocks = sum(sample.value for sample in view.gauges if sample.metric is m.KV_BLOCKS)
                    laws.append((capacity, blocks))
                await asyncio.sleep(0.001)
            ending.set()
            await task

        asyncio.run(run())

    thread = threading.Thread(target=collect)
    thread.start()
    until = time.monotonic() + 1.5
    number = 0
    while time.monotonic() < until:
        number += 1
        engine.step([(number + i, number * 7 + i) for i in range(6)])
    deadline = time.monotonic() + 60
    while mirror.ledger.next_seq != log.head and time.monotonic() < deadline:
        time.sleep(0.01)
    stop.set()
    thread.join(10)

    assert not thread.is_alive()
    assert mirror.ledger.differences(engine.snapshot()) == []
    assert (collector.num_errors, mirror.num_violations) == (0, 0)
    assert len(laws) > 20
    assert all(capacity == blocks for capacity, blocks in laws)


def test_a_control_that_raises_what_it_should_not_is_an_error_and_not_the_end() -> None:
    def broken(timeout_seconds: float) -> EngineSnapshot:
        raise RuntimeError(f"defect after {timeout_seconds} s")

    log = EventLog(64, ManualClock())
    collector = Collector(log, broken, Mirror(log.clock, 0))

    assert not collector.heal()

    assert collector.num_errors == 1
