"""The mirror against recordings, against a naive model, and at its limits."""

import threading
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from kv_event_recordings import SCRIPTED, mixed_load, payloads, scripted
from subscription_stage import keys

from kvwatch.sources.mirror import LOG_CAPACITY, Mirror
from kvwatch.sources.transitions import MAX_BLOCKS_PER_EVENT
from kvwatch.telemetry.events import (
    BlocksEvicted,
    BlocksStored,
    CacheCleared,
    SourceCompleteness,
    SourceGap,
    SourceReset,
)
from kvwatch.telemetry.log import Cursor, EventLog
from kvwatch.telemetry.schema import Event
from kvwatch.wire.decoder import Decoder
from kvwatch.wire.foreign import Cleared, ForeignBatch, Removed, Stored, StoredInFull

SECOND = 1_000_000_000


class Clock:
    """A clock that stands at ten days after the epoch."""

    def monotonic_ns(self) -> int:
        return 5 * SECOND

    def wall_ns(self) -> int:
        return 864_000 * SECOND


def make(**options: Any) -> tuple[Mirror, Cursor]:
    log = EventLog(LOG_CAPACITY, Clock())
    return Mirror(log, Clock(), **options), log.subscribe("test")


def store(*hashes: int | bytes, ts: float = 1.0, **fields: Any) -> ForeignBatch:
    return ForeignBatch([Stored(block_hashes=list(hashes), **fields)], ts)


def remove(*hashes: int | bytes, ts: float = 1.0, **fields: Any) -> ForeignBatch:
    return ForeignBatch([Removed(block_hashes=list(hashes), **fields)], ts)


def clear(ts: float = 1.0) -> ForeignBatch:
    return ForeignBatch([Cleared()], ts)


def facts(cursor: Cursor) -> list[Event]:
    return cursor.read(100_000)


def snapshot_of(mirror: Mirror) -> dict[tuple[str, str], dict[bytes, int]]:
    return {
        (state.tier, state.group): dict(zip(state.hashes, state.ref_counts, strict=True))
        for state in mirror.snapshot().indexed
    }


class Followed:
    """What somebody knows who begins with nothing and follows the events by increments alone."""

    def __init__(self) -> None:
        self.resident: dict[tuple[str, str], set[bytes]] = {}
        self.is_complete = False

    def take(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, BlocksStored):
                place = self.resident.setdefault((event.tier, event.group), set())
                assert not place & set(event.hashes), "stored though it was there"
                assert len(set(event.hashes)) == len(event.hashes) <= MAX_BLOCKS_PER_EVENT
                assert event.block_ids == []
                place |= set(event.hashes)
            elif isinstance(event, BlocksEvicted):
                place = self.resident[event.tier, event.group]
                assert place >= set(event.hashes), "removed though it was not there"
                assert len(event.ages_ns) == len(event.hashes)
                assert all(age >= 0 for age in event.ages_ns)
                assert (event.block_ids, event.reason) == ([], "removed")
                place -= set(event.hashes)
            elif isinstance(event, CacheCleared):
                for tier, group in self.resident:
                    if tier == event.tier:
                        self.resident[tier, group] = set()
            elif isinstance(event, SourceReset):
                self.resident.clear()
                self.is_complete = event.is_complete
            elif isinstance(event, SourceGap):
                self.is_complete = False
            elif isinstance(event, SourceCompleteness):
                assert event.is_complete != self.is_complete, "told twice"
                self.is_complete = event.is_complete

    @property
    def occupied(self) -> dict[tuple[str, str], set[bytes]]:
        return {place: hashes for place, hashes in self.resident.items() if hashes}


# ---------------------------------------------------------------- recordings


def test_the_recorded_load_ends_with_117_resident_hashes_and_never_has_more_than_119() -> None:
    mirror, cursor = make()
    decoder, followed = Decoder(), Followed()
    mirror.confirm()
    most = 0

    for message in mixed_load():
        mirror.apply(decoder.decode(message.payload))
        most = max(most, mirror.num_blocks)
        followed.take(facts(cursor))
        assert sum(map(len, followed.occupied.values())) == mirror.num_blocks

    assert (mirror.num_blocks, mirror.num_resident("device", "0")) == (117, 117)
    assert most <= 119
    assert (mirror.drift_blocks, mirror.num_unknown_removals, mirror.is_whole) == (0, 0, True)
    assert mirror.block_size == 32
    assert {tier_group: set(hashes) for tier_group, hashes in snapshot_of(mirror).items()} == followed.occupied


def naive_copies(name: str) -> Counter[tuple[str, str, int, str]]:
    """Copies by rank, medium, group and hash that a recording's rows amount to, without its lives being ended."""
    copies: Counter[tuple[str, str, int, str]] = Counter()
    for row in scripted(name)["expected"]:
        if row["segment"] != "A":
            continue
        if row["type"] == "cleared":
            copies.clear()
        for each in row.get("hashes") or ():
            key = ("A", (row["medium"] or "GPU").upper(), row["group_idx"] or 0, each)
            if row["type"] == "stored":
                copies[key] += 1
            elif copies[key] > 1:
                copies[key] -= 1
            else:
                del copies[key]
    return copies


@pytest.mark.parametrize("name", SCRIPTED)
def test_recordings_amount_to_the_copies_that_a_naive_count_finds(name: str) -> None:
    mirror, cursor = make()
    decoder, followed = Decoder(), Followed()
    rows = scripted(name)["live"]

    for row, payload in zip(rows, payloads(name), strict=True):
        if row["segment"] == "A":
            mirror.apply(decoder.decode(payload))
            followed.take(facts(cursor))

    expected = naive_copies(name)
    assert mirror.num_blocks == len(expected)
    total = sum(count for place in snapshot_of(mirror).values() for count in place.values())
    assert total == sum(expected.values())
    assert {place: set(hashes) for place, hashes in snapshot_of(mirror).items()} == followed.occupied


# ---------------------------------------------------------------- transitions


def test_only_the_first_store_and_the_last_removal_of_a_hash_are_told() -> None:
    """vLLM#55092: a removal is sent for each block, while another one may still hold the hash."""
    mirror, cursor = make()
    for batch in (store(1), store(1), remove(1), store(1), remove(1)):
        mirror.apply(batch)
    (told,) = facts(cursor)
    assert isinstance(told, BlocksStored)
    assert snapshot_of(mirror) == {("device", "0"): {next(iter(keys(1))): 1}}

    mirror.apply(remove(1, ts=4.0))

    (gone,) = facts(cursor)
    assert isinstance(gone, BlocksEvicted)
    assert (gone.hashes, gone.ages_ns) == (list(keys(1)), [3 * SECOND])
    assert (snapshot_of(mirror), mirror.num_blocks) == ({}, 0)


def test_media_of_one_tier_are_counted_apart_and_told_together() -> None:
    mirror, cursor = make()
    for batch in (store(1, medium="CPU"), store(1, medium="cpu_pinned"), remove(1, medium="CPU")):
        mirror.apply(batch)
    (told,) = facts(cursor)
    assert isinstance(told, BlocksStored)
    assert (told.tier, mirror.num_blocks, mirror.num_resident("host", "0")) == ("host", 1, 1)

    mirror.apply(remove(1, medium="Cpu_Pinned"))
    assert [type(event) for event in facts(cursor)] == [BlocksEvicted]
    mirror.apply(remove(1, medium="CPU"))
    assert facts(cursor) == []
    assert mirror.num_unknown_removals == 1


def test_chains_keep_their_parents_where_a_block_in_the_middle_was_known() -> None:
    mirror, cursor = make()
    mirror.apply(store(2, parent_block_hash=1))
    mirror.apply(store(1, 2, 3, 4, parent_block_hash=9))

    told = [(event.hashes, event.parent) for event in facts(cursor) if isinstance(event, BlocksStored)]

    one = [next(iter(keys(each))) for each in range(10)]
    assert told == [([one[2]], one[1]), ([one[1]], one[9]), ([one[3], one[4]], one[2])]


def test_a_hash_that_comes_twice_in_one_event_is_two_copies() -> None:
    mirror, cursor = make()
    mirror.apply(store(1, 1, 2))

    told = [event.hashes for event in facts(cursor) if isinstance(event, BlocksStored)]
    assert told == [list(keys(1)), list(keys(2))]
    assert snapshot_of(mirror)["device", "0"] == dict(zip([*keys(1), *keys(2)], [2, 1], strict=True))


def test_long_stores_and_removals_are_told_in_pieces_that_follow_each_other() -> None:
    mirror, cursor = make()
    number = 3 * MAX_BLOCKS_PER_EVENT + 5
    mirror.apply(store(*range(number)))
    stores = [event for event in facts(cursor) if isinstance(event, BlocksStored)]
    assert [len(event.hashes) for event in stores] == [MAX_BLOCKS_PER_EVENT] * 3 + [5]
    assert [event.parent for event in stores] == [None, *(event.hashes[-1] for event in stores[:-1])]

    mirror.apply(remove(*range(number)))
    assert sum(len(event.hashes) for event in facts(cursor) if isinstance(event, BlocksEvicted)) == number


def test_token_ids_are_told_by_block_where_they_are_there_for_every_block() -> None:
    mirror, cursor = make()
    whole = StoredInFull(block_hashes=[1, 2, 3], block_size=2, token_ids=[1, 2, 3, 4, 5, 6])
    for index, token_ids in enumerate(([1, 2, 3], None, [], [[1, 2], [3, 4], [5, 6], [7, 8], [9, 1], [2, 3]])):
        hashes: list[int | bytes] = [10 + 3 * index, 11 + 3 * index, 12 + 3 * index]
        odd = StoredInFull(block_hashes=hashes, block_size=2, token_ids=token_ids)
        mirror.apply(ForeignBatch([odd], 1.0))
    mirror.apply(store(2))
    facts(cursor)
    mirror.apply(ForeignBatch([whole], 1.0))

    told = [event.token_ids for event in facts(cursor) if isinstance(event, BlocksStored)]

    assert told == [[[1, 2]], [[5, 6]]]


def test_a_clear_empties_every_tier_and_tells_each_that_held_something_once() -> None:
    mirror, cursor = make()
    mirror.apply(store(1))
    mirror.apply(store(2, medium="CPU", group_idx=3))
    facts(cursor)

    for _ in range(1000):
        mirror.apply(clear())

    told = facts(cursor)
    assert [event.tier for event in told if isinstance(event, CacheCleared)] == ["device", "host"]
    assert [type(event) for event in told[2:]] == [SourceCompleteness]
    assert (mirror.num_clears, mirror.num_blocks, mirror.is_whole) == (1000, 0, True)


def test_a_clear_in_the_middle_of_a_batch_has_its_place() -> None:
    mirror, _ = make()
    mirror.apply(ForeignBatch([Stored(block_hashes=[1]), Cleared(), Stored(block_hashes=[2])], 1.0))

    assert set(snapshot_of(mirror)["device", "0"]) == keys(2)


# ---------------------------------------------------------------- history


def test_before_the_history_is_whole_unknown_removals_are_no_drift() -> None:
    mirror, cursor = make()
    mirror.apply(remove(1, 2))
    assert (mirror.history, mirror.drift_blocks, mirror.num_unknown_removals) == ("unknown", None, 2)

    mirror.confirm()
    mirror.apply(remove(3))
    assert (mirror.drift_blocks, mirror.is_whole) == (1, True)

    mirror.lose(4)
    mirror.apply(remove(4))
    assert (mirror.history, mirror.drift_blocks) == ("broken", 2)
    assert [type(event) for event in facts(cursor)] == [SourceCompleteness, SourceGap]

    mirror.apply(clear())
    assert (mirror.history, mirror.drift_blocks) == ("whole", 0)


@pytest.mark.parametrize(("kind", "history"), [("hashes", "broken"), ("msgpack", "broken"), ("type", "whole")])
def test_what_was_left_out_breaks_the_history_unless_it_is_of_an_unknown_type(kind: str, history: str) -> None:
    mirror, cursor = make()
    mirror.confirm()
    mirror.apply(store(1))
    mirror.apply(ForeignBatch([], 2.0, skipped=(kind,)))

    assert mirror.history == history
    assert mirror.num_blocks == 1, "what is broken wipes nothing"
    completeness = [event.is_complete for event in facts(cursor) if isinstance(event, SourceCompleteness)]
    assert completeness == ([True] if history == "whole" else [True, False])


def test_a_reset_forgets_everything_without_telling_removals() -> None:
    mirror, cursor = make()
    mirror.confirm()
    mirror.apply(store(1, 2))
    mirror.apply(remove(3))
    facts(cursor)

    mirror.reset("restart", is_whole=True)

    (told,) = facts(cursor)
    assert isinstance(told, SourceReset)
    assert (told.reason, told.is_complete) == ("restart", True)
    assert (mirror.num_blocks, mirror.drift_blocks, snapshot_of(mirror)) == (0, 0, {})


def test_more_copies_than_the_pool_has_blocks_are_not_believed() -> None:
    """An engine that tells reused blocks as stores again would make every count drift up."""
    mirror, _ = make()
    mirror.confirm()
    mirror.limit("device", 10)
    for _ in range(5):
        mirror.apply(store(*range(6)))
    assert mirror.drift_blocks == 6
    mirror.apply(remove(*range(6)))

    assert mirror.num_blocks == 0
    assert mirror.drift_blocks == 6
    mirror.apply(clear())
    mirror.apply(store(1))
    mirror.apply(store(1))
    mirror.apply(remove(1))
    assert mirror.num_blocks == 1, "after a clear copies count again"


# ---------------------------------------------------------------- times and limits


@pytest.mark.parametrize(
    ("times", "age"),
    [((10.0, 12.5), 2.5), ((12.5, 10.0), 0.0), ((10.0, float("nan")), 864_000 - 10.0), ((10.0, None), 864_000 - 10.0),
     ((10.0, 1e300), 864_000 - 10.0), ((10.0, -5.0), 864_000 - 10.0), ((10.0, float("inf")), 864_000 - 10.0),
     ((864_030.0, 864_050.0), 20.0)],
)  # fmt: skip
def test_ages_are_by_the_engines_clock_which_never_goes_back_nor_far_ahead(
    times: tuple[float, float | None], age: float
) -> None:
    mirror, cursor = make()
    mirror.apply(store(1, ts=times[0]))
    mirror.apply(ForeignBatch([Removed(block_hashes=[1])], times[1]))

    (gone,) = [event for event in facts(cursor) if isinstance(event, BlocksEvicted)]
    assert gone.ages_ns == [pytest.approx(age * SECOND, abs=1000)]


def test_memory_is_bounded_by_the_number_of_blocks_and_what_is_left_out_breaks_the_history() -> None:
    mirror, _ = make(max_blocks=100)
    mirror.confirm()
    mirror.apply(store(*range(90)))
    mirror.apply(store(*range(90, 120)))

    assert (mirror.num_blocks, mirror.num_shed, mirror.history) == (90, 30, "broken")
    mirror.apply(remove(*range(90)))
    mirror.apply(store(*range(100)))
    assert mirror.num_blocks == 100


def test_places_are_bounded() -> None:
    mirror, _ = make()
    mirror.confirm()
    for index in range(1000):
        mirror.apply(store(index, medium=f"medium {index}", group_idx=index % 256))

    assert 0 < mirror.num_blocks < 100
    assert mirror.num_shed == 1000 - mirror.num_blocks
    assert mirror.history == "broken"


def test_each_batch_is_a_step_of_the_log() -> None:
    mirror, cursor = make()
    for index in range(5):
        mirror.apply(store(index))

    assert [event.step for event in facts(cursor)] == [1, 2, 3, 4, 5]


def test_a_snapshot_continues_the_log_also_while_it_grows() -> None:
    """Taken on another thread: everything before its number is in it, everything from there on is not."""
    mirror, cursor = make()
    followed: dict[int, int] = {}
    stop = threading.Event()
    taken: list[tuple[int, int]] = []

    def look() -> None:
        while not stop.is_set():
            snapshot = mirror.snapshot()
            taken.append((snapshot.seq, sum(len(state.hashes) for state in snapshot.indexed)))

    thread = threading.Thread(target=look)
    thread.start()
    count = seq = 0
    for index in range(3000):
        mirror.apply(store(*range(index * 3, index * 3 + 3)))
        for event in facts(cursor):
            seq = event.seq + 1
            count += len(event.hashes) if isinstance(event, BlocksStored) else 0
            followed[seq] = count
    stop.set()
    thread.join()

    followed[0] = 0
    assert len(taken) > 3
    assert all(followed[number] == blocks for number, blocks in taken)
    assert mirror.snapshot().is_foreign


# ---------------------------------------------------------------- against a naive model

some_hashes = st.lists(st.integers(0, 12), max_size=5)
media = st.sampled_from([None, "GPU", "gpu", "CPU", "CPU_PINNED", "DISK", "mooncake"])
groups = st.sampled_from([None, 0, 1])


class MirrorMachine(RuleBasedStateMachine):
    """Any events in any order: the mirror, a naive count, and who follows the events all agree."""

    def __init__(self) -> None:
        super().__init__()
        self.mirror, self.cursor = make()
        self.followed = Followed()
        self.copies: Counter[tuple[str, str, int]] = Counter()
        self.drift: int | None = None
        self.decoder = Decoder()

    def place(self, medium: str | None, group: int | None) -> tuple[str, str]:
        return ((medium or "GPU").upper(), str(group or 0))

    def apply(self, event: dict[str, Any]) -> None:
        self.mirror.apply(self.decoder.decode(msgspec.msgpack.encode([1.0, [event], 0])))

    @rule(hashes=some_hashes, medium=media, group=groups)
    def store(self, hashes: list[int], medium: str | None, group: int | None) -> None:
        self.apply({"type": "BlockStored", "block_hashes": hashes, "medium": medium, "group_idx": group})
        for each in hashes:
            self.copies[(*self.place(medium, group), each)] += 1

    @rule(hashes=some_hashes, medium=media, group=groups)
    def remove(self, hashes: list[int], medium: str | None, group: int | None) -> None:
        self.apply({"type": "BlockRemoved", "block_hashes": hashes, "medium": medium, "group_idx": group})
        for each in hashes:
            key = (*self.place(medium, group), each)
            if self.copies[key]:
                self.copies[key] -= 1
            elif self.drift is not None:
                self.drift += 1

    @rule()
    def clear(self) -> None:
        self.apply({"type": "AllBlocksCleared"})
        self.copies.clear()
        self.drift = 0

    @rule(is_whole=st.booleans())
    def restart(self, is_whole: bool) -> None:
        self.mirror.reset("restart", is_whole=is_whole)
        self.copies.clear()
        self.drift = 0 if is_whole else None

    @rule()
    def lose(self) -> None:
        self.mirror.lose(3)

    @invariant()
    def all_agree(self) -> None:
        self.followed.take(facts(self.cursor))
        tiers = {"GPU": "device", "CPU": "host", "CPU_PINNED": "host", "DISK": "disk", "MOONCAKE": "external"}
        expected: dict[tuple[str, str], dict[bytes, int]] = {}
        for (medium, group, each), count in self.copies.items():
            if count:
                place = expected.setdefault((tiers[medium], group), {})
                key = next(iter(keys(each)))
                place[key] = place.get(key, 0) + count
        assert snapshot_of(self.mirror) == expected
        assert self.followed.occupied == {place: set(hashes) for place, hashes in expected.items()}
        assert self.mirror.drift_blocks == self.drift
        assert self.followed.is_complete == self.mirror.is_whole == self.mirror.snapshot().is_complete
        assert self.mirror.num_blocks == sum(count > 0 for count in self.copies.values())


MirrorMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestMirrorAgainstACount = MirrorMachine.TestCase
