"""The event log: order, gaps, and what it promises to the engine."""

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from naive_engine import ManualClock

from kvwatch.telemetry.events import DrainStarted, StepFailed
from kvwatch.telemetry.log import Cursor, EventLog, GapError
from kvwatch.telemetry.schema import Event


def drained(number: int) -> DrainStarted:
    return DrainStarted(grace_ns=number)


def test_events_are_read_in_order_with_sequence_step_and_time() -> None:
    clock = ManualClock()
    log = EventLog(8, clock)
    cursor = log.subscribe("test")
    log.begin(3)
    log.append(drained(1))
    clock.advance(1.0)
    log.begin(4)
    log.append(StepFailed(error="X"))

    events = cursor.read()

    assert [(e.seq, e.step, e.time_ns) for e in events] == [(0, 3, 1_000_000_000), (1, 4, 2_000_000_000)]
    assert cursor.read() == []


def test_a_log_is_active_while_somebody_is_subscribed() -> None:
    log = EventLog(8)
    states = [log.active]
    first, second = log.subscribe("a"), log.subscribe("b")
    for cursor in (first, second, second):
        states.append(log.active)
        cursor.close()

    assert [*states, log.active] == [False, True, True, False, False]


def test_a_subscriber_sees_nothing_from_before_it_came() -> None:
    log = EventLog(8)
    log.append(drained(1))
    cursor = log.subscribe("late")
    log.append(drained(2))

    assert [event.seq for event in cursor.read()] == [1]


@given(capacity=st.integers(1, 20), bursts=st.lists(st.integers(0, 30), max_size=12), limit=st.integers(1, 25))
def test_a_cursor_reads_every_event_once_or_is_told_of_the_gap(capacity: int, bursts: list[int], limit: int) -> None:
    log = EventLog(capacity)
    cursor = log.subscribe("test")
    seen: list[int] = []
    gaps: list[tuple[int, int, int, int]] = []
    for burst in bursts:
        for _ in range(burst):
            log.append(drained(log.head))
        try:
            while events := cursor.read(limit):
                assert len(events) <= limit
                assert [event.grace_ns for event in events if isinstance(event, DrainStarted)] == [
                    event.seq for event in events
                ]
                seen += [event.seq for event in events]
        except GapError as gap:
            gaps.append((gap.wanted, gap.oldest, cursor.position, log.head))
            cursor.resume_at(gap.oldest)

    assert seen == sorted(set(seen))
    assert len(seen) + cursor.num_lost + cursor.lag == log.head
    assert cursor.lag <= capacity
    for wanted, oldest, position, head in gaps:
        assert wanted == position < oldest == head - capacity


def test_resuming_counts_the_gap_and_what_was_lost() -> None:
    log = EventLog(4)
    cursor = log.subscribe("slow")
    for number in range(10):
        log.append(drained(number))
    with pytest.raises(GapError, match="event 0 was asked for, the oldest kept is 6"):
        cursor.read()

    cursor.resume_at(10)

    assert (cursor.num_gaps, cursor.num_lost, cursor.lag) == (1, 10, 0)


def test_a_reader_on_another_thread_is_lapped_but_never_sees_a_wrong_event() -> None:
    log = EventLog(64)
    cursor = log.subscribe("reader")
    done = threading.Event()
    wrong: list[str] = []
    num_read = 0

    def read() -> None:
        nonlocal num_read
        while not done.is_set() or cursor.lag:
            before = cursor.position
            try:
                events = cursor.read(50)
            except GapError:
                cursor.resume_at(log.head)
                continue
            num_read += len(events)
            if [event.seq for event in events] != list(range(before, before + len(events))):
                wrong.append(f"asked for {before}, got {[event.seq for event in events]}")

    thread = threading.Thread(target=read)
    thread.start()
    for number in range(200_000):
        log.append(drained(number))
    done.set()
    thread.join(30)

    assert not thread.is_alive()
    assert wrong == []
    assert num_read + cursor.num_lost == 200_000


def test_what_goes_wrong_in_a_subscriber_never_reaches_the_engine() -> None:
    log = EventLog(2)
    log.subscribe("never reads")

    for number in range(1000):
        log.append(drained(number))

    assert log.head == 1000


def test_a_log_knows_its_capacity() -> None:
    assert EventLog(7).capacity == 7


class RacingRing(list[Event | None]):
    """The log's ring, with a writer that laps the reader right before its slice number `at`."""

    def __init__(self, log: EventLog, at: int) -> None:
        super().__init__([None] * log.capacity)
        self._log = log
        self._slices_left = at

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            self._slices_left -= 1
            if self._slices_left == 0:
                for _ in range(self._log.capacity):
                    self._log.append(drained(self._log.head))
        return super().__getitem__(index)


def raced_log(at: int) -> tuple[EventLog, Cursor]:
    """A full log whose reader is at event 6 of 12, so that reading takes two slices of the ring."""
    log = EventLog(8)
    log._ring = RacingRing(log, at)  # the one way to meet a race on purpose
    cursor = log.subscribe("raced")
    for number in range(12):
        log.append(drained(number))
    cursor.position = 6
    return log, cursor


def test_a_reader_that_is_lapped_before_it_reads_finds_the_gap() -> None:
    _, cursor = raced_log(at=1)

    with pytest.raises(GapError, match="event 6 was asked for, the oldest kept is 12"):
        cursor.read()


def test_a_reader_that_is_lapped_while_it_reads_keeps_what_it_has_and_then_finds_the_gap() -> None:
    _, cursor = raced_log(at=2)

    assert [event.seq for event in cursor.read()] == [6, 7]
    with pytest.raises(GapError, match="event 8 was asked for, the oldest kept is 12"):
        cursor.read()
