"""The pieces below a sidecar: numbers that a log leaves out, the clock of another machine, counts of hashes."""

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from naive_engine import ManualClock, NaiveEngine

from kvwatch.ledger.collector import Collector
from kvwatch.ledger.index import IndexCounts
from kvwatch.ledger.ledger import Ledger
from kvwatch.sources.remote_clock import RemoteClock
from kvwatch.telemetry import events as ev
from kvwatch.telemetry.log import Cursor, EventLog, GapError
from kvwatch.telemetry.snapshot import EngineSnapshot, IndexState

# ---------------------------------------------------------------- logs with holes


def read_on(cursor: Cursor, limit: int) -> list[int]:
    """Return numbers of events, or none when what comes next is lost; then the cursor stands behind that."""
    try:
        return [event.seq for event in cursor.read(limit)]
    except GapError as gap:
        cursor.resume_at(max(gap.oldest, cursor.position + 1))
        return []


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5), st.integers(1, 9)), max_size=30))
def test_a_reader_sees_every_event_between_holes_and_a_gap_for_every_hole(acts: list[tuple[bool, int, int]]) -> None:
    log = EventLog(16)
    cursor = log.subscribe("test")
    appended: set[int] = set()
    seen: list[int] = []
    for is_hole, number, limit in acts:
        if is_hole:
            log.skip(number)
        else:
            for _ in range(number):
                appended.add(log.head)
                log.append(ev.StepFailed(error="E"))
        seen += read_on(cursor, limit)
    while cursor.position < log.head:
        seen += read_on(cursor, 3)
    assert seen == sorted(set(seen))
    assert set(seen) <= appended
    assert cursor.num_lost == log.head - len(seen)


def test_a_forwarded_event_keeps_its_step_and_its_time() -> None:
    log = EventLog(16)
    cursor = log.subscribe("test")
    log.forward(ev.StepFailed(error="E", seq=77, step=5, time_ns=123))
    (event,) = cursor.read()
    assert (event.seq, event.step, event.time_ns) == (0, 5, 123)


def test_a_collector_heals_a_hole_from_a_snapshot() -> None:
    log = EventLog(64)
    engine = NaiveEngine(log)
    ledger = Ledger()

    class Follower:
        def load(self, snapshot: EngineSnapshot) -> None:
            ledger.load(snapshot)

        def apply(self, events: list[ev.StepFailed]) -> None:
            for event in events:
                ledger.apply(event)

        def settle(self) -> None: ...

        def publish(self) -> None: ...

    collector = Collector(log, lambda _: engine.snapshot(), Follower())  # type: ignore[arg-type]
    assert collector.heal()
    engine.step([(0, 1), (1, 1), (2, 1)])
    log.skip(3)
    engine.step([(0, 2), (1, 2), (2, 2)])
    while not collector.needs_snapshot:
        collector.drain()
    assert collector.heal()
    assert ledger.differences(engine.snapshot()) == []
    assert collector.num_gaps == 1
    assert collector.num_dropped >= 3


# ---------------------------------------------------------------- another machine's clock


@given(st.integers(0, 2**62), st.integers(0, 10**12))
def test_times_of_a_remote_engine_become_its_own_unix_times(their_monotonic: int, passed: int) -> None:
    local = ManualClock()
    clock = RemoteClock(local)
    offset = local.wall_ns() - their_monotonic  # its machine says the same Unix time now
    clock.synchronise(offset)
    assert clock.monotonic_ns() == their_monotonic
    local.now_ns += passed
    assert clock.monotonic_ns() == their_monotonic + passed
    assert clock.wall_ns() - clock.monotonic_ns() == offset


# ---------------------------------------------------------------- counts of resident hashes


@dataclass
class NaiveIndex:
    resident: set[tuple[str, str, bytes]] = field(default_factory=set)

    def counts(self) -> dict[tuple[str, str], int]:
        return dict(Counter((tier, group) for tier, group, _ in self.resident))


ACTS = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "remove", "clear", "reset", "gap", "whole"]),
        st.sampled_from(["device", "host", "disk"]),
        st.sampled_from(["0", "1"]),
        st.sets(st.integers(0, 20), max_size=6),
    ),
    max_size=40,
)


@given(ACTS, st.booleans())
def test_counts_are_those_of_the_sets_of_hashes(acts: list[tuple[str, str, str, set[int]]], is_complete: bool) -> None:
    faults: list[str] = []
    naive = NaiveIndex({("device", "0", bytes([200]))})
    index = IndexCounts(foreign_snapshot([IndexState("device", "0", [bytes([200])], [3])]), faults.append)
    for act, tier, group, numbers in acts:
        keys = {(tier, group, bytes([number])) for number in numbers}
        event = apply_naively(naive, act, keys, tier, group, is_complete=is_complete)
        if event is not None:
            index.handlers[type(event)](event)
    assert {place: count for place, count in index.counts.items() if count} == naive.counts()
    assert faults == []


def apply_naively(
    naive: NaiveIndex, act: str, keys: set[tuple[str, str, bytes]], tier: str, group: str, *, is_complete: bool
) -> ev.BlocksStored | ev.BlocksEvicted | ev.CacheCleared | ev.SourceReset | ev.SourceGap | ev.SourceCompleteness:
    if act == "store":
        new = keys - naive.resident
        naive.resident |= new
        return ev.BlocksStored([key[2] for key in new], [], None, tier=tier, group=group)  # type: ignore[arg-type]
    if act == "remove":
        gone = keys & naive.resident
        naive.resident -= gone
        hashes = [key[2] for key in gone]
        return ev.BlocksEvicted(hashes, [], [], [], [], "removed", "", tier=tier, group=group)  # type: ignore[arg-type]
    if act == "clear":
        naive.resident = {key for key in naive.resident if key[0] != tier}
        return ev.CacheCleared([], tier=tier)  # type: ignore[arg-type]
    if act == "reset":
        naive.resident.clear()
        return ev.SourceReset(reason="restart", is_complete=is_complete)
    return ev.SourceGap(num_batches=1) if act == "gap" else ev.SourceCompleteness(is_complete=is_complete)


def test_more_removals_than_stores_are_a_fault_and_no_negative_count() -> None:
    faults: list[str] = []
    index = IndexCounts(foreign_snapshot([]), faults.append)
    index.handlers[ev.BlocksEvicted](ev.BlocksEvicted([b"a", b"b"], [], [], [], [], "removed", ""))
    assert index.counts == {("device", "0"): 0}
    assert "2 too many" in faults[0]


def foreign_snapshot(indexed: list[IndexState]) -> EngineSnapshot:
    return EngineSnapshot(0, 0, 0, 16, 0, 0, 0, 0, [], [], [], indexed=indexed, is_foreign=True)


# ---------------------------------------------------------------- waiting requests in a snapshot of the ledger


@pytest.mark.parametrize("seed", range(8))
def test_a_ledger_loaded_from_anothers_snapshot_waits_for_the_same(seed: int) -> None:
    log = EventLog(4096)
    log.subscribe("test")
    engine = NaiveEngine(log)
    first, second = Ledger(), Ledger()
    first.load(engine.snapshot())
    cursor = log.subscribe("ledger")
    for step in range(40):
        engine.step([((seed * 7 + step * each) % 12, (step + each * 3) % 30) for each in range(5)])
        for event in cursor.read(4096):
            first.apply(event)
        second.load(first.to_snapshot())
        waiting = {reason: number for reason, number in first.waiting_for.items() if number}
        assert second.waiting_for == waiting
        assert second.differences(engine.snapshot()) == []
