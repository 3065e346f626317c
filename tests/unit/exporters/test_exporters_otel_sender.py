"""The queue and thread between the observatory and a collector."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
from openai_server import wait_until
from structlog.testing import capture_logs

from kvwatch.exporters.otel.sender import Sender
from kvwatch.telemetry import metrics


class Collector:
    """Takes batches; can be held up, can refuse, can break."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.arrived = threading.Event()
        self.is_willing = True
        self.error: Exception | None = None
        self.is_closed = False

    def export(self, batch: Sequence[int]) -> bool:
        self.arrived.set()
        self.gate.wait(30)
        if self.error is not None:
            raise self.error
        if self.is_willing:
            self.batches.append(list(batch))
        return self.is_willing

    def close(self) -> None:
        self.is_closed = True
        self.gate.set()

    @property
    def items(self) -> list[int]:
        return [item for batch in self.batches for item in batch]


@contextmanager
def sending(collector: Collector, **more: object) -> Iterator[Sender[int]]:
    options: dict[str, object] = {"max_queued": 100, "max_batch": 10, "delay_seconds": 0.01, **more}
    sender: Sender[int] = Sender("test", collector.export, collector.close, **options)  # type: ignore[arg-type]
    sender.start()
    try:
        yield sender
    finally:
        sender.stop(5)


def test_everything_arrives_in_order_in_batches_of_bounded_size() -> None:
    collector = Collector()
    with sending(collector, max_queued=1000) as sender:
        for item in range(95):
            assert sender.put(item)
        wait_until(lambda: sender.num_sent == 95)

    assert collector.items == list(range(95))
    assert max(map(len, collector.batches)) <= 10
    assert sender.num_dropped == 0


def test_a_lone_item_waits_no_longer_than_the_delay() -> None:
    collector = Collector()
    with sending(collector, delay_seconds=0.2) as sender:
        sender.put(1)
        assert not collector.items
        assert wait_until(lambda: collector.items == [1]) < 2


def test_what_finds_no_room_is_dropped_and_counted_and_whoever_puts_it_in_never_waits() -> None:
    collector = Collector()
    collector.gate.clear()
    with sending(collector, max_queued=20, delay_seconds=0.001) as sender:
        sender.put(0)
        assert collector.arrived.wait(5)
        begin = time.monotonic()
        taken = [sender.put(item) for item in range(10_000)]
        elapsed = time.monotonic() - begin

        assert sum(taken) == 20
        assert taken == [True] * 20 + [False] * 9_980, "the newest are dropped: what was taken stays whole"
        assert sender.num_dropped == 9_980
        assert sender.num_queued == 20
        assert elapsed < 4
        collector.gate.set()
        wait_until(lambda: sender.num_sent == 21)


def test_a_heavy_item_is_taken_whole_by_an_empty_queue_and_else_not_at_all() -> None:
    collector = Collector()
    collector.gate.clear()
    with sending(collector, weigh=lambda item: item, max_queued=10, delay_seconds=0.001) as sender:
        assert sender.put(500)
        assert collector.arrived.wait(5)
        assert sender.put(6)
        assert not sender.put(5)
        assert sender.put(4)
        collector.gate.set()
        wait_until(lambda: sender.num_sent == 510)

    assert collector.items == [500, 6, 4]
    assert sender.num_dropped == 5


def refuses(collector: Collector) -> None:
    collector.is_willing = False


def breaks(collector: Collector) -> None:
    collector.error = ValueError("cannot be encoded")


@pytest.mark.parametrize("misbehave", [refuses, breaks])
def test_a_refused_batch_is_counted_as_dropped_and_the_next_one_is_tried(
    misbehave: Callable[[Collector], None],
) -> None:
    collector = Collector()
    with sending(collector) as sender:
        misbehave(collector)
        sender.put(1)
        wait_until(lambda: sender.num_failures == 1)
        collector.is_willing, collector.error = True, None
        sender.put(2)
        wait_until(lambda: collector.items == [2])

        assert sender.num_dropped == 1
        found = {(sample.metric, sample.labels): sample.value for sample in sender.samples()}
        assert found[metrics.TELEMETRY_DROPPED, ("test",)] == 1
        assert found[metrics.TELEMETRY_ERRORS, ("test",)] == 1
        assert found[metrics.TELEMETRY_LAG, ("test",)] == 0


def test_a_failing_collector_is_mentioned_once_and_with_its_reason() -> None:
    collector = Collector()
    collector.is_willing = False
    with capture_logs() as lines, sending(collector, why=lambda: "UNAVAILABLE") as sender:
        for number in range(1, 6):
            sender.put(number)
            wait_until(lambda expected=number: sender.num_failures == expected)  # type: ignore[misc]

    mentions = [line for line in lines if line["log_level"] == "warning"]
    assert len(mentions) == 1
    assert mentions[0]["reason"] == "UNAVAILABLE"


def test_stopping_sends_what_is_queued() -> None:
    collector = Collector()
    sender: Sender[int] = Sender("test", collector.export, collector.close, max_queued=100, delay_seconds=60)
    sender.start()
    for item in range(5):
        sender.put(item)

    sender.stop(5)

    assert collector.items == [0, 1, 2, 3, 4]
    assert collector.is_closed
    assert not sender.put(9), "nothing is taken after the end"


def test_stopping_is_bounded_when_the_collector_never_answers() -> None:
    hanging = threading.Event()
    sender: Sender[int] = Sender(
        "test", lambda _: hanging.wait(30), lambda: None, max_queued=100, max_batch=1, delay_seconds=0.001
    )
    sender.start()
    for item in range(5):
        sender.put(item)
    wait_until(lambda: sender.num_queued == 4)
    begin = time.monotonic()

    sender.stop(0.2)

    assert time.monotonic() - begin < 15
    assert sender.num_queued == 0
    assert sender.num_dropped == 4
    hanging.set()


def test_a_sender_that_was_never_started_stops_too() -> None:
    collector = Collector()
    sender: Sender[int] = Sender("test", collector.export, collector.close, max_queued=1)

    sender.stop(1)

    assert collector.is_closed
