"""The flight recorder: what it holds, when it is written out, what it costs."""

import itertools
import os
import shutil
import time
import tracemalloc
from concurrent.futures import Future
from pathlib import Path

import msgspec
import pytest
from recording_stage import RecordingStage, check_states, recorder_settings

from kvwatch.errors import ExporterError
from kvwatch.recorder import flight as flight_module
from kvwatch.recorder.frames import FrameKind
from kvwatch.recorder.reader import Recording
from kvwatch.recorder.replay import Target, ledger_at
from kvwatch.recorder.triggers import ALLOCATION_FAILURE_BURST, PREEMPTION_BURST, Triggers
from kvwatch.telemetry import events as ev
from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.schema import Event

RING = 256 * 1024
SECOND = 10**9


def flight_stage(folder: Path, seed: int = 0, log_capacity: int = 65_536, **overrides: object) -> RecordingStage:
    values: dict[str, object] = {"record_dir": None, "flight_dir": folder, "flight_bytes": RING, "burst": 10**6}
    return RecordingStage(recorder_settings(folder, **(values | overrides)), seed, log_capacity)


def dumps(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.kvrec"))


def asked(stage: RecordingStage, reason: str) -> "Future[Path]":
    answer = stage.part.trigger(reason)
    stage.part.poll()
    return answer


def dropped(stage: RecordingStage) -> float:
    return next(s.value for s in stage.part.samples() if s.metric is m.TELEMETRY_DROPPED)


def lively_seconds(recording: Recording, place: int, silence: float) -> float:
    """Return how far the recording goes back from its end to that frame, where no silence counts for more than told."""
    times = [time for frame in recording.frames[place:] for time in (frame.span.first_ns, frame.span.last_ns)]
    return sum(min((later - earlier) / SECOND, silence) for earlier, later in itertools.pairwise(times))


@pytest.mark.parametrize("seed", range(3))
def test_the_ring_gives_the_engines_state_at_random_steps_also_after_many_rounds(tmp_path: Path, seed: int) -> None:
    stage = flight_stage(tmp_path, seed, flight_seconds=1.0)
    stage.run(500, drain_every=1 + 3 * seed)
    path = stage.part.ring_path
    assert path is not None

    with Recording(path) as recording:  # it is still being written
        assert recording.is_ring
        assert recording.span is not None
        assert recording.span.end_seq == stage.log.head
        assert check_states(recording, stage.snapshots, stage.random, 20) == 20
        assert ledger_at(recording).differences(stage.core.snapshot()) == []
    stage.close()
    assert dropped(stage) == 0


def test_the_ring_that_was_overwritten_begins_with_a_state_within_its_first_half(tmp_path: Path) -> None:
    stage = flight_stage(tmp_path)
    while stage.log.head < 15_000:
        stage.run(100)
    path = stage.part.ring_path
    assert path is not None
    stage.close()

    with Recording(path) as recording:
        assert recording.span is not None
        assert recording.span.first_seq > 0
        place = next(place for place, frame in enumerate(recording.frames) if frame.kind is FrameKind.STATE)
        known = sum(frame.span.num_events for frame in recording.frames[place:])
        assert known > sum(frame.span.num_events for frame in recording.frames) / 2
        assert check_states(recording, stage.snapshots, stage.random, 10) == 10


def test_an_idle_engine_does_not_push_its_last_steps_out_of_the_ring(tmp_path: Path) -> None:
    stage = flight_stage(tmp_path, flight_seconds=0.001)
    stage.run(10)
    path = stage.part.ring_path
    assert path is not None
    before = path.read_bytes()
    for _ in range(5):
        time.sleep(0.01)
        stage.drain()
    # At most the state after the last step was added.
    with Recording(path) as recording:
        assert recording.frames[-1].kind in {FrameKind.EVENTS, FrameKind.STATE}
    settled = path.read_bytes()
    for _ in range(5):
        time.sleep(0.01)
        stage.drain()

    assert path.read_bytes() == settled
    assert len(settled) == len(before)
    stage.close()


def test_lost_events_are_a_gap_in_the_ring(tmp_path: Path) -> None:
    stage = flight_stage(tmp_path, log_capacity=64)
    stage.run(20)
    stage.run(20, drain_every=1000)
    stage.run(20)
    path = stage.part.ring_path
    assert path is not None
    stage.close()

    with Recording(path) as recording:
        gaps = [frame.span.num_events for frame in recording.frames if frame.kind is FrameKind.GAP]
        assert sum(gaps) == stage.recorder.num_dropped > 0
        assert ledger_at(recording).differences(stage.core.snapshot()) == []


def test_a_dump_is_a_recording_that_stands_alone(tmp_path: Path) -> None:
    stage = flight_stage(tmp_path)
    stage.run(100)

    path = asked(stage, "admin").result(timeout=10)

    snapshot = stage.core.snapshot()
    stage.close()
    with Recording(path) as recording:
        assert recording.is_complete
        assert recording.header.reason == "admin"
        assert recording.frames[0].kind is FrameKind.STATE
        assert ledger_at(recording).differences(snapshot) == []
        check_states(recording, stage.snapshots, stage.random, 10)


def test_a_dump_goes_back_as_far_as_it_was_told(tmp_path: Path) -> None:
    stage = flight_stage(tmp_path, flight_seconds=0.3)
    until = time.monotonic() + 2.0
    while time.monotonic() < until:
        stage.run(3)
        time.sleep(0.01)

    path = asked(stage, "admin").result(timeout=10)
    stage.close()

    with Recording(path) as recording:
        assert recording.span is not None
        assert (recording.span.last_ns - recording.span.first_ns) / SECOND >= 0.3
        states = [place for place, frame in enumerate(recording.frames) if frame.kind is FrameKind.STATE]
        assert states[0] == 0
        assert lively_seconds(recording, 0, silence=0.03) >= 0.3
        assert lively_seconds(recording, states[1], silence=0.03) < 0.3, "the next state would have been old enough"


def test_a_dump_after_a_long_stall_shows_what_came_before_it(tmp_path: Path) -> None:
    stage = flight_stage(tmp_path, flight_seconds=0.5)
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        stage.run(3)
        time.sleep(0.01)
    silent_since_ns = stage.log.now_ns
    time.sleep(1.2)
    stage.run(1)

    path = asked(stage, "admin").result(timeout=10)
    stage.close()

    with Recording(path) as recording:
        assert recording.span is not None
        assert (silent_since_ns - recording.span.first_ns) / SECOND > 0.35
        assert check_states(recording, stage.snapshots, stage.random, 5) == 5


def test_what_is_asked_for_too_often_is_refused_and_says_so(tmp_path: Path) -> None:
    stage = flight_stage(tmp_path)
    stage.run(5)
    first, second = asked(stage, "one"), asked(stage, "two")

    assert first.result(timeout=10).exists()
    with pytest.raises(ExporterError, match="just written out"):
        second.result(timeout=10)
    stage.close()
    assert len(dumps(tmp_path)) == 1


def test_a_dump_holds_what_happened_until_it_was_asked_for(tmp_path: Path) -> None:
    """The log is looked at twice a second: a dump made before it was would lack half a second."""
    stage = flight_stage(tmp_path)
    stage.run(20)
    for _ in range(10):
        stage.submit()
        stage.core.step()
    answer = stage.part.trigger("admin")

    stage.drain()

    with Recording(answer.result(timeout=30)) as recording:
        assert ledger_at(recording).differences(stage.core.snapshot()) == []
    stage.close()


def test_without_a_flight_recorder_a_trigger_says_how_to_get_one(tmp_path: Path) -> None:
    stage = RecordingStage(recorder_settings(tmp_path))

    with pytest.raises(ExporterError, match="--flight-dir"):
        stage.part.trigger("admin").result(timeout=1)
    stage.close()


def test_a_burst_of_preemptions_is_written_out_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_module, "AUTOMATIC_DUMP_SECONDS", 1e9)  # slow machines need minutes for all this
    stage = flight_stage(tmp_path, burst=3)
    while sum(isinstance(event, ev.RequestPreempted) for event in _recorded(stage)) < 20:
        stage.run(50)
    stage.close()

    paths = dumps(tmp_path)
    assert len(paths) == 1
    with Recording(paths[0]) as recording:
        assert recording.header.reason in {"preemption-burst", "allocation-failure-burst"}
        events = [event for item in recording.items() if isinstance(item, list) for event in item]
        assert sum(isinstance(event, ev.RequestPreempted | ev.AllocationFailed) for event in events) >= 3


def _recorded(stage: RecordingStage) -> list[Event]:
    path = stage.part.ring_path
    assert path is not None
    with Recording(path) as recording:
        return [event for item in recording.items() if isinstance(item, list) for event in item]


def test_a_slow_step_is_written_out(tmp_path: Path) -> None:
    stage = flight_stage(tmp_path, slow_step_seconds=1e-9)
    stage.run(5)
    stage.close()

    (path,) = dumps(tmp_path)
    with Recording(path) as recording:
        assert recording.header.reason == "slow-step"


def test_a_ledger_violation_is_written_out(tmp_path: Path) -> None:
    stage = flight_stage(tmp_path)
    stage.run(20)
    stage.part.poll()
    assert dumps(tmp_path) == []
    stage.mirror.ledger.pool("device").group("0").num_cached += 1
    stage.run(5)
    assert stage.mirror.num_violations > 0

    stage.part.poll()
    stage.close()

    (path,) = dumps(tmp_path)
    with Recording(path) as recording:
        assert recording.header.reason == "ledger-violation"


def burst(cls: type[Event], number: int, gap_seconds: float, **fields: object) -> list[Event]:
    return [
        msgspec.convert(fields | {"time_ns": int(place * gap_seconds * SECOND)}, cls) for place in range(number)
    ]  # fmt: skip


PREEMPTED = {"request": "r", "mode": "recompute", "reason": "blocks", "num_blocks": 1, "tokens_at_risk": 1,
             "beneficiary": "s"}  # fmt: skip
FAILED = {"request": "r", "needed": 2, "available": 1}


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        (burst(ev.RequestPreempted, PREEMPTION_BURST, 1.0, **PREEMPTED), "preemption-burst"),
        (burst(ev.RequestPreempted, PREEMPTION_BURST - 1, 1.0, **PREEMPTED), None),
        (burst(ev.RequestPreempted, 50, 2.0, **PREEMPTED), None),
        (
            burst(ev.AllocationFailed, ALLOCATION_FAILURE_BURST, 0.1, **FAILED, reason="growth"),
            "allocation-failure-burst",
        ),
        (burst(ev.AllocationFailed, 100, 0.1, **FAILED, reason="admission"), None),
        ([ev.EngineStalled(stuck_ns=1, num_running=1, num_waiting=0)], "stalled-step"),
        ([ev.StepFailed("MemoryError")], "failed-step"),
        ([ev.EngineEnded("failed")], "failed-engine"),
        ([ev.EngineEnded("stopped")], None),
        ([ev.DrainStarted(0)], None),
    ],
)
def test_what_is_worth_writing_out(events: list[Event], reason: str | None) -> None:
    triggers = Triggers()

    found = [triggers.look([event]) for event in events]

    assert next((each for each in found if each), None) == reason
    assert Triggers().look(events) == reason


def test_memory_does_not_grow_with_what_was_recorded(tmp_path: Path) -> None:
    stage = flight_stage(tmp_path)
    stage.run(300)
    tracemalloc.start()
    try:
        stage.run(50)
        before, _ = tracemalloc.get_traced_memory()
        stage.snapshots.clear()
        for _ in range(6):
            stage.run(50)
            stage.snapshots.clear()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    path = stage.part.ring_path
    assert path is not None
    size = path.stat().st_size
    stage.close()

    assert after - before < 8 * 2**20  # the log's own ring fills up; events in it are small
    assert size < RING + 64 * 1024


def test_a_state_that_is_too_large_for_the_ring_leaves_the_events_and_says_so(tmp_path: Path) -> None:
    values: dict[str, object] = {"record_dir": None, "flight_dir": tmp_path, "flight_bytes": RING}
    stage = RecordingStage(recorder_settings(tmp_path, **values), num_blocks=6000, max_model_len=4096)
    pool = stage.core.manager.pool
    for block in range(1, 6000):  # hashes that cannot be compressed, as real ones are
        pool.hashes[block] = stage.random.randbytes(32)  # type: ignore[call-overload]
    snapshot = stage.core.snapshot()
    assert len(msgspec.msgpack.encode(snapshot)) > RING / 2
    follower = stage.part.follower

    follower.load(snapshot)
    stage.run(3)
    path = stage.part.ring_path
    assert path is not None
    with Recording(path) as recording:
        assert any(frame.kind is FrameKind.EVENTS for frame in recording.frames)
    errors = next(s.value for s in stage.part.samples() if s.metric is m.TELEMETRY_ERRORS)
    stage.close()
    assert errors >= 1


def test_a_ring_that_cannot_be_made_is_tried_again_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_module, "RETRY_SECONDS", 0.0)
    folder = tmp_path / "flight"
    folder.write_text("in the way")
    stage = flight_stage(folder, is_flight_dir_asked_for=False)
    stage.run(10)
    assert stage.part.ring_path is None
    assert dropped(stage) > 0
    with pytest.raises(ExporterError, match="no ring"):
        asked(stage, "admin").result(timeout=1)

    folder.unlink()
    stage.run(10)

    (path,) = folder.glob("*.kvring")
    with Recording(path) as recording:
        assert ledger_at(recording, Target()).differences(stage.core.snapshot()) == []
    stage.close()


def test_a_ring_that_was_removed_is_made_anew_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_module, "LOOK_SECONDS", 0.0)
    folder = tmp_path / "flight"
    stage = flight_stage(folder)
    stage.run(20)
    shutil.rmtree(folder)
    stage.run(20)

    (path,) = folder.glob("*.kvring")
    assert path == stage.part.ring_path
    with Recording(path) as recording:  # what a kill would leave
        assert ledger_at(recording).differences(stage.core.snapshot()) == []
    assert next(s.value for s in stage.part.samples() if s.metric is m.TELEMETRY_ERRORS) == 1
    stage.close()


@pytest.mark.parametrize("size", [0, 100, 5000, 50_000])
def test_a_ring_that_was_cut_short_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(flight_module, "LOOK_SECONDS", 0.0)
    stage = flight_stage(tmp_path)
    stage.run(20)
    spoiled = stage.part.ring_path
    assert spoiled is not None
    os.truncate(spoiled, size)
    stage.run(20)

    path = stage.part.ring_path
    assert path is not None
    assert path != spoiled
    with Recording(path) as recording:
        assert ledger_at(recording).differences(stage.core.snapshot()) == []
    assert asked(stage, "admin").result(timeout=30).exists()
    stage.close()


def test_a_flight_folder_that_was_asked_for_and_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ExporterError, match="--flight-dir"):
        flight_stage(tmp_path / "file" / "flight")


def test_a_dump_that_the_disk_refuses_is_counted_and_told(tmp_path: Path) -> None:
    stage = flight_stage(tmp_path)
    stage.run(5)
    (tmp_path / "in the way").mkdir()
    for path in list(tmp_path.iterdir()):
        if path.is_file():
            path.unlink()
    tmp_path.joinpath("in the way").rmdir()
    tmp_path.rmdir()
    tmp_path.write_text("no folder any more")

    with pytest.raises(ExporterError, match="could not be written out"):
        asked(stage, "admin").result(timeout=10)

    tmp_path.unlink()
    tmp_path.mkdir()
    stage.close()
    assert next(s.value for s in stage.part.samples() if s.metric is m.TELEMETRY_ERRORS) == 1
