"""`kvwatch replay`: places in a recording, what is printed, what is exported, and files that mean harm."""

import argparse
import contextlib
import csv
import itertools
import json
import random
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recording_stage import RecordingStage, make_headers, record_files, recorder_settings

from kvwatch.errors import ConfigError, KVWatchError, RecordingError
from kvwatch.recorder.command import REPLAY_COMMAND
from kvwatch.recorder.frames import FrameKind, FramePacker, Span
from kvwatch.recorder.header import encode_header
from kvwatch.recorder.reader import Recording
from kvwatch.recorder.replay import Replay, Target, ledger_at
from kvwatch.recorder.schema import EventEncoder
from kvwatch.recorder.tables import STEPS, rows, tables
from kvwatch.recorder.trace import entries
from kvwatch.recorder.writer import FILE_MAGIC
from kvwatch.telemetry import events as ev
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.schema import REGISTRY, Event
from kvwatch.telemetry.snapshot import EngineSnapshot

HEADERS = make_headers(EventLog(8))


class Recorded:
    """One recording with its engine's snapshots; made once, since nobody changes it."""

    def __init__(self, folder: Path) -> None:
        stage = RecordingStage(recorder_settings(folder, flight_dir=folder / "flight"), seed=5)
        stage.run(150)
        stage.close()
        self.stage = stage
        (self.path,) = record_files(folder)
        ring = stage.part.ring_path
        assert ring is not None
        self.ring = ring

    def events(self) -> list[Event]:
        with Recording(self.path) as recording:
            return [item for item in Replay(recording) if isinstance(item, Event)]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return Recorded(tmp_path_factory.mktemp("recorded"))


def replay(*words: object) -> int:
    parser = argparse.ArgumentParser(exit_on_error=False)
    REPLAY_COMMAND.add_arguments(parser)
    return REPLAY_COMMAND.run(parser.parse_args([str(word) for word in words]))


def write_recording(path: Path, frames: list[tuple[FrameKind, bytes, Span]], header: bytes | None = None) -> Path:
    """Write a file without an index, frame by frame, as nobody should."""
    packer = FramePacker(level=1)
    data = FILE_MAGIC + packer.pack(FrameKind.HEADER, header or encode_header(HEADERS.make()), Span())
    for kind, raw, span in frames:
        data += packer.pack(kind, raw, span)
    path.write_bytes(data)
    return path


# ---------------------------------------------------------------- places


def test_a_step_a_sequence_number_and_a_time_name_the_same_place(recorded: Recorded) -> None:
    events = recorded.events()
    # Events between two steps have the time of the one before: such a step has no time of its own.
    event = next(
        each
        for each, after in itertools.pairwise(events[len(events) // 2 :])
        if isinstance(each, ev.StepCompleted) and after.time_ns > each.time_ns
    )
    snapshot = recorded.stage.snapshots[event.step]

    with Recording(recorded.path) as recording:
        for target in (Target(step=event.step), Target(seq=event.seq), Target(time_ns=event.time_ns)):
            assert ledger_at(recording, target).differences(snapshot) == []
        assert ledger_at(recording).differences(recorded.stage.core.snapshot()) == []


@pytest.mark.parametrize("target", [Target(step=10**6), Target(seq=10**9), Target(time_ns=1), Target(seq=-5)])
def test_a_place_outside_the_recording_is_an_error_that_names_what_there_is(recorded: Recorded, target: Target) -> None:
    with Recording(recorded.path) as recording, pytest.raises(RecordingError, match=r"it knows \w+s -?\d+ to \d+"):
        ledger_at(recording, target)


# ---------------------------------------------------------------- printing


def test_the_state_is_printed_with_its_equation(recorded: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    step = sorted(recorded.stage.snapshots)[70]
    tier = recorded.stage.snapshots[step].tiers[0]
    used = sum(count > 0 for count in tier.ref_counts)
    cached = sum(h is not None and not c for h, c in zip(tier.hashes, tier.ref_counts, strict=True))

    assert replay(recorded.path, "--step", step) == 0

    text = capsys.readouterr().out
    assert f"capacity 40 = empty {40 - used - cached} + used {used} + cached {cached}" in text
    assert f"step {step}," in text
    for request in recorded.stage.snapshots[step].requests:
        if request.state == "running":
            assert f" {request.request}\n" in text


def test_the_state_before_anything_happened_names_no_event_and_no_step(
    recorded: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay(recorded.path, "--seq", -1) == 0

    assert "state       before the first event, " in capsys.readouterr().out


def test_json_says_the_same_for_a_ring(recorded: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay(recorded.ring, "--json", "--top", 100) == 0

    found = json.loads(capsys.readouterr().out)
    snapshot = recorded.stage.core.snapshot()
    blocks = {
        each.request: {b for s in snapshot.sequences if s.request == each.request for b in s.block_ids}
        for each in snapshot.requests
    }
    assert found["recording"]["kind"] == "ring"
    assert {each["request"]: each["blocks"] for each in found["state"]["requests"]} == {
        request: len(held) for request, held in blocks.items()
    }
    assert found["state"]["seq"] == snapshot.seq - 1


def test_time_may_be_given_in_words_in_seconds_or_from_the_end(
    recorded: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    events = recorded.events()
    event = next(e for e in events[len(events) // 2 :] if isinstance(e, ev.StepCompleted))
    with Recording(recorded.path) as recording:
        wall_ns = event.time_ns + recording.header.wall_minus_monotonic_ns
        assert recording.span is not None
        from_end = (event.time_ns - recording.span.last_ns) / 1e9
    seconds, rest = divmod(wall_ns + 999, 10**9)
    stamp = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{rest // 1000:06}Z"

    found = []
    for text in (stamp, f"{from_end:.9f}"):
        assert replay(recorded.path, f"--time={text}", "--json") == 0
        found.append(json.loads(capsys.readouterr().out)["state"]["step"])

    assert found == [event.step, event.step]


def test_a_time_that_is_none_says_how_to_write_one(recorded: Recorded) -> None:
    with pytest.raises(ConfigError, match="--time 'noon' is no time; write"):
        replay(recorded.path, "--time", "noon")


def test_events_are_listed_by_name_and_request(recorded: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    names = {spec.cls: spec.name for spec in REGISTRY}
    finished = [e for e in recorded.events() if isinstance(e, ev.RequestFinished)][3]

    replay(recorded.path, "--events", "--json", "--name", names[ev.RequestFinished], "--request", finished.request)

    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert (found["seq"], found["generated_tokens"]) == (finished.seq, finished.generated_tokens)

    replay(recorded.path, "--events", "--last", 3)
    assert [int(line.split()[0]) for line in capsys.readouterr().out.splitlines()] == [
        event.seq for event in recorded.events()[-3:]
    ]

    replay(recorded.path, "--events", "--seq", 4)
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_a_name_that_no_event_has_suggests_the_nearest(recorded: Recorded) -> None:
    with pytest.raises(ConfigError, match=r"did you mean step\.completed"):
        replay(recorded.path, "--events", "--name", "step.complete")


def test_hostile_names_do_nothing_to_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    event = ev.RequestRejected("\x1b[2Jevil\n", "invalid", seq=0, step=0, time_ns=0)
    path = write_recording(
        tmp_path / "x.kvrec", [(FrameKind.EVENTS, EventEncoder().encode([event]), Span(0, 1))]
    )  # fmt: skip

    assert replay(path, "--events") == 0
    assert replay(path) == 0

    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "evil" in text
    assert "holds no state" in text


# ---------------------------------------------------------------- exports


def expected_steps(recorded: Recorded) -> list[tuple[int, ...]]:
    """Count what each step's snapshot says, without the ledger."""
    found: list[tuple[int, ...]] = []
    for step, snapshot in sorted(recorded.stage.snapshots.items()):
        tier = snapshot.tiers[0]
        pairs = list(zip(tier.ref_counts, tier.hashes, tier.filled_slots, strict=True))[1:]
        used = [filled for count, _, filled in pairs if count]
        found.append(
            (
                step, snapshot.seq - 1, len(used), sum(not c and h is not None for c, h, _ in pairs), sum(used),
                sum(r.state == "running" for r in snapshot.requests),
                sum(r.state != "running" for r in snapshot.requests),
            )
        )  # fmt: skip
    return found


STEP_COLUMNS = ("step", "seq", "num_used", "num_cached", "num_filled_slots", "num_running", "num_waiting")


def test_csv_tables_hold_the_engines_counts_and_every_event(recorded: Recorded, tmp_path: Path) -> None:
    assert replay(recorded.path, "--csv", tmp_path / "csv") == 0

    def read(name: str) -> list[dict[str, str]]:
        with (tmp_path / "csv" / f"{name}.csv").open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    assert [tuple(int(row[c]) for c in STEP_COLUMNS) for row in read(STEPS)] == expected_steps(recorded)
    for spec in REGISTRY:
        events = [event for event in recorded.events() if type(event) is spec.cls]
        if events:
            found = read(spec.name)
            assert [int(row["seq"]) for row in found] == [event.seq for event in events]
    allocated = [event for event in recorded.events() if isinstance(event, ev.BlocksAllocated)]
    spec = next(spec for spec in REGISTRY if spec.cls is ev.BlocksAllocated)
    assert [json.loads(row["block_ids"]) for row in read(spec.name)] == [event.block_ids for event in allocated]


def test_parquet_tables_hold_the_same_with_types(recorded: Recorded, tmp_path: Path) -> None:
    assert replay(recorded.path, "--parquet", tmp_path / "pq") == 0

    def read(name: str) -> Any:
        return pyarrow.parquet.read_table(tmp_path / "pq" / f"{name}.parquet")

    steps = read(STEPS)
    assert list(zip(*(steps.column(c).to_pylist() for c in STEP_COLUMNS), strict=True)) == expected_steps(recorded)
    for spec in REGISTRY:
        events = [event for event in recorded.events() if type(event) is spec.cls]
        if events:
            found = read(spec.name)
            for name in spec.fields:
                column = found.column(name).to_pylist()
                wanted = [getattr(event, name) for event in events]
                assert [dict(v) if isinstance(w, dict) else v for v, w in zip(column, wanted, strict=True)] == wanted


def test_without_pyarrow_the_remedy_is_named(
    recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    with pytest.raises(RecordingError, match=r"pip install 'kvwatch\[parquet\]'"):
        replay(recorded.path, "--parquet", tmp_path / "pq")


def test_each_request_has_one_row_that_says_what_became_of_it(recorded: Recorded) -> None:
    columns = [column.name for column in tables()["requests"].columns]
    with Recording(recorded.path) as recording:
        found = [dict(zip(columns, row, strict=True)) for name, row in rows(recording) if name == "requests"]

    by_request = {row["request"]: row for row in found}
    assert len(by_request) == len(found) == recorded.stage.num_submitted
    live = {request.request for request in recorded.stage.core.snapshot().requests}
    assert {name for name, row in by_request.items() if row["reason"] is None} == live
    for event in recorded.events():
        if isinstance(event, ev.RequestFinished):
            row = by_request[event.request]
            assert row["finished_ns"] == event.time_ns
            assert row["num_preemptions"] == event.num_preemptions
            if event.queue_ns is not None and event.prefill_ns is not None:
                assert abs(row["admitted_ns"] - row["queued_ns"] - event.queue_ns) < 5_000_000


def test_the_trace_loads_and_its_counters_are_the_engines(recorded: Recorded, tmp_path: Path) -> None:
    assert replay(recorded.path, "--trace", tmp_path / "t.json") == 0

    trace = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))["traceEvents"]
    blocks = [entry["args"] for entry in trace if entry["ph"] == "C" and entry["name"] == "blocks"]
    steps = {step for step, *_ in expected_steps(recorded)}
    wanted = [(used, cached) for _, _, used, cached, *_ in expected_steps(recorded)]
    assert [(entry["used"], entry["cached"]) for entry in blocks][-len(wanted) :] == wanted
    assert sum(entry["ph"] == "X" and entry["name"].startswith("step ") for entry in trace) == len(steps)
    assert all(entry["dur"] >= 0 for entry in trace if entry["ph"] == "X")


def test_the_slices_of_a_request_follow_each_other_and_add_up_to_its_life(recorded: Recorded) -> None:
    with Recording(recorded.path) as recording:
        trace = list(entries(recording))
    names = {
        e["tid"]: e["args"]["name"] for e in trace if e["ph"] == "M" and e["name"] == "thread_name" and e["pid"] == 2
    }
    slices: dict[str, list[dict[str, Any]]] = {}
    for entry in trace:
        if entry["ph"] == "X" and entry["pid"] == 2:
            slices.setdefault(names[entry["tid"]], []).append(entry)

    first_tokens = {e.request: e.time_ns for e in recorded.events() if isinstance(e, ev.FirstToken)}
    for request, mine in slices.items():  # also one that was preempted before it had a token
        begins = [entry["ts"] for entry in mine if entry["name"] == "decode"]
        assert all(begin >= first_tokens[request] / 1000 - 1 for begin in begins)
    queued = {e.request: e.queued_ns for e in recorded.events() if isinstance(e, ev.RequestQueued)}
    num_preempted = 0
    for event in recorded.events():
        if isinstance(event, ev.RequestFinished):
            mine = slices[event.request]
            num_preempted += event.num_preemptions
            assert mine[0]["name"] == "queue"
            assert mine[0]["ts"] == pytest.approx(queued[event.request] / 1000)
            assert sum(entry["name"] == "preempted" for entry in mine) == event.num_preemptions
            # An abort between two steps has the time of the step before, which may be before the request came.
            end = max(event.time_ns / 1000, mine[-1]["ts"])
            assert mine[-1]["ts"] + mine[-1]["dur"] == pytest.approx(end, abs=1)
            for one, other in itertools.pairwise(mine):
                assert one["ts"] + one["dur"] == pytest.approx(other["ts"], abs=1)
    assert num_preempted > 0


def test_a_request_that_was_preempted_before_its_first_token_is_prefilled_again(tmp_path: Path) -> None:
    events: list[Event] = [
        ev.RequestQueued("r", 8, 1, 1000),
        ev.RequestAdmitted("r", 8, 8, 0, 0, 0),
        ev.RequestPreempted("r", "recompute", "blocks", 2, 4, "s"),
        ev.RequestResumed("r", "recompute", 0, 0, 4),
        ev.FirstToken("r", 0),
        ev.RequestPreempted("r", "recompute", "blocks", 2, 4, "s"),
        ev.RequestResumed("r", "recompute", 0, 0, 4),
        ev.RequestFinished("r", "stop", 8, 1, 0, 2, 2, 0, 0, 0, 0),
    ]
    for seq, event in enumerate(events):
        event.seq, event.time_ns = seq, 1000 * (seq + 1)
    path = write_recording(
        tmp_path / "x.kvrec",
        [(FrameKind.EVENTS, EventEncoder().encode(events), Span(0, len(events)))],
    )

    with Recording(path) as recording:
        slices = [(e["name"], e["ts"], e["dur"]) for e in entries(recording) if e["ph"] == "X"]

    names = ["queue", "prefill", "preempted", "prefill", "decode", "preempted", "decode"]
    assert slices == [(name, place + 1, 1) for place, name in enumerate(names)]


def step_slices(folder: Path, event: ev.StepCompleted) -> dict[str, tuple[float, float]]:
    """Begin and end of each slice in the trace of one step, in ns."""
    event.seq, event.step, event.time_ns = 0, 7, 1_000_000
    path = write_recording(
        folder / "x.kvrec", [(FrameKind.EVENTS, EventEncoder().encode([event]), Span(0, 1))]
    )  # fmt: skip
    with Recording(path) as recording:
        slices = [e for e in entries(recording) if e["ph"] == "X"]
    return {e["name"]: (round(e["ts"] * 1000), round((e["ts"] + e["dur"]) * 1000)) for e in slices}


def test_the_operations_of_a_step_lie_in_its_forward_pass(tmp_path: Path) -> None:
    event = ev.StepCompleted(
        1_000, 90_000, 3_000, 4_000, 1, 0, [], [], 0, 0, 0, 0, 0, 0, {},
        build_ns=2_000, linear_ns=40_000, attention_ns=20_000, rotary_ns=3_000, norm_ns=2_000, activation_ns=1_000,
        logits_ns=10_000,
    )  # fmt: skip

    assert step_slices(tmp_path, event) == {
        "step 7": (904_000, 1_004_000),
        "schedule": (904_000, 905_000),
        "build": (905_000, 907_000),
        "forward": (907_000, 997_000),
        "linear": (907_000, 947_000),
        "attention": (947_000, 967_000),
        "rotary": (967_000, 970_000),
        "norm": (970_000, 972_000),
        "activation": (972_000, 973_000),
        "logits": (973_000, 983_000),
        "sample": (997_000, 1_000_000),
        "apply": (1_000_000, 1_004_000),
    }


def test_a_step_whose_operations_are_unknown_shows_its_phases(tmp_path: Path) -> None:
    event = ev.StepCompleted(1_000, 90_000, 3_000, 4_000, 1, 0, [], [], 0, 0, 0, 0, 0, 0, {})

    assert set(step_slices(tmp_path, event)) == {"step 7", "schedule", "forward", "sample", "apply"}


def test_a_folder_or_file_that_cannot_be_written_is_a_named_error(recorded: Recorded, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    for flag, place in (("--csv", "file/x"), ("--parquet", "file/x"), ("--trace", "file/x.json")):
        with pytest.raises(RecordingError, match="cannot be writ"):
            replay(recorded.path, flag, tmp_path / place)


# ---------------------------------------------------------------- files that mean harm


@pytest.mark.parametrize("content", [b"", b"KVWREC1\n", b"KVWRING1", b"PK\x03\x04", FILE_MAGIC + bytes(100)])
def test_what_is_no_recording_is_a_named_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)

    with pytest.raises(RecordingError):
        Recording(tmp_path / "x")


def test_a_missing_file_and_a_folder_are_named_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(RecordingError, match="cannot be read"):
            Recording(path)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_file_with_damage_anywhere_is_a_named_error_or_told_in_part(data: st.DataObject, recorded: Recorded) -> None:
    content = bytearray(recorded.path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path = recorded.path.with_name("damaged.kvrec")
    path.write_bytes(content)
    whole = recorded.events()

    found: list[Event] = []
    with contextlib.suppress(RecordingError), Recording(path) as recording:
        found.extend(item for item in Replay(recording) if isinstance(item, Event))

    assert found == whole[: len(found)]


def snapshot_of(**changes: Any) -> EngineSnapshot:
    values: dict[str, Any] = {
        "seq": 0, "step": 0, "time_ns": 0, "block_size_tokens": 4, "block_bytes": 1, "watermark_blocks": 0,
        "max_queued_requests": 1, "max_queued_tokens": 1, "sequences": [], "requests": [],
        "tiers": [{"tier": "device", "num_blocks": 3, "ref_counts": [0] * 3, "hashes": [None] * 3,
                   "filled_slots": [0] * 3}],
        **changes,
    }  # fmt: skip
    return msgspec.convert(values, EngineSnapshot)


TIER = {"tier": "device", "num_blocks": 3, "ref_counts": [0] * 3, "hashes": [None] * 3, "filled_slots": [0] * 3}


@pytest.mark.parametrize(
    "changes",
    [
        {"tiers": []},
        {"tiers": [TIER | {"tier": "moon"}]},
        {"tiers": [TIER | {"num_blocks": 10**12}]},
        {"tiers": [TIER | {"ref_counts": [2**60] * 3}]},
        {"tiers": [TIER | {"block_groups": [0]}]},
        {"tiers": [TIER | {"block_groups": [0, 99, -1]}]},
        {"groups": [{"group": "left", "num_layers": 1}]},
        {"requests": [{"request": "r", "state": "dancing", "queued_ns": 0}]},
    ],
)
def test_a_state_that_makes_no_sense_is_a_named_error(tmp_path: Path, changes: dict[str, Any]) -> None:
    raw = msgspec.msgpack.encode(snapshot_of(**changes))
    path = write_recording(tmp_path / "x.kvrec", [(FrameKind.STATE, raw, Span())])

    with Recording(path) as recording, pytest.raises(RecordingError, match="makes no sense"):
        ledger_at(recording)


@pytest.mark.parametrize(
    "event",
    [
        ev.BlocksAllocated("r", 0, [99], "prefill"),
        ev.BlocksReleased("r", 0, [-99], "finished"),
        ev.BlocksStored([b"a"], [1, 2], None),
        ev.StepScheduled([], [], 0, 0, [1], []),
        ev.StepScheduled([], [], 0, 0, [99], [1]),
        ev.StepCompleted(0, 0, 0, 0, 0, 0, [], [], 0, 0, 0, 0, 0, 0, {}, seq=7),
    ],
)
def test_an_event_that_makes_no_sense_is_a_named_error(tmp_path: Path, event: Event) -> None:
    event.seq = max(event.seq, 0)
    state = (FrameKind.STATE, msgspec.msgpack.encode(snapshot_of()), Span())
    events = (FrameKind.EVENTS, EventEncoder().encode([event]), Span(0, 1))
    path = write_recording(tmp_path / "x.kvrec", [state, events])

    with Recording(path) as recording:
        with pytest.raises(RecordingError, match="damaged"):
            ledger_at(recording)
        with pytest.raises(RecordingError, match="damaged"):
            list(Replay(recording))


def test_a_later_format_asks_for_a_newer_version(tmp_path: Path) -> None:
    header = msgspec.msgpack.encode({"format": 2, "something": "else"})

    with pytest.raises(RecordingError, match="format 2; this version of kvwatch reads up to 1"):
        Recording(write_recording(tmp_path / "x.kvrec", [], header))


def test_a_header_with_more_in_it_than_this_version_knows_is_read(tmp_path: Path) -> None:
    header = msgspec.to_builtins(HEADERS.make()) | {"mood": "fine"}

    with Recording(write_recording(tmp_path / "x.kvrec", [], msgspec.msgpack.encode(header))) as recording:
        assert recording.header.epoch == "e1"
        assert recording.span is None


def test_an_index_with_more_entries_than_the_file_has_room_for_is_not_even_opened(
    tmp_path: Path, recorded: Recorded
) -> None:
    content = recorded.path.read_bytes()
    offset = int.from_bytes(content[-16:-8], "little")
    entries = msgspec.msgpack.encode([(0, 3, [0] * 6)] * 500_000)
    frame = FramePacker(level=1).pack(FrameKind.INDEX, entries, Span())
    path = tmp_path / "bomb.kvrec"
    path.write_bytes(content[:offset] + frame + content[-16:])
    assert len(frame) < 100_000

    tracemalloc.start()
    try:
        with Recording(path) as recording:
            assert not recording.is_complete
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 2 * 2**20


def test_states_that_do_not_continue_each_other_begin_anew(tmp_path: Path) -> None:
    states = [snapshot_of(seq=seq, step=seq) for seq in (0, 5)]
    frames = [
        (FrameKind.STATE, msgspec.msgpack.encode(state), Span(state.seq, state.seq, state.step, state.step))
        for state in states
    ]

    with Recording(write_recording(tmp_path / "x.kvrec", frames)) as recording:
        assert list(Replay(recording)) == states


@pytest.mark.parametrize("seed", range(20))
def test_an_index_that_lies_is_not_believed(tmp_path: Path, recorded: Recorded, seed: int) -> None:
    """The index is replaced by one with a valid checksum whose entries point anywhere."""
    chance = random.Random(seed)
    content = recorded.path.read_bytes()
    offset = int.from_bytes(content[-16:-8], "little")
    entries = [
        (chance.randrange(-5, len(content)), chance.randrange(0, 7), [0] * 6) for _ in range(chance.randrange(6))
    ]
    packer = FramePacker(level=1)
    frame = packer.pack(FrameKind.INDEX, msgspec.msgpack.encode(sorted(entries)), Span())
    path = tmp_path / "lies.kvrec"
    path.write_bytes(content[:offset] + frame + content[-16:])

    try:
        with Recording(path) as recording:
            found = [item for item in Replay(recording) if isinstance(item, Event)]
    except KVWatchError:
        return
    assert found == recorded.events()
