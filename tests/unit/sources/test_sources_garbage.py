"""Messages that are no batches, times that cannot be, storms of clears: nothing is wiped, and nothing costs much."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rogue_publisher import CLEARED, batch, removed, stored
from subscription_stage import keys

from kvwatch.sources.complaints import Complaints
from kvwatch.sources.insight import make_observer
from kvwatch.sources.insight.ghosts import Ghosts
from kvwatch.sources.insight.observer import FEWER_GHOSTS, MAX_FULL_PLACES, Insight
from kvwatch.sources.mirror import LOG_CAPACITY, Mirror
from kvwatch.sources.stream_reader import StreamReader
from kvwatch.telemetry.clock import SystemClock
from kvwatch.telemetry.log import EventLog
from kvwatch.wire.decoder import Decoder
from kvwatch.wire.foreign import MAX_HASH_BYTES, MAX_KEPT_HASH_BYTES, hash_bytes

GARBAGE = (b"", b"\xc1", b"\x93\x01", b"none of it", batch(ts=1.0)[:-1], b"\x01", b"\x80")
"""Nothing of these can be understood."""


def make_reader(*, can_replay: bool = False, on_lag: Callable[[int], None] | None = None) -> StreamReader:
    clock = SystemClock()
    observer, complaints = make_observer(100_000), Complaints(engine="test")
    mirror = Mirror(EventLog(LOG_CAPACITY, clock), clock, observer=observer)
    return StreamReader(mirror, Decoder(), complaints, clock, can_replay=can_replay, on_lag=on_lag)


def resident(reader: StreamReader) -> set[bytes]:
    return {each for state in reader.mirror.snapshot().indexed for each in state.hashes}


numbers = st.one_of(st.integers(0, 30), st.integers(2**32, 2**64 - 2))
garbage = st.lists(st.tuples(numbers, st.sampled_from(GARBAGE)), max_size=12)


@settings(max_examples=200, deadline=None)
@given(garbage, garbage, st.booleans(), st.booleans())
def test_garbage_under_any_number_wipes_nothing_and_makes_no_gap(
    before: list[tuple[int, bytes]], after: list[tuple[int, bytes]], can_replay: bool, is_replayed: bool
) -> None:
    reader = make_reader(can_replay=can_replay)
    for seq, payload in before:
        if seq:
            reader.take_live(seq, payload)
    assert (reader.order.next_seq, reader.wants_healing) == (None, False)

    reader.order.skip_to(0)
    reader.mirror.confirm()
    for seq in range(10):
        reader.take_live(seq, batch(stored(seq), ts=100.0 + seq))
    left_out = 0
    for seq, payload in after:
        if seq != 10:  # what is expected may be garbage: then something is lost, and the history is broken
            left_out += 1
            if is_replayed:
                assert reader.take_replayed(seq, payload)
            else:
                reader.take_live(seq, payload)
    assert not reader.wants_healing
    reader.take_live(10, batch(stored(10), ts=110.0))

    assert resident(reader) == keys(*range(11))
    assert reader.mirror.is_whole
    assert (reader.counts.gaps, reader.counts.resets, reader.order.next_seq, len(reader.held)) == (0, 0, 11, 0)
    assert sum(reader._complaints.counts.values()) >= left_out * (not is_replayed)


@pytest.mark.parametrize("ts", [-1.0, -1e300, 1e300, 1e12, float("inf"), float("-inf"), float("nan"), 2**63])
def test_a_time_that_cannot_be_tells_nothing_and_hides_no_restart(ts: float) -> None:
    lags: list[int] = []
    reader = make_reader(on_lag=lags.append)
    for seq in range(5):
        reader.take_live(seq, batch(stored(seq), ts=ts if seq == 3 else time.time()))

    assert resident(reader) == keys(*range(5))
    assert len(lags) == 3, "the first one is no news, and one has no time"
    assert all(abs(lag) < 3600 * 10**9 for lag in lags)

    reader.take_live(1, batch(stored(77), ts=time.time()))

    assert (reader.counts.resets, resident(reader)) == (1, keys(77)), "newer than all, under a number that was used"


def seconds(events: list[Any]) -> float:
    reader = make_reader()
    reader.order.skip_to(0)
    payload = batch(*events, ts=time.time())
    began = time.process_time()
    reader.take_live(0, payload)
    return time.process_time() - began


def test_a_storm_of_clears_costs_what_it_clears() -> None:
    """Each round fills 40 places; with a clear it must not cost many times what taking the blocks back costs."""
    groups = range(40)
    churn = [*(stored(1, group=g) for g in groups), *(removed(1, group=g) for g in groups)]
    fill = [stored(2, group=g) for g in groups]
    take_back = [removed(2, group=g) for g in groups]

    storm = min(seconds([*churn, *[each for _ in range(100) for each in (*fill, CLEARED)]]) for _ in range(3))
    control = min(seconds([*churn, *[each for _ in range(100) for each in (*fill, *take_back)]]) for _ in range(3))

    assert storm < 3 * control


def test_after_a_clear_no_removal_is_remembered_and_new_ones_are() -> None:
    ghosts = Ghosts(1024)
    for number in range(3000):
        ghosts.remove(b"%d" % number, number)
    ghosts.clear()
    assert (len(ghosts), ghosts.store(b"2999", 0)) == (0, None)

    for number in range(10):
        ghosts.remove(b"n%d" % number, 5)
    found = ghosts.store(b"n3", 25)

    assert found is not None
    assert (found.away_ns, found.num_extra_blocks, len(ghosts)) == (20, 7, 9)


def test_an_engine_of_many_groups_is_remembered_in_less_detail() -> None:
    insight = Insight()
    for group in range(30):
        insight.on_stored("device", str(group), [b"h"], None, 0, None)
        insight.on_removed("device", str(group), [b"h"], [0], 0)

    sizes = [ghosts._size for ghosts in insight._ghosts.values()]
    assert sizes[MAX_FULL_PLACES:] == [FEWER_GHOSTS] * (30 - MAX_FULL_PLACES)


@pytest.mark.parametrize("num_bytes", [1, 32, 96, MAX_KEPT_HASH_BYTES, MAX_KEPT_HASH_BYTES + 1, MAX_HASH_BYTES])
def test_hashes_of_any_length_are_told_apart_and_kept_in_bounded_room(num_bytes: int) -> None:
    reader = make_reader()
    reader.order.skip_to(0)
    one, other = b"\x01" * num_bytes, b"\x01" * (num_bytes - 1) + b"\x02"
    reader.take_live(0, batch(stored(one, other), ts=time.time()))

    assert reader.mirror.num_blocks == 2
    assert all(len(each) <= MAX_KEPT_HASH_BYTES for each in resident(reader))

    reader.take_live(1, batch(removed(one), ts=time.time()))

    assert resident(reader) == {hash_bytes(other)}
    assert reader.mirror.num_unknown_removals == 0
