"""The lowest value of a window: exact, carried in, absent until filled, and in bounded memory."""

from random import Random

import pytest
from naive_engine import ManualClock, NaiveEngine

from kvwatch.ledger.mirror import Mirror
from kvwatch.ledger.window import RollingMinimum
from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.log import EventLog

TIER = ("device", "60s")


def test_there_is_no_minimum_until_a_whole_window_was_seen() -> None:
    minimum = RollingMinimum(60, start_ns=100)
    minimum.end_stretch(7, 105)

    assert minimum.lowest(9, 159) is None
    assert minimum.changes_ns(9) == 160
    assert minimum.lowest(9, 160) == 7


def test_a_value_that_was_reached_before_the_window_and_still_held_in_it_counts() -> None:
    minimum = RollingMinimum(60, start_ns=0)
    minimum.end_stretch(2, 500)  # since whenever

    assert minimum.lowest(7, 559) == 2
    assert minimum.changes_ns(7) == 560
    assert minimum.lowest(7, 560) == 7
    assert minimum.changes_ns(7) < 560, "it never changes by itself again"


def test_the_value_now_counts_and_hides_whatever_was_higher() -> None:
    minimum = RollingMinimum(60, start_ns=0)
    minimum.end_stretch(5, 100)

    assert minimum.lowest(4, 110) == 4
    assert minimum.changes_ns(4) < 110


@pytest.mark.parametrize("seed", range(20))
def test_it_equals_a_search_over_all_that_ever_was(seed: int) -> None:
    random = Random(seed)
    minimum, now = RollingMinimum(50, 0), 0
    stretches: list[tuple[int, int]] = []  # (lowest, end)
    for _ in range(300):
        now += random.choice([0, 1, 1, 5, 30, 80])
        stretches.append((random.randint(0, 10), now))
        minimum.end_stretch(*stretches[-1])
        now += random.choice([0, 0, 3])
        value = random.randint(0, 12)
        expected = min([value, *(low for low, end in stretches if end > now - 50)])
        assert minimum.lowest(value, now) == (None if now < 50 else expected)


def test_memory_does_not_grow_with_time() -> None:
    random = Random(1)
    minimum = RollingMinimum(10**9, 0)
    for now in range(50_000):
        minimum.end_stretch(random.randint(0, 8), now)

    assert len(minimum._ended) <= 9


class Stage:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.log = EventLog(4096, self.clock)
        self.engine = NaiveEngine(self.log, 13)
        self.cursor = self.log.subscribe("test")
        self.mirror = Mirror(self.clock, 0)
        self.mirror.load(self.engine.snapshot())

    def follow(self) -> None:
        self.mirror.apply(self.cursor.read(4096))
        self.mirror.settle()

    def step(self, seconds: float) -> None:
        self.engine.step_number += 1
        self.log.begin(self.engine.step_number)
        self.clock.advance(seconds)
        self.log.begin(self.engine.step_number)
        self.engine.complete()
        self.follow()

    def lowest(self) -> float | None:
        return self.mirror.view.value(m.KV_FREE_BLOCKS_MIN, *TIER)


def test_a_burst_within_one_step_shows_in_the_minimum_for_a_window_and_then_leaves_by_itself() -> None:
    """A scrape every 15 s sees 12 free blocks and never the burst (vllm#15538: only the value at the scrape)."""
    stage = Stage()
    stage.step(70)
    assert stage.lowest() == 12
    stage.engine.admit(stage.engine.queue(), 10)
    stage.engine.finish("r1")
    stage.step(1)

    assert stage.mirror.view.value(m.KV_FREE_BLOCKS, "device") == 12
    assert stage.lowest() == 2
    assert stage.mirror.view.value(m.KV_USAGE_RATIO_MAX, *TIER) == pytest.approx(10 / 12)
    stage.clock.advance(58.5)
    stage.follow()
    assert stage.lowest() == 2, "nothing happens any more, and it is still within the window"
    stage.clock.advance(1)
    stage.follow()
    assert stage.lowest() == 12, "an idle engine's view moves on with the window"


def test_extremes_begin_anew_after_a_snapshot_since_nobody_knows_what_was_missed() -> None:
    stage = Stage()
    stage.step(70)
    assert stage.lowest() is not None

    stage.mirror.load(stage.engine.snapshot())

    assert stage.lowest() is None
    stage.step(61)
    assert stage.lowest() == 12
