"""The ledger against a naive engine that counts everything anew."""

from typing import Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_engine import BLOCK_SIZE, ManualClock, NaiveEngine

from kvwatch.ledger.ledger import Ledger
from kvwatch.ledger.pool import BlockState
from kvwatch.telemetry import events as ev
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.schema import Event

ACTS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 30)), max_size=12)


class Follower:
    """A ledger that reads an engine's log."""

    def __init__(self, engine: NaiveEngine) -> None:
        self.engine = engine
        self.cursor = engine.log.subscribe("test")
        self.ledger = Ledger()
        self.ledger.load(engine.snapshot())
        self.wrong: list[str] = []

    def follow(self) -> None:
        while events := self.cursor.read():
            for event in events:
                self.ledger.apply(event)
                if isinstance(event, ev.StepCompleted):
                    self.wrong += self.ledger.check(event)


def start(num_blocks: int = 13, capacity: int = 4096) -> Follower:
    return Follower(NaiveEngine(EventLog(capacity, ManualClock()), num_blocks))


@settings(max_examples=200, deadline=None)
@given(steps=st.lists(ACTS, max_size=12), num_blocks=st.integers(3, 20))
def test_a_ledger_rebuilt_from_events_equals_the_engine_down_to_the_single_block(
    steps: list[list[tuple[int, int]]], num_blocks: int
) -> None:
    follower = start(num_blocks)
    engine = follower.engine
    for acts in steps:
        engine.step(acts)
        follower.follow()

        pool = follower.ledger.pool("device")
        assert follower.ledger.differences(engine.snapshot()) == []
        assert follower.wrong == []
        assert (pool.num_used, pool.num_cached, pool.num_empty) == (
            len(engine.used()),
            len(engine.cached()),
            len(engine.empty()),
        )
        assert pool.num_filled_slots == engine.filled_of_used()
        assert pool.num_shared == sum(engine.references(block) > 1 for block in engine.used())
        assert pool.orphaned(follower.ledger.requests.keys()) == 0


@settings(max_examples=60, deadline=None)
@given(before=st.lists(ACTS, max_size=6), after=st.lists(ACTS, max_size=6))
def test_a_snapshot_and_what_follows_say_the_same_as_all_events(
    before: list[list[tuple[int, int]]], after: list[list[tuple[int, int]]]
) -> None:
    early = start()
    for acts in before:
        early.engine.step(acts)
    late = Follower(early.engine)
    for acts in after:
        early.engine.step(acts)

    early.follow()
    late.follow()

    assert late.ledger.differences(early.ledger.to_snapshot()) == []
    assert late.wrong == early.wrong == []


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(ACTS, min_size=1, max_size=10))
def test_filled_slots_are_right_however_rarely_anybody_looks(steps: list[list[tuple[int, int]]]) -> None:
    follower = start()
    for acts in steps:
        follower.engine.step(acts)
    follower.follow()

    column = follower.ledger.pool("device").filled_slots

    assert column.tolist() == [follower.engine.filled[block] for block in range(follower.engine.num_blocks)]


def test_a_copied_block_holds_what_its_source_holds_and_the_source_loses_one_owner() -> None:
    follower = start()
    engine = follower.engine
    engine.admit(engine.queue(), 1)
    engine.write(3)
    engine.fork("r1")
    engine.copy_on_write("r1", 1)
    follower.follow()

    pool = follower.ledger.pool("device")
    source, destination = pool.tables["r1", 0][-1], pool.tables["r1", 1][-1]
    assert source != destination
    assert pool.filled_slots[[source, destination]].tolist() == [3, 3]
    assert pool.ref_counts[[source, destination]].tolist() == [1, 1]
    assert pool.num_filled_slots == 6


def test_a_cached_block_is_neither_used_nor_empty_and_clearing_the_cache_empties_it() -> None:
    follower = start()
    engine = follower.engine
    engine.admit(engine.queue(), 1)
    engine.write(BLOCK_SIZE)
    engine.finish("r1")
    follower.follow()
    assert follower.ledger.pool("device").states[0] is BlockState.CACHED

    engine.clear_cache()
    follower.follow()

    assert set(follower.ledger.pool("device").states) == {BlockState.EMPTY}


def test_a_used_block_that_loses_its_hash_goes_on_and_is_empty_when_released() -> None:
    follower = start()
    engine = follower.engine
    engine.admit(engine.queue(), 1)
    engine.write(BLOCK_SIZE)
    engine.clear_cache()
    follower.follow()
    assert follower.ledger.pool("device").states[0] is BlockState.USED

    engine.finish("r1")
    follower.follow()

    assert follower.ledger.pool("device").states[0] is BlockState.EMPTY


def test_a_preempted_request_waits_again_with_the_time_of_its_first_arrival() -> None:
    follower = start()
    engine = follower.engine
    engine.admit(engine.queue())
    queued_ns = engine.running["r1"]
    engine.log.begin(5)
    engine.preempt("r1")
    follower.follow()

    request = follower.ledger.requests["r1"]
    assert (request.state, request.queued_ns) == ("waiting", queued_ns)
    assert (follower.ledger.num_running, follower.ledger.num_waiting) == (0, 1)


def test_a_rejected_request_and_a_drain_change_no_state() -> None:
    follower = start()
    before = follower.ledger.to_snapshot()
    follower.engine.emit(ev.RequestRejected(request="x", reason="queue_full"))
    follower.engine.emit(ev.FirstToken(request="x", ttft_ns=1))
    follower.engine.emit(ev.StepFailed(error="ValueError"))
    follower.engine.emit(ev.DrainStarted(grace_ns=1))
    follower.follow()

    after = follower.ledger.to_snapshot()
    assert (after.tiers, after.sequences, after.requests) == (before.tiers, before.sequences, before.requests)
    assert after.seq == before.seq + 4


@pytest.mark.parametrize(
    ("checksum", "equation"),
    [
        ("num_used_blocks", "used: ledger 2 != engine 3"),
        ("num_cached_blocks", "cached: ledger 0 != engine 1"),
        ("num_empty_blocks", "empty: ledger 10 != engine 11"),
        ("num_table_entries", "table entries: ledger 2 != engine 3"),
        ("num_running", "running: ledger 1 != engine 2"),
        ("num_waiting", "waiting: ledger 0 != engine 1"),
    ],
)
def test_a_checksum_that_differs_is_told_as_an_equation(checksum: str, equation: str) -> None:
    follower = start()
    follower.engine.admit(follower.engine.queue())
    follower.engine.complete(**{checksum: 1})

    follower.follow()

    assert follower.wrong == [equation]


@pytest.mark.parametrize(
    ("event", "sentence"),
    [
        (
            ev.BlocksAllocated(request="r1", sequence=0, block_ids=[1], reason="decode"),
            "block 1 was allocated to r1 though it was not empty",
        ),
        (
            ev.BlocksReleased(request="r1", sequence=0, block_ids=[9], reason="finished"),
            "block 9 was released by r1 though nobody held it",
        ),
        (
            ev.BlocksEvicted(
                hashes=[b"h"], block_ids=[1], ages_ns=[1], idles_ns=[1], hits=[0], reason="pressure", request="x"
            ),
            "block 1 was evicted though it was not cached",
        ),
        (
            ev.BlocksReused(request="r1", sequence=0, block_ids=[9], gaps_ns=[]),
            "block 9 was hit by r1 though it has no hash",
        ),
        (
            ev.BlocksCopied(request="r1", sequence=0, sources=[9], destinations=[8]),
            "block 9 was copied by r1 though its table lacks it",
        ),
        (ev.CacheCleared(block_ids=[9]), "block 9 lost its hash though it was not used and stored"),
        (
            ev.SequenceForked(request="r1", parent=0, child=1, num_blocks=5),
            "r1 forked 5 blocks of a table that has 2",
        ),
        (ev.RequestFinished, "request gone finished though it was not live"),
        (
            ev.RequestQueued(request="r1", prompt_tokens=1, num_sequences=1, queued_ns=0),
            "request r1 was queued though it is live",
        ),
        (
            ev.RequestAdmitted(
                request="r1", prompt_tokens=1, queried_tokens=1, hit_tokens=0, granularity_lost_tokens=0, queue_ns=0
            ),
            "request r1 became running though it was running",
        ),
    ],
)
def test_an_event_that_contradicts_the_state_is_reported_with_the_next_step(
    event: Event | type[ev.RequestFinished], sentence: str
) -> None:
    follower = start()
    engine = follower.engine
    engine.admit(engine.queue())
    if isinstance(event, type):
        engine.running["gone"] = 0
        engine.finish("gone")
    else:
        engine.emit(event)
    follower.follow()
    engine.complete()

    follower.follow()

    assert sentence in follower.wrong


def test_a_leak_shows_as_orphaned_blocks() -> None:
    follower = start()
    engine = follower.engine
    engine.admit(engine.queue(), 2)
    engine.admit(engine.queue(), 1)
    follower.follow()

    assert follower.ledger.pool("device").orphaned({"r1", "r2"}) == 0
    assert follower.ledger.pool("device").orphaned({"r2"}) == 2
    assert follower.ledger.pool("device").orphaned(set()) == 3


@pytest.mark.parametrize("kind", ["ref_counts", "hashes", "filled_slots", "tables", "requests", "num_blocks"])
def test_differences_name_what_differs(
    kind: Literal["ref_counts", "hashes", "filled_slots", "tables", "requests", "num_blocks"],
) -> None:
    follower = start()
    engine = follower.engine
    engine.admit(engine.queue(), 2)
    follower.follow()
    if kind == "hashes":
        engine.hashes[1] = b"other"
    elif kind == "filled_slots":
        engine.filled[1] = 3
    elif kind == "tables":
        engine.tables["r1", 0].reverse()
    elif kind == "ref_counts":
        engine.tables["r1", 1] = [1]
    elif kind == "requests":
        engine.waiting["r2"] = 0
    else:
        engine.num_blocks += 1
        engine.filled[engine.num_blocks - 1] = 0

    assert len(follower.ledger.differences(engine.snapshot())) >= 1


def test_storing_a_free_block_makes_it_cached_and_storing_a_used_one_keeps_it_used() -> None:
    follower = start()
    engine = follower.engine
    engine.admit(engine.queue(), 1)
    engine.emit(ev.BlocksStored(hashes=[b"a", b"b"], block_ids=[1, 2], parent=None))
    follower.follow()

    pool = follower.ledger.pool("device")
    assert pool.states[:3] == [BlockState.USED, BlockState.CACHED, BlockState.EMPTY]
    assert pool.hashes[1:3] == [b"a", b"b"]
    assert (pool.num_used, pool.num_cached, pool.num_empty) == (1, 1, 10)


def test_with_several_tiers_each_event_changes_its_own() -> None:
    log = EventLog(64, ManualClock())
    engine = NaiveEngine(log)
    snapshot = engine.snapshot()
    (device,) = snapshot.tiers
    host = msgspec.structs.replace(device, tier="host")
    ledger = Ledger()
    ledger.load(msgspec.structs.replace(snapshot, tiers=[device, host]))
    event = ev.BlocksStored(hashes=[b"a"], block_ids=[1], parent=None)
    event.tier = "host"

    ledger.apply(event)

    assert (ledger.pool("device").num_cached, ledger.pool("host").num_cached) == (0, 1)


def test_only_the_first_faults_of_a_step_are_kept() -> None:
    follower = start()
    for _ in range(50):
        follower.engine.emit(ev.CacheCleared(block_ids=[1]))
    follower.engine.complete()

    follower.follow()

    assert len(follower.wrong) == 8


def test_shared_blocks_of_a_request_that_returns_get_one_more_reference_each() -> None:
    follower = start()
    log = follower.engine.log
    log.append(ev.RequestQueued("r1", 4, 2, 0))
    log.append(ev.BlocksAllocated("r1", 0, [1, 2], "restore"))
    log.append(ev.BlocksShared("r1", 1, [1]))
    follower.follow()

    pool = follower.ledger.pool("device")
    assert pool.tables == {("r1", 0): [1, 2], ("r1", 1): [1]}
    assert (pool.num_used, pool.num_entries, pool.num_shared) == (2, 3, 1)

    log.append(ev.BlocksShared("r1", 1, [5]))
    follower.follow()
    assert any("shared by r1 though nobody held it" in fault for fault in follower.ledger._faults)
