"""When a view is published, and what it says."""

import msgspec
import pytest
import structlog
from naive_engine import ManualClock, NaiveEngine

from kvwatch.derive.scenario import ScenarioClock
from kvwatch.derive.tier_scenario import opening_tier_snapshot, play_tiers
from kvwatch.ledger.collector import BATCH
from kvwatch.ledger.mirror import Mirror
from kvwatch.ledger.series import SeriesSettings
from kvwatch.ledger.view import View
from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.events import (
    BlocksLaidOut,
    DrainStarted,
    EngineEnded,
    EngineStalled,
    StepCompleted,
    StepFailed,
    TransferFailed,
    TransferStarted,
)
from kvwatch.telemetry.log import Cursor, EventLog
from kvwatch.telemetry.schema import Event
from kvwatch.telemetry.snapshot import TierState


class Stage:
    """A naive engine, a mirror of it, and the log between them."""

    def __init__(self, view_interval_seconds: float = 0.0, num_blocks: int = 13) -> None:
        self.clock = ManualClock()
        self.log = EventLog(4096, self.clock)
        self.engine = NaiveEngine(self.log, num_blocks)
        self.cursor: Cursor = self.log.subscribe("test")
        self.mirror = Mirror(self.clock, view_interval_seconds)
        self.mirror.load(self.engine.snapshot())

    def follow(self) -> None:
        self.mirror.apply(self.cursor.read(10_000))

    def step(self, seconds: float = 0.01) -> None:
        """One step of the engine that takes `seconds`."""
        self.run_step(seconds)
        self.follow()

    def run_step(self, seconds: float) -> None:
        """The same, not looked at yet."""
        self.begin_step()
        self.end_step(seconds)

    def begin_step(self) -> None:
        self.engine.step_number += 1
        self.log.begin(self.engine.step_number)
        self.engine.write()

    def end_step(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.log.begin(self.engine.step_number)
        self.engine.complete()


def test_every_view_obeys_the_law_and_counts_what_the_engine_has() -> None:
    stage = Stage()
    engine = stage.engine
    engine.admit(engine.queue(), 2)
    engine.fork("r1")
    engine.queue()
    engine.waiting_for = {"sequences": 1}

    stage.step()

    view = stage.mirror.view
    assert view.value(m.KV_BLOCK_CAPACITY, "device") == 12
    assert view.value(m.KV_BLOCKS, "device", "0", "used") == 2
    assert view.value(m.KV_BLOCKS, "device", "0", "cached") == 0
    assert view.value(m.KV_BLOCKS, "device", "", "empty") == 10
    assert view.value(m.KV_FREE_BLOCKS, "device") == 10
    assert view.value(m.KV_USAGE_RATIO, "device") == pytest.approx(2 / 12)
    assert view.value(m.KV_TOKEN_CAPACITY, "device", "0") == 48
    assert view.value(m.KV_HELD_SLOTS, "device", "0") == 8
    assert view.value(m.KV_SHARED_BLOCKS, "device", "0") == 2
    assert view.value(m.KV_SHARING_SAVED_BLOCKS, "device", "0") == 2
    assert view.value(m.KV_WATERMARK_BLOCKS, "device") == 1
    assert view.value(m.REQUESTS, "running") == 1
    assert view.value(m.REQUESTS, "waiting") == 1
    assert view.value(m.WAITING_REQUESTS, "sequences") == 1
    assert view.value(m.WAITING_REQUESTS, "blocks") == 0
    assert view.value(m.QUEUE_LIMIT, "requests") == 8
    assert view.value(m.LEDGER_VIOLATIONS) == 0


def test_waste_is_the_part_of_held_slots_without_tokens() -> None:
    stage = Stage()
    stage.engine.admit(stage.engine.queue(), 1)

    stage.step()

    assert stage.mirror.view.value(m.KV_FILLED_SLOTS, "device", "0") == 1
    assert stage.mirror.view.value(m.KV_WASTE_RATIO, "device", "0") == 0.75


def views_of_tiers(events: list[Event]) -> list[View]:
    """Return the views of an engine with host and disk at the end of each step of a tiers' scenario."""
    mirror = Mirror(ScenarioClock(), 0.0)
    mirror.load(opening_tier_snapshot())
    views = []
    for event in events:
        mirror.apply([event])
        if isinstance(event, StepCompleted):
            views.append(mirror.view)
    return views


def tier_events() -> list[Event]:
    clock = ScenarioClock()
    log = EventLog(1024, clock)
    cursor = log.subscribe("test")
    play_tiers(log, clock)
    return cursor.read(1024)


def test_a_block_that_a_transfer_writes_is_used_and_no_waste() -> None:
    """The whole of a host was wasted, said the gauge, for as long as the first request was on its way there."""
    swapping, restored, *_ = views_of_tiers(tier_events())

    assert swapping.value(m.KV_BLOCKS, "host", "0", "used") == swapping.value(m.KV_BLOCKS_IN_TRANSFER, "host") == 3
    host = [swapping.value(each, "host", "0") for each in (m.KV_HELD_SLOTS, m.KV_FILLED_SLOTS, m.KV_WASTE_RATIO)]
    assert host == [0, 0, 0]
    assert swapping.value(m.KV_WASTE_RATIO, "device", "0") == pytest.approx(1 - 10 / 12), "what is read is held on"
    assert restored.value(m.KV_HELD_SLOTS, "device", "0") == 12
    assert restored.value(m.KV_WASTE_RATIO, "device", "0") == pytest.approx(1 - 10 / 12)


def test_blocks_of_a_transfer_that_was_given_up_hold_nothing_and_are_waste() -> None:
    events = tier_events()
    started = next(place for place, event in enumerate(events) if isinstance(event, TransferStarted))
    failed = TransferFailed(0, "swap_out", "a", "deadline", 3, "device", "host")
    ended = next(event for event in events if isinstance(event, StepCompleted))
    (view,) = views_of_tiers([*events[: started + 1], failed, ended])

    assert view.value(m.KV_HELD_SLOTS, "host", "0") == 12
    assert view.value(m.KV_WASTE_RATIO, "host", "0") == 1


def test_before_the_first_snapshot_gauges_are_absent_and_counters_are_zero() -> None:
    view = Mirror(ManualClock()).view

    assert view.gauges == ()
    assert view.value(m.KV_BLOCK_CAPACITY, "device") is None
    assert view.value(m.GENERATED_TOKENS) == 0
    assert view.histogram(m.QUEUE_SECONDS) is not None
    assert view.histogram(m.PREEMPTION_AWAY, "no such mode") is None


def test_a_busy_engine_is_shown_at_most_once_in_the_interval_and_always_at_the_end_of_a_step() -> None:
    stage = Stage(view_interval_seconds=0.1)
    stage.engine.admit(stage.engine.queue(), 1)
    seen = set()
    for _ in range(30):
        stage.step(0.01)
        seen.add(stage.mirror.view.seq)

    ends = {stage.mirror.ledger.next_seq - 1 - 2 * back for back in range(40)}
    assert 3 <= len(seen) <= 4
    assert stage.mirror.view.seq in ends


def test_the_end_of_the_last_running_request_is_shown_at_once() -> None:
    """vllm#29928, sglang#26495: gauges frozen at their last busy values make routers avoid an idle engine."""
    stage = Stage(view_interval_seconds=3600)
    stage.engine.admit(stage.engine.queue(), 2)
    stage.step()
    stage.mirror.publish()
    assert stage.mirror.view.value(m.REQUESTS, "running") == 1
    stage.engine.finish("r1")

    stage.step()

    assert stage.mirror.view.value(m.REQUESTS, "running") == 0
    assert stage.mirror.view.value(m.KV_BLOCKS, "device", "0", "used") == 0


def test_a_pause_that_is_over_already_does_not_hide_what_followed() -> None:
    """A quick engine is idle for a step now and then; shown each time, the page said that nothing ever ran."""
    stage = Stage(view_interval_seconds=0.5)
    for _ in range(5):
        stage.run_step(0.25)
        request_id = stage.engine.queue()
        stage.engine.admit(request_id, 2)
        stage.run_step(0.25)

        stage.follow()
        stage.mirror.settle()

        assert stage.mirror.view.value(m.REQUESTS, "running") == 1
        stage.engine.finish(request_id)


def test_a_request_that_ends_while_no_step_runs_is_shown_when_the_log_is_drained() -> None:
    stage = Stage(view_interval_seconds=3600)
    stage.engine.admit(stage.engine.queue(), 2)
    stage.step()
    stage.mirror.publish()
    stage.engine.finish("r1", "abort")
    stage.follow()

    stage.mirror.settle()

    assert stage.mirror.view.value(m.KV_BLOCKS, "device", "0", "used") == 0
    assert stage.mirror.view.value(m.REQUESTS_FINISHED, "abort", "", "") == 1


def test_an_engine_that_is_stuck_in_a_step_is_shown_after_a_moment_of_silence() -> None:
    """vllm#45414: nothing runs, requests wait, and nobody can see it."""
    stage = Stage(view_interval_seconds=0)
    stage.engine.queue()
    stage.follow()
    stage.mirror.settle()
    assert stage.mirror.view.value(m.REQUESTS, "waiting") == 0

    stage.clock.advance(0.3)
    stage.mirror.settle()

    assert stage.mirror.view.value(m.REQUESTS, "waiting") == 1


def test_a_step_whose_view_was_held_back_is_shown_once_the_interval_is_over() -> None:
    stage = Stage(view_interval_seconds=0.1)
    stage.engine.admit(stage.engine.queue(), 1)
    stage.step(0.01)
    stage.mirror.settle()
    assert stage.mirror.view.value(m.REQUESTS, "running") == 0

    stage.clock.advance(0.1)
    stage.mirror.settle()

    assert stage.mirror.view.value(m.REQUESTS, "running") == 1


@pytest.mark.parametrize("pace_seconds", [0.5, 0.499])
def test_a_view_shows_the_newest_step_however_seldom_somebody_looks(pace_seconds: float) -> None:
    """Looked at as often as views are due, the first new step is as old as the last view: it is not the one to show."""
    stage = Stage(view_interval_seconds=0.5)
    stage.engine.admit(stage.engine.queue(), 1)
    stage.begin_step()
    for _ in range(10):
        for _ in range(5):
            stage.end_step(pace_seconds / 5)
            newest = stage.log.head - 1
            stage.begin_step()

        stage.follow()  # in the middle of a step
        stage.mirror.settle()

        assert stage.mirror.view.seq == newest


def test_who_catches_up_for_long_is_shown_on_the_way() -> None:
    stage = Stage(view_interval_seconds=0.5)
    stage.engine.admit(stage.engine.queue(), 1)
    for _ in range(BATCH):
        stage.run_step(0.01)
    shown = stage.mirror.view.seq

    stage.mirror.apply(stage.cursor.read(BATCH))

    assert stage.log.head > stage.mirror.ledger.next_seq
    assert shown < stage.mirror.view.seq


def test_nothing_new_publishes_no_new_view() -> None:
    stage = Stage()
    view = stage.mirror.view
    stage.clock.advance(10)

    stage.mirror.apply([])
    stage.mirror.settle()

    assert stage.mirror.view is view


def test_a_published_view_never_changes() -> None:
    stage = Stage()
    stage.engine.admit(stage.engine.queue(), 1)
    stage.step()
    view = stage.mirror.view
    histogram = view.histogram(m.STEP_DURATION, "forward")
    before = (view.seq, view.gauges, view.counters, histogram)

    stage.step()

    assert (view.seq, view.gauges, view.counters, view.histogram(m.STEP_DURATION, "forward")) == before
    assert stage.mirror.view.seq > view.seq
    with pytest.raises(AttributeError):
        view.seq = 5  # type: ignore[misc]


def test_time_during_which_a_request_waited_for_blocks_is_counted_from_step_to_step() -> None:
    stage = Stage()
    stage.engine.admit(stage.engine.queue(), 1)
    stage.step(1.0)
    stage.engine.waiting_for = {"blocks": 1}
    stage.step(1.0)
    stage.step(0.5)
    stage.engine.waiting_for = {"tokens": 1}
    stage.step(0.25)
    stage.step(1.0)

    assert stage.mirror.view.value(m.KV_STALL_SECONDS) == 0.75


def test_a_stall_that_lasts_over_a_snapshot_is_counted_from_the_snapshot_on() -> None:
    stage = Stage()
    stage.engine.queue()
    stage.engine.waiting_for = {"blocks": 1}
    stage.follow()
    stage.log.begin(9)
    stage.mirror.load(stage.engine.snapshot())

    stage.step(2.0)

    assert stage.mirror.view.value(m.KV_STALL_SECONDS) == 2.0


def test_times_are_shown_as_unix_timestamps_and_the_longest_wait_is_that_of_the_first_in_line() -> None:
    stage = Stage()
    assert stage.mirror.view.value(m.LAST_STEP_TIMESTAMP) is None
    assert stage.mirror.view.value(m.OLDEST_WAITING_TIMESTAMP) is None
    stage.log.begin(1)
    stage.engine.queue()
    stage.clock.advance(3.0)
    stage.log.begin(2)
    stage.engine.queue()
    first_ns = stage.engine.waiting["r1"]

    stage.step()

    view = stage.mirror.view
    offset = stage.clock.wall_ns() - stage.clock.monotonic_ns()
    assert view.value(m.OLDEST_WAITING_TIMESTAMP) == (first_ns + offset) / 1e9
    assert view.value(m.LAST_STEP_TIMESTAMP) == view.value(m.LEDGER_UPDATE_TIMESTAMP)
    assert view.value(m.LAST_STEP_TIMESTAMP) == stage.clock.wall_ns() / 1e9


def test_a_violation_is_counted_each_time_logged_with_its_equation_once_a_minute_and_stops_nothing() -> None:
    stage = Stage()
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            stage.engine.complete(num_used_blocks=1)
            stage.follow()
        stage.clock.advance(61)
        stage.engine.complete(num_used_blocks=1)
        stage.follow()

    assert stage.mirror.num_violations == 4
    assert stage.mirror.view.value(m.LEDGER_VIOLATIONS) == 4
    assert [entry["equations"] for entry in logs] == [["used: ledger 0 != engine 1"]] * 2


def test_every_applied_event_is_counted_by_its_name() -> None:
    stage = Stage()
    stage.engine.admit(stage.engine.queue(), 1)
    stage.step()

    view = stage.mirror.view
    assert view.value(m.TELEMETRY_EVENTS, "request.queued") == 1
    assert view.value(m.TELEMETRY_EVENTS, "step.completed") == 1
    assert view.value(m.TELEMETRY_EVENTS, "block.evicted") == 0


def test_hits_after_a_preemption_are_counted_apart() -> None:
    """vllm#25780: preempted requests that hit their own blocks looked like a hit rate of 32 % on random data."""
    stage = Stage()
    engine = stage.engine
    engine.admit(engine.queue(), 1)
    engine.write(4)
    engine.preempt("r1")
    engine.admit("r1", 1, is_resumed=True)

    stage.step()

    assert stage.mirror.view.value(m.PREFIX_CACHE_HIT_TOKENS, "device") == 0
    assert stage.mirror.view.value(m.PREFIX_CACHE_RESUMED_HIT_TOKENS) == 4
    assert stage.mirror.view.value(m.PREFIX_CACHE_QUERIED_TOKENS) == 8


def test_a_stall_ends_with_the_last_request_that_waits_and_not_with_the_next_step_hours_later() -> None:
    stage = Stage()
    stage.engine.admit(stage.engine.queue(), 1)
    stage.engine.queue()
    stage.engine.waiting_for = {"blocks": 1}
    stage.step(1.0)
    stage.clock.advance(2.0)
    stage.log.begin(5)
    stage.engine.finish("r2", "abort")
    stage.follow()
    stage.clock.advance(3600)
    stage.engine.waiting_for = {}
    stage.step(1.0)

    assert stage.mirror.view.value(m.KV_STALL_SECONDS) == 2.0


def test_a_waiting_request_that_ends_between_two_steps_is_in_no_reason_any_more() -> None:
    stage = Stage()
    stage.engine.admit(stage.engine.queue(), 1)
    for _ in range(3):
        stage.engine.queue()
    stage.engine.waiting_for = {"sequences": 3}
    stage.step()
    stage.engine.queue()  # not looked at yet: in no reason
    stage.engine.finish("r3", "abort")
    stage.engine.finish("r5", "abort")
    stage.follow()
    stage.mirror.publish()

    view = stage.mirror.view
    assert view.value(m.REQUESTS, "waiting") == 2
    assert view.value(m.WAITING_REQUESTS, "sequences") == 2


def state_of(mirror: Mirror) -> str:
    (state,) = [s.labels[0] for s in mirror.view.gauges if s.metric is m.ENGINE_STATE and s.value]
    return state


def test_the_engines_state_is_the_gravest_that_applies() -> None:
    stage = Stage()
    stage.engine.admit(stage.engine.queue(), 1)
    seen = [state_of(stage.mirror)]
    for event in (
        EngineStalled(31_000_000_000, 1, 0),
        None,
        DrainStarted(1_000_000_000),
        EngineStalled(31_000_000_000, 1, 0),
        StepFailed("RuntimeError"),
        EngineEnded("failed"),
    ):
        if event is None:
            stage.step()
        else:
            stage.log.append(event)
            stage.follow()
            stage.mirror.publish()
        seen.append(state_of(stage.mirror))

    assert seen == ["running", "stalled", "running", "draining", "stalled", "draining", "failed"]


def test_settings_and_memory_are_shown_as_the_snapshot_tells_them() -> None:
    stage = Stage()
    told = msgspec.structs.replace(
        stage.engine.snapshot(), config={"max_num_seqs": 64.0}, memory_bytes={"weights": 7, "kv": 5}
    )

    stage.mirror.load(told)

    view = stage.mirror.view
    assert view.value(m.CONFIG_VALUE, "max_num_seqs") == 64
    assert [view.value(m.DEVICE_MEMORY_BYTES, kind) for kind in ("weights", "kv", "workspace")] == [7, 5, None]


def test_what_happened_before_the_mirror_attached_is_in_no_counter() -> None:
    """TensorRT-LLM#12132 (O11): warm-up traffic was counted, and the hit rate began near 0."""
    clock = ManualClock()
    log = EventLog(4096, clock)
    engine = NaiveEngine(log, 13)
    engine.admit(engine.queue(), 3)
    engine.write(4)
    engine.finish("r1")
    engine.complete()
    mirror = Mirror(clock, 0)

    mirror.load(engine.snapshot())

    assert [sample for sample in mirror.view.counters if sample.value] == []
    assert [histogram for histogram in mirror.view.histograms if histogram.count] == []
    assert mirror.view.value(m.KV_BLOCKS, "device", "0", "used") == 0


def test_extra_bounds_and_allow_lists_are_those_of_the_settings() -> None:
    series = SeriesSettings({"tenant": frozenset({"blue"})}, {m.TIME_TO_FIRST_TOKEN: (0.2, 0.25)})

    view = Mirror(ManualClock(), 0, series=series).view

    histogram = view.histogram(m.TIME_TO_FIRST_TOKEN)
    assert histogram is not None
    assert histogram.bounds == tuple(sorted({*m.TIME_TO_FIRST_TOKEN.buckets, 0.2}))
    assert len(histogram.counts) == len(histogram.bounds) + 1
    assert view.value(m.REQUESTS_FINISHED, "stop", "", "blue") == 0
    assert view.value(m.REQUESTS_FINISHED, "stop", "other", "other") == 0


def test_a_tier_that_is_laid_out_anew_has_extremes_and_ignored_files_of_its_own() -> None:
    """Its lowest number of free blocks was that of other blocks: the new ones had less than no usage."""
    stage = Stage()
    disk = TierState("disk", 9, [0] * 9, [None] * 9, [0] * 9, {"foreign": 2})
    before = stage.engine.snapshot()
    stage.mirror.load(msgspec.structs.replace(before, tiers=[*before.tiers, disk]))
    stage.clock.advance(61)
    stage.mirror.settle()
    assert stage.mirror.view.value(m.KV_FREE_BLOCKS_MIN, "disk", "60s") == 8

    stage.log.begin(1)
    stage.log.append(BlocksLaidOut(5, 4, 64, tier="disk", ignored_files={"stale": 3}))
    stage.follow()
    stage.mirror.publish()

    view = stage.mirror.view
    assert view.value(m.KV_FREE_BLOCKS_MIN, "disk", "60s") is None
    assert view.value(m.KV_FREE_BLOCKS_MIN, "device", "60s") == 12
    assert view.value(m.KV_TIER_IGNORED_FILES, "disk", "stale") == 3
    assert view.value(m.KV_TIER_IGNORED_FILES, "disk", "foreign") is None
    stage.clock.advance(61)
    stage.mirror.settle()
    assert stage.mirror.view.value(m.KV_FREE_BLOCKS_MIN, "disk", "60s") == 4
    assert stage.mirror.view.value(m.KV_USAGE_RATIO_MAX, "disk", "60s") == 0
