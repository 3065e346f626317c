"""What a stream tells, against models that are obviously right: lists, and walks over the whole forest."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_engine import NaiveEngine

from kvwatch.ledger.view import HistogramSample, Sample
from kvwatch.sources.insight import make_observer
from kvwatch.sources.insight.ghosts import Ghosts
from kvwatch.sources.insight.observer import Insight
from kvwatch.sources.insight.prefixes import PrefixForest, Shape, Subtree
from kvwatch.sources.mirror import Mirror
from kvwatch.sources.remote_insight import RemoteInsight
from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.clock import SystemClock
from kvwatch.telemetry.events import BlocksStored
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.schema import Metric
from kvwatch.wire.foreign import Cleared, ForeignBatch, Stored


def name(number: int) -> bytes:
    return number.to_bytes(4, "big")


class LRU:
    """A cache of so many blocks that removes the least recently stored one first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.content: list[int] = []

    def use(self, block: int) -> tuple[bool, int | None]:
        """Return whether it was there, and what had to go."""
        was_there = block in self.content
        if was_there:
            self.content.remove(block)
        self.content.append(block)
        return was_there, self.content.pop(0) if len(self.content) > self.capacity else None


@pytest.mark.parametrize("seed", range(5))
def test_extra_blocks_are_exactly_the_room_that_would_have_kept_a_block(seed: int) -> None:
    rng = random.Random(seed)
    capacity = 8
    uses = [min(int(rng.expovariate(0.08)), 60) for _ in range(600)]
    larger = {extra: LRU(capacity + extra) for extra in range(1, 70)}
    small, ghosts = LRU(capacity), Ghosts()
    num_returns = 0
    for at_ns, block in enumerate(uses):
        hits = {extra: cache.use(block)[0] for extra, cache in larger.items()}
        was_there, gone = small.use(block)
        if not was_there:
            found = ghosts.store(name(block), at_ns)
            if found is None:
                assert not any(hits.values())
            else:
                num_returns += 1
                assert min(extra for extra, is_hit in hits.items() if is_hit) == found.num_extra_blocks
        if gone is not None:
            ghosts.remove(name(gone), at_ns)
    assert num_returns > 100


@settings(max_examples=200)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=300))
def test_ghosts_equal_a_list_of_removals(steps: list[tuple[bool, int]]) -> None:
    ghosts, away = Ghosts(512), list[tuple[int, int]]()
    for at_ns, (is_removal, block) in enumerate(steps):
        if is_removal:
            ghosts.remove(name(block), at_ns)
            away = [(b, t) for b, t in away if b != block] + [(block, at_ns)]
            continue
        found = ghosts.store(name(block), at_ns)
        place = next((i for i, (b, _) in enumerate(reversed(away)) if b == block), None)
        if place is None:
            assert found is None
        else:
            assert found == (at_ns - dict(away)[block], place + 1)
            away = [(b, t) for b, t in away if b != block]
    assert len(ghosts) == len(away)


def test_what_is_remembered_is_bounded_and_the_newest_removals_are_kept() -> None:
    ghosts = Ghosts(512)
    for number in range(2000):
        ghosts.remove(name(number), number)
    assert len(ghosts) == 512
    assert ghosts.store(name(1487), 2000) is None
    oldest = ghosts.store(name(1488), 2000)
    assert oldest is not None
    assert oldest.num_extra_blocks == 512


class Forest:
    """The forest as two dictionaries; everything is found by looking at all of it."""

    def __init__(self) -> None:
        self.parent: dict[int, int | None] = {}
        self.resident: set[int] = set()

    def children(self, block: int) -> list[int]:
        return [each for each in self.resident if self.parent[each] == block]

    def depth(self, block: int | None) -> int:
        return 1 + self.depth(self.parent[block]) if block in self.resident and block is not None else 0

    def below(self, block: int) -> int:
        return sum(1 + self.below(child) for child in self.children(block))

    def ancestors(self, block: int) -> list[int]:
        found, above = [], self.parent[block]
        while above is not None:
            found.append(above)
            above = self.parent[above]
        return found


def tree_parent(block: int) -> int | None:
    """Every block has one parent, as content-addressed blocks do: a ternary tree, whose roots are 0, 1 and 2."""
    return None if block < 3 else (block - 3) // 3


@settings(max_examples=300)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 60), st.integers(1, 3)), max_size=80))
def test_the_forest_equals_a_walk_over_all_blocks(steps: list[tuple[bool, int, int]]) -> None:
    forest, model = PrefixForest(), Forest()
    model.parent = {block: tree_parent(block) for block in range(200)}
    for is_store, block, length in steps:
        # From the root on, so that each block's depth is known: engines compute a prefix before its continuation.
        chain = [*reversed(model.ancestors(block)), block]
        if is_store:
            forest.store([name(each) for each in chain], None)
            model.resident.update(chain)
        else:
            gone = chain[-length:]
            forest.remove([name(each) for each in gone])
            model.resident.difference_update(gone)
        fans = Counter(len(model.children(each)) for each in model.resident)
        shape = forest.shape(100)
        assert shape.num_blocks == len(model.resident)
        assert shape.num_roots == sum(model.parent[each] not in model.resident for each in model.resident)
        assert shape.num_branches == sum(number for fan, number in fans.items() if fan >= 2)
        assert shape.max_fan_out == max(fans, default=0)
        assert shape.max_depth == max((model.depth(each) for each in model.resident), default=0)
        branches = [each for each in model.resident if len(model.children(each)) >= 2]
        assert [subtree.num_blocks for subtree in shape.largest] == sorted(map(model.below, branches), reverse=True)
        assert {(subtree.content, subtree.depth, subtree.fan_out) for subtree in shape.largest} == {
            (name(each), model.depth(each), len(model.children(each))) for each in branches
        }


def test_blocks_whose_parent_was_never_seen_find_their_place_when_it_comes() -> None:
    forest = PrefixForest()
    forest.store([name(5)], name(4))
    forest.store([name(6)], name(4))
    assert (forest.shape().num_roots, forest.shape().num_branches) == (2, 0)
    forest.store([name(4)], None)
    shape = forest.shape()
    assert (shape.num_roots, shape.num_branches, shape.max_fan_out, shape.max_depth) == (1, 1, 2, 2)
    assert [(s.content, s.num_blocks) for s in shape.largest] == [(name(4), 2)]
    forest.remove([name(4), name(5), name(6)])
    assert forest.shape() == Shape()


def test_parents_in_a_circle_do_no_harm() -> None:
    forest = PrefixForest()
    forest.store([name(1)], name(2))
    forest.store([name(2)], name(1))
    forest.store([name(3)], name(3))
    forest.store([name(4), name(5)], name(1))
    shape = forest.shape()
    assert (shape.num_blocks, shape.num_roots) == (5, 0)
    assert shape.max_depth <= 5


def test_the_shape_of_a_long_chain_is_found() -> None:
    forest = PrefixForest()
    forest.store([name(number) for number in range(5000)], None)
    forest.store([name(number) for number in range(10_000, 10_100)], name(4000))
    shape = forest.shape()
    assert (shape.max_depth, shape.num_branches, shape.num_roots) == (5000, 1, 1)
    assert shape.largest == (Subtree(name(4000), 4001, 999 + 100, 2),)


def test_a_forest_without_room_gives_its_own_back_until_all_is_cleared() -> None:
    forest = PrefixForest(max_blocks=10)
    forest.store([name(each) for each in range(8)], None)
    assert not forest.num_left_out
    forest.store([name(each) for each in range(20, 25)], None)
    forest.store([name(30)], None)
    forest.remove([name(3), name(30)])
    assert (forest.shape().num_blocks, forest.num_left_out) == (0, 6)
    forest.clear()
    forest.store([name(1)], None)
    assert (forest.shape().num_blocks, forest.num_left_out) == (1, 0)


def test_details_are_given_up_before_counts_are() -> None:
    log = EventLog()
    insight = make_observer(100)
    mirror = Mirror(log, SystemClock(), max_blocks=100, observer=insight)
    mirror.confirm()
    shapes = {m.KV_PREFIX_ROOTS, m.KV_PREFIX_BRANCHES, m.KV_PREFIX_FAN_OUT_MAX, m.KV_PREFIX_DEPTH_MAX}

    def shown() -> set[Metric]:
        insight._shapes.clear()  # as if it had been looked at long ago
        return shapes & {sample.metric for sample in insight.samples()}

    def store(*hashes: int) -> None:
        mirror.apply(ForeignBatch([Stored(block_hashes=list(hashes), block_size=16)], 1.0))

    store(*range(70))
    assert shown() == shapes
    store(*range(70, 90))
    assert shown() == set()
    assert (mirror.num_blocks, mirror.is_whole) == (90, True)
    store(*range(90, 120))
    assert not mirror.is_whole
    mirror.apply(ForeignBatch([Cleared(), Stored(block_hashes=[7], block_size=16)], 2.0))
    assert shown() == shapes
    assert mirror.is_whole


def test_a_look_at_the_shape_is_not_taken_more_often_than_was_said() -> None:
    insight = Insight(look_seconds=3600)
    insight.on_stored("device", "0", [b"a", b"b"], None, 0, None)
    assert insight.shape("device", "0").num_blocks == 2
    insight.on_stored("device", "0", [b"c"], b"b", 0, None)
    assert insight.shape("device", "0").num_blocks == 2
    eager = Insight(look_seconds=0)
    eager.on_stored("device", "0", [b"a"], None, 0, None)
    assert eager.shape("device", "0").num_blocks == 1


def test_a_rank_tells_what_it_learnt() -> None:
    insight = make_observer(1_000)
    insight.on_stored("device", "0", [b"a", b"b", b"c"], None, 0, None)
    insight.on_stored("device", "0", [b"d"], b"b", 0, None)
    insight.on_removed("device", "0", [b"d", b"c"], [1, 1], 1_000_000_000)
    insight.on_stored("device", "0", [b"d"], b"b", 3_000_000_000, None)
    insight.on_lag(4_000_000)
    samples = {(each.metric, each.labels): each for each in insight.samples()}
    away = samples[m.KV_PREMATURE_EVICTION_AWAY, ("device",)]
    extra = samples[m.KV_PREMATURE_EVICTION_EXTRA, ("device",)]
    lag = samples[m.SOURCE_LAG, ()]
    assert isinstance(away, HistogramSample)
    assert isinstance(extra, HistogramSample)
    assert isinstance(lag, HistogramSample)
    assert away.count == lag.count == 1
    assert away.sum == pytest.approx(2.0)
    assert lag.sum == pytest.approx(0.004)
    assert (extra.count, extra.sum) == (1, 2.0)
    insight.on_cleared("device", 4_000_000_000)
    insight.on_stored("device", "0", [b"c"], b"b", 5_000_000_000, None)
    again = {(each.metric, each.labels): each for each in insight.samples()}
    assert again[m.KV_PREMATURE_EVICTION_EXTRA, ("device",)] == extra


def test_the_shape_of_what_a_host_holds_is_that_of_its_prefixes_in_whatever_order_they_came() -> None:
    """The end of a chain is evicted first, and offloaded together with ends of others."""
    insight = RemoteInsight()
    insight.load(NaiveEngine(EventLog()).snapshot())

    insight.apply(
        BlocksStored([b"c", b"y", b"b", b"a"], [1, 2, 3, 4], None, tier="host", parents=[b"b", b"", b"a", b""])
    )

    shape = {sample.metric: sample.value for sample in insight.samples() if isinstance(sample, Sample)}
    assert (shape[m.KV_PREFIX_ROOTS], shape[m.KV_PREFIX_DEPTH_MAX], shape[m.KV_PREFIX_BRANCHES]) == (2, 3, 0)
