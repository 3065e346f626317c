"""Events as lines for people and for programs."""

import json
import re

import pytest

from kvwatch.derive.scenario import ScenarioClock, opening_snapshot, play
from kvwatch.stream.contract import Gap, Started
from kvwatch.stream.lines import JsonLines, TextLines
from kvwatch.telemetry import events as ev
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.schema import REGISTRY, Event

STARTED = Started(epoch="e", seq=3, head=9, oldest=0, wall_offset_ns=10**18, labels={"engine": "a"})


def every_event() -> list[Event]:
    clock = ScenarioClock()
    log = EventLog(1024, clock)
    cursor = log.subscribe("test")
    play(log, clock)
    return cursor.read(1024)


def test_every_event_has_a_line_with_time_step_request_and_name() -> None:
    lines = TextLines()
    for event in every_event():
        line = lines.event(event)
        spec = REGISTRY.of(type(event))
        assert re.match(rf"\d\d:\d\d:\d\d\.\d{{3}} step {event.step} +\S+ +{re.escape(spec.name)}\b", line), line
        assert "\n" not in line
        request = getattr(event, "request", "")
        assert f" {request or '-'} " in line or isinstance(
            event, ev.StepScheduled | ev.WaitReasonsChanged | ev.DraftsVerified
        )


def test_durations_have_units_hashes_are_short_and_lists_are_cut() -> None:
    lines = TextLines()
    evicted = ev.BlocksEvicted(
        hashes=[bytes(range(32))], block_ids=list(range(20)), ages_ns=[1_500_000, 90_000_000_000], idles_ns=[0, 999],
        hits=[], reason="pressure", request="r", seq=1, step=2, time_ns=3,
    )  # fmt: skip

    line = lines.event(evicted)

    assert "hashes=[00010203]" in line
    assert "block_ids=[0,1,2,3,4,5,... 20]" in line
    assert "ages=[1.5ms,90s]" in line
    assert "idles=[0s,999ns]" in line
    assert "reason=pressure" in line


def test_a_request_is_named_once_with_the_number_of_its_sequences() -> None:
    scheduled = ev.StepScheduled(["a", "b", "a", "a"], [1, 1, 1, 1], 4, 4, [], [])
    many = ev.WaitReasonsChanged([f"r{number}" for number in range(8)] * 2, ["blocks"] * 16)

    assert " a*3,b " in TextLines().event(scheduled)
    assert " r0*2,r1*2,r2*2,r3*2,r4*2,r5*2,... 8 " in TextLines().event(many)
    assert json.loads(JsonLines().event(scheduled))["requests"] == ["a", "b", "a", "a"], "programs get what there is"


def test_a_time_is_shown_as_one_and_not_as_the_age_of_the_machine() -> None:
    lines = TextLines()
    lines.started(STARTED)
    queued = ev.RequestQueued(
        request="r", prompt_tokens=1, num_sequences=1, queued_ns=5_000_000, seq=1, step=2, time_ns=7_000_000
    )

    line = lines.event(queued)

    assert re.match(r"\d\d:\d\d:\d\d\.007 ", line)
    assert re.search(r" queued=\d\d:\d\d:\d\d\.005\b", line)


def test_what_is_none_is_not_shown_and_what_is_zero_is() -> None:
    event = ev.RequestFinished(
        request="r", reason="abort", prompt_tokens=5, generated_tokens=0, cached_tokens=0, num_preemptions=0,
        peak_blocks=None, queue_ns=None, prefill_ns=None, decode_ns=None, end_to_end_ns=None,
    )  # fmt: skip

    line = TextLines().event(event)

    assert "generated_tokens=0" in line
    assert "peak_blocks" not in line
    assert "image_positions" not in TextLines().event(
        ev.RequestQueued(request="r", prompt_tokens=1, num_sequences=1, queued_ns=0)
    )


@pytest.mark.parametrize("name", ["a\x1b[2Jb", "a\nb", "a\u202eb"])
def test_a_hostile_name_cannot_move_the_cursor(name: str) -> None:
    event = ev.RequestRejected(request=name, reason="invalid")

    for line in (TextLines().event(event), JsonLines().event(event)):
        assert "\x1b" not in line
        assert "\n" not in line
    assert TextLines().event(event).isprintable()


def test_times_of_lines_are_the_engines_wall_clock() -> None:
    lines = JsonLines()
    lines.started(STARTED)

    content = json.loads(lines.event(ev.StepFailed(error="X", time_ns=7, seq=4, step=5)))

    assert content == {
        "kind": "event", "event": "step.failed", "unix_ns": 10**18 + 7, "seq": 4, "step": 5, "time_ns": 7, "error": "X",
        "unwritten_block_ids": [], "filled_slots": [],
    }  # fmt: skip


def test_json_holds_every_field_and_whole_hashes() -> None:
    lines = JsonLines()
    for event in every_event():
        content = json.loads(lines.event(event))
        assert set(content) == {"kind", "event", "unix_ns", *event.__struct_fields__}
        if isinstance(event, ev.BlocksStored):
            assert content["hashes"] == [block_hash.hex() for block_hash in event.hashes]


def test_beginning_gap_and_state_have_lines_too() -> None:
    text, lines = TextLines(), JsonLines()

    assert text.started(STARTED) == "-- epoch e, from event 3 engine=a"
    assert text.gap(Gap(seq=3, num_missed=4)) == "-- 4 events from 3 on were missed"
    assert "state before event 0: device: 0 used, 0 cached, 8 empty blocks" in text.snapshot(opening_snapshot())
    assert json.loads(lines.started(STARTED))["labels"] == {"engine": "a"}
    assert json.loads(lines.gap(Gap(seq=3, num_missed=4))) == {"kind": "gap", "seq": 3, "num_missed": 4}
    snapshot = json.loads(lines.snapshot(opening_snapshot()))
    assert snapshot["tiers"][0]["hashes"] == [None] * 9
    assert snapshot["kind"] == "snapshot"
