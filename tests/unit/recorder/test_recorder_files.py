"""The recorder's files against the engine's own snapshots: rotation, gaps, cut files, disks that fail."""

import os
import random
import resource
import shutil
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recording_stage import SMALL_FILES, RecordingStage, check_states, record_files, recorder_settings

from kvwatch.errors import ConfigError, ExporterError, RecordingError
from kvwatch.recorder import sink as sink_module
from kvwatch.recorder.frames import FrameKind, Span
from kvwatch.recorder.part import RecorderPart
from kvwatch.recorder.reader import Gap, Recording
from kvwatch.recorder.replay import Replay, Target, ledger_at
from kvwatch.recorder.writer import RecordingFolder, RecordingWriter, safe_name
from kvwatch.telemetry import events as ev
from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.schema import Event


def read_events(path: Path) -> list[Event]:
    with Recording(path) as recording:
        return [event for item in recording.items() if isinstance(item, list) for event in item]


def samples(part: RecorderPart) -> dict[tuple[str, str], float]:
    return {(sample.metric.name, sample.labels[0]): sample.value for sample in part.samples()}


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Let every write beyond so many bytes of a file fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def quick_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_module, "RETRY_SECONDS", 0.0)


@pytest.mark.parametrize("seed", range(4))
def test_the_state_at_random_steps_is_what_the_engine_said_across_rotations(tmp_path: Path, seed: int) -> None:
    stage = RecordingStage(recorder_settings(tmp_path, file_bytes=SMALL_FILES), seed=seed)
    stage.run(150, drain_every=1 + 4 * seed)
    stage.close()

    files = record_files(tmp_path)
    assert len(files) > 2
    num_checked = 0
    for path in files:
        with Recording(path) as recording:
            assert recording.is_complete
            num_checked += check_states(recording, stage.snapshots, stage.random, 12)
    assert num_checked > 30


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_state_after_each_of_ten_thousand_random_steps_is_what_the_engine_said(tmp_path: Path) -> None:
    num_compared = 0
    for seed in range(20):
        folder = tmp_path / str(seed)
        settings = recorder_settings(folder, file_bytes=SMALL_FILES * (1 + seed % 3), flight_dir=folder / "flight")
        stage = RecordingStage(settings, seed, log_capacity=[65_536, 512][seed % 2], num_blocks=20 + 3 * seed)
        while len(stage.snapshots) < 500:
            stage.run(50, drain_every=1 + seed, fail_chance=0.01)
        stage.close()
        by_seq = {snapshot.seq - 1: snapshot for snapshot in stage.snapshots.values()}
        seen = set()
        for path in record_files(folder):
            with Recording(path) as recording:
                replay = Replay(recording)
                for item in replay:
                    if isinstance(item, Event) and item.seq in by_seq:
                        assert replay.ledger.differences(by_seq[item.seq]) == []
                        seen.add(item.seq)
        lost = stage.recorder.num_dropped
        assert len(seen) == len(by_seq) or (lost and len(seen) > len(by_seq) * 0.8)
        num_compared += len(seen)
    assert num_compared > 9_000


def test_files_follow_each_other_without_a_hole_and_hold_every_event(tmp_path: Path) -> None:
    stage = RecordingStage(recorder_settings(tmp_path, file_bytes=SMALL_FILES))
    stage.run(150)
    stage.close()

    events = [event for path in record_files(tmp_path) for event in read_events(path)]

    assert [event.seq for event in events] == list(range(stage.log.head))
    assert samples(stage.part)[m.TELEMETRY_DROPPED.name, "recorder-files"] == 0


def test_a_log_that_ran_over_leaves_a_gap_and_the_state_behind_it_is_right(tmp_path: Path) -> None:
    stage = RecordingStage(recorder_settings(tmp_path), log_capacity=64)
    stage.run(30)
    lost_from = stage.log.head
    stage.run(20, drain_every=1000)
    lost_to = stage.log.head
    stage.run(30)
    stage.close()

    (path,) = record_files(tmp_path)
    with Recording(path) as recording:
        gaps = [item for item in recording.items() if isinstance(item, Gap)]
        assert len(gaps) == stage.recorder.num_gaps >= 1
        assert sum(gap.end_seq - gap.first_seq for gap in gaps) == stage.recorder.num_dropped
        lost = {seq for gap in gaps for seq in range(gap.first_seq, gap.end_seq)}
        assert lost & set(range(lost_from, lost_to))
        for snapshot in stage.snapshots.values():
            seq = snapshot.seq - 1
            if seq in lost and seq + 1 in lost:
                with pytest.raises(RecordingError, match="lies in a gap"):
                    ledger_at(recording, Target(seq=seq))
            elif seq not in lost:
                assert ledger_at(recording, Target(seq=seq)).differences(snapshot) == []


def test_walking_through_a_recording_knows_nothing_in_a_gap_and_everything_around_it(tmp_path: Path) -> None:
    stage = RecordingStage(recorder_settings(tmp_path), log_capacity=64)
    for _ in range(3):
        stage.run(15)
        stage.run(20, drain_every=1000)
    stage.close()
    by_seq = {snapshot.seq - 1: snapshot for snapshot in stage.snapshots.values()}

    num_gaps = num_compared = 0
    with Recording(record_files(tmp_path)[0]) as recording:
        replay = Replay(recording)
        for item in replay:
            if isinstance(item, Gap):
                num_gaps += 1
                assert not replay.ledger.is_loaded
            elif isinstance(item, Event) and item.seq in by_seq:
                num_compared += 1
                assert replay.ledger.differences(by_seq[item.seq]) == []
    assert num_gaps == stage.recorder.num_gaps > 0
    assert num_compared > 20


def test_token_ids_that_the_engine_gives_to_others_are_in_a_recording_only_if_asked_for(tmp_path: Path) -> None:
    for keep in (False, True):
        folder = tmp_path / str(keep)
        settings = recorder_settings(folder, keep_token_ids=keep)
        stage = RecordingStage(settings, emit_token_ids=True)
        stage.run(40)
        stage.close()

        stored = [e for e in read_events(record_files(folder)[0]) if isinstance(e, ev.BlocksStored)]
        assert stored
        assert {event.token_ids is not None for event in stored} == {keep}


def test_long_files_hold_further_states_and_the_end_does_not_need_the_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_module, "STATE_EVERY_BYTES", 1000)
    stage = RecordingStage(recorder_settings(tmp_path))
    for _ in range(20):
        stage.run(10)
        assert stage.part.flush()
    stage.close()

    (path,) = record_files(tmp_path)
    with Recording(path) as recording:
        states = [frame for frame in recording.frames if frame.kind is FrameKind.STATE]
        assert len(states) > 3
        # Events before the last state are damaged: what comes after it does not care.
        data = bytearray(path.read_bytes())
        data[recording.frames[1].offset + 100] ^= 1
        path.write_bytes(data)
        newest = stage.snapshots[max(stage.snapshots)]
        assert ledger_at(recording).differences(newest) == []
        with pytest.raises(RecordingError, match="damaged"):
            list(Replay(recording))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_file_cut_anywhere_is_read_up_to_its_last_whole_frame(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole, stage = _one_long_file(tmp_path_factory)
    with Recording(whole) as recording:
        starts = [frame.offset for frame in recording.frames]
    size = whole.stat().st_size
    cut = data.draw(st.integers(starts[1], size - 1) | st.sampled_from(starts[1:]))
    path = whole.with_name("cut.kvrec")
    path.write_bytes(whole.read_bytes()[:cut])

    with Recording(path) as recording:
        assert not recording.is_complete
        whole_frames = [start for start, end in zip(starts, [*starts[1:], size], strict=True) if end <= cut]
        assert [frame.offset for frame in recording.frames][: len(whole_frames)] == whole_frames
        span = recording.span
        assert span is not None
        assert [e.seq for e in read_events(path)] == list(range(span.end_seq))
        check_states(recording, stage.snapshots, random.Random(cut), 3)


_long_file: list[tuple[Path, RecordingStage]] = []


def _one_long_file(factory: pytest.TempPathFactory) -> tuple[Path, RecordingStage]:
    if not _long_file:
        folder = factory.mktemp("long")
        stage = RecordingStage(recorder_settings(folder, file_bytes=2**20))
        for _ in range(25):
            stage.run(6)
            stage.part.flush()
        stage.close()
        _long_file.append((record_files(folder)[0], stage))
    return _long_file[0]


def test_all_files_together_stay_below_the_limit_and_the_oldest_go_first(tmp_path: Path) -> None:
    limit = 8 * SMALL_FILES
    other = tmp_path / "other-20260101T000000Z-1-000001.kvrec"
    other.write_bytes(b"x" * limit)
    stage = RecordingStage(recorder_settings(tmp_path, file_bytes=SMALL_FILES, record_bytes=limit))
    for _ in range(15):
        stage.run(30)
        assert stage.part.flush()
        assert sum(path.stat().st_size for path in record_files(tmp_path)) <= limit
    stage.close()

    files = record_files(tmp_path)
    assert len(files) > 2
    with Recording(files[0]) as first, Recording(files[-1]) as last:
        assert first.span is not None
        assert first.span.first_seq > 0
        assert ledger_at(last).differences(stage.core.snapshot()) == []
    assert other.exists()


def test_files_written_while_the_clock_was_ahead_go_before_those_that_come_after(tmp_path: Path) -> None:
    tomorrow = time.time() + 86_400
    ahead = [tmp_path / f"test-20260101T000000Z-1-00000{number}.kvrec" for number in (1, 2, 3)]
    for path in ahead:
        path.write_bytes(b"x" * SMALL_FILES)
        os.utime(path, (tomorrow, tomorrow))
    stage = RecordingStage(recorder_settings(tmp_path, file_bytes=SMALL_FILES, record_bytes=8 * SMALL_FILES))
    while stage.log.head < 4_000:
        stage.run(30)
        assert stage.part.flush()
    stage.close()

    assert not any(path.exists() for path in ahead)
    assert len(record_files(tmp_path)) > 3


@pytest.mark.usefixtures("quick_retry")
def test_a_full_disk_costs_events_which_are_counted_and_recording_goes_on_when_there_is_room(tmp_path: Path) -> None:
    stage = RecordingStage(recorder_settings(tmp_path))
    stage.run(40)
    assert stage.part.flush()
    with files_of_at_most(4096):
        for _ in range(5):
            stage.run(20)
            assert stage.part.flush()
    counts = samples(stage.part)
    stage.run(40)
    stage.close()

    assert counts[m.TELEMETRY_ERRORS.name, "recorder-files"] > 0
    assert counts[m.TELEMETRY_DROPPED.name, "recorder-files"] > 0
    files = record_files(tmp_path)
    with Recording(files[0]) as first:
        check_states(first, stage.snapshots, stage.random, 5)
    with Recording(files[-1]) as last:
        assert any(frame.kind is FrameKind.GAP for frame in last.frames)
        assert ledger_at(last).differences(stage.core.snapshot()) == []
    for path in files:  # what was written in part was cut off again
        with Recording(path) as recording:
            assert recording.lost_bytes == 0
    num_recorded = sum(len(read_events(path)) for path in files)
    assert num_recorded + samples(stage.part)[m.TELEMETRY_DROPPED.name, "recorder-files"] == stage.log.head


@pytest.mark.usefixtures("quick_retry")
def test_a_folder_that_vanishes_or_is_no_folder_is_survived(tmp_path: Path) -> None:
    folder = tmp_path / "recordings"
    stage = RecordingStage(recorder_settings(folder))
    stage.run(20)
    assert stage.part.flush()
    shutil.rmtree(folder)
    folder.write_text("a file where the folder was")
    for _ in range(3):
        stage.run(10)
        assert stage.part.flush()
    assert samples(stage.part)[m.TELEMETRY_ERRORS.name, "recorder-files"] > 0
    folder.unlink()
    stage.run(20)
    stage.close()

    with Recording(record_files(folder)[-1]) as last:
        assert ledger_at(last).differences(stage.core.snapshot()) == []


def test_a_disk_that_is_too_slow_costs_events_but_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_module, "QUEUE_BYTES", 20_000)
    stage = RecordingStage(recorder_settings(tmp_path))
    assert stage.part.flush()
    disk_answers = threading.Event()
    stage.thread.put(lambda: None if disk_answers.wait(60) else pytest.fail("never released"))
    stage.run(100)
    assert stage.part.num_waiting_bytes <= 20_000
    disk_answers.set()
    assert stage.part.flush()
    stage.run(30)
    stage.close()

    dropped = samples(stage.part)[m.TELEMETRY_DROPPED.name, "recorder-files"]
    assert dropped > 0
    with Recording(record_files(tmp_path)[-1]) as last:
        gaps = [frame.span for frame in last.frames if frame.kind is FrameKind.GAP]
        assert sum(gap.num_events for gap in gaps) == dropped
        outside = {
            step: snapshot
            for step, snapshot in stage.snapshots.items()
            if not any(gap.first_seq < snapshot.seq < gap.end_seq for gap in gaps)
        }
        assert check_states(last, outside, stage.random, 20) == 20
        assert ledger_at(last).differences(stage.core.snapshot()) == []


def test_a_folder_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ExporterError, match="--record-dir"):
        RecordingStage(recorder_settings(tmp_path / "file" / "recordings"))


@pytest.mark.parametrize(
    ("overrides", "flag"),
    [
        ({"file_bytes": 100}, "--record-file-bytes"),
        ({"record_bytes": 2**20, "file_bytes": 2**20}, "--record-bytes"),
        ({"flight_bytes": 1000}, "--flight-bytes"),
        ({"flight_bytes": 2**40}, "--flight-bytes"),
    ],
)
def test_sizes_that_cannot_be_kept_are_refused(tmp_path: Path, overrides: dict[str, object], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        RecordingStage(recorder_settings(tmp_path, **overrides))


def test_recordings_are_for_their_owner_only(tmp_path: Path) -> None:
    stage = RecordingStage(recorder_settings(tmp_path, flight_dir=tmp_path / "flight"))
    stage.close()

    files = [*record_files(tmp_path), *(tmp_path / "flight").iterdir()]
    assert len(files) == 2
    assert [stat.S_IMODE(path.stat().st_mode) for path in files] == [0o600, 0o600]


def test_an_existing_file_is_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "taken.kvrec"
    path.write_text("precious")
    stage = RecordingStage(recorder_settings(tmp_path / "other"))
    stage.close()
    with Recording(record_files(tmp_path / "other")[0]) as recording:
        header = recording.header

    with pytest.raises(FileExistsError):
        RecordingWriter(path, header)
    assert path.read_text() == "precious"


def test_hostile_names_of_engines_stay_within_the_folder(tmp_path: Path) -> None:
    folder = RecordingFolder(tmp_path, "../../etc/pass wd\n", 10**6)

    path = folder.new_path("because/../of")

    assert path.parent == tmp_path
    assert os.path.normpath(path) == str(path)
    assert [safe_name(text) for text in ("", "..", "a/b", "x" * 200)] == ["_", "_", "a_b", "x" * 64]


def test_a_span_joins_what_follows() -> None:
    assert Span(1, 5, 2, 3, 100, 200).joined(Span(5, 9, 3, 4, 250, 300)) == Span(1, 9, 2, 4, 100, 300)
