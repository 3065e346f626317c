"""Who is served first, who waits for what, and whose time is over."""

from dataclasses import replace
from typing import Any

import pytest
from builders import FakeClock, Recorder, make_core, make_request, make_settings, run_until_idle

from kvwatch.telemetry.events import RequestAdmitted, RequestFinished, RequestQueued, StepCompleted, WaitReasonsChanged
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.errors import RequestInvalid
from kvwatch_engine.contracts.request import FinishReason
from kvwatch_engine.core import EngineCore
from kvwatch_engine.scheduling.limits import check_valid
from kvwatch_engine.scheduling.policy import rank_of


class Stage:
    """One engine with one place to run, so that the order of admission is seen."""

    def __init__(self, **settings: Any) -> None:
        self.clock = FakeClock()
        self.log = EventLog(clock=self.clock)
        self.recorder = Recorder(self.log)
        values: dict[str, Any] = {"max_num_seqs": 1, "enable_prefix_cache": False, **settings}
        self.core: EngineCore = make_core(log=self.log, **values)

    def submit(self, name: str, *, priority: int = 0, deadline: float | None = None, **sampling: object) -> None:
        request = make_request(name, [4, 5], **{"max_tokens": 2, "ignore_eos": True, **sampling})
        self.core.add(replace(request, priority=priority, deadline_seconds=deadline), self.clock.monotonic_ns())

    def admitted(self) -> list[str]:
        return [event.request for event in self.recorder.drain() if isinstance(event, RequestAdmitted)]


def test_priority_comes_first_and_arrival_inside_one() -> None:
    stage = Stage()
    for name, priority in [("c", 2), ("b1", 1), ("a1", 0), ("b2", 1), ("a2", 0)]:
        stage.submit(name, priority=priority)

    run_until_idle(stage.core)

    assert stage.admitted() == ["a1", "a2", "b1", "b2", "c"]
    queued = [e.priority for e in stage.recorder.drain() if isinstance(e, RequestQueued)]
    assert queued == [2, 1, 0, 1, 0]


@pytest.mark.parametrize(("aging_seconds", "place"), [(10.0, 3), (0.0, 20)])
def test_ageing_lets_nobody_starve_and_without_it_somebody_does(aging_seconds: float, place: int) -> None:
    """Every second an urgent request comes; the patient one is worth ten seconds less than they."""
    stage = Stage(priority_aging_seconds=aging_seconds)
    stage.submit("busy", max_tokens=10)
    stage.core.step()
    stage.submit("patient", priority=1)
    for number in range(20):
        stage.clock.advance(4.0)
        stage.submit(f"urgent{number}")

    run_until_idle(stage.core)

    assert stage.admitted().index("patient") == place if place < 20 else stage.admitted()[-1] == "patient"


def test_a_rank_is_that_of_an_urgent_request_that_came_later() -> None:
    second = 1_000_000_000
    assert rank_of(2, 5 * second, 7, 1.5) == (8 * second, 7)
    assert rank_of(0, 5 * second, 7, 1.5) == (5 * second, 7)
    assert rank_of(2, 5 * second, 7, 0.0) == (2, 7)
    assert rank_of(1, 0, 0, 1.0) < rank_of(0, second, 1, 1.0), "of equals the first to arrive"


def test_each_request_waits_for_its_own_reason() -> None:
    stage = Stage(num_blocks=9, max_num_seqs=3)  # eight blocks of four tokens
    stage.core.add(make_request("running", list(range(4, 18)), max_tokens=8, ignore_eos=True), 0)  # takes four
    stage.core.step()
    stage.core.add(make_request("long", list(range(4, 28)), max_tokens=2), 0)  # six: more than are free
    stage.core.add(make_request("many", [4, 5], n=3, max_tokens=2), 0)  # with the running one four sequences
    stage.core.add(make_request("short", [4, 5], max_tokens=2), 0)  # would fit, but for those before it

    stage.core.step()

    reasons = {each.request: each.wait_reason for each in stage.core.snapshot().requests}
    assert reasons == {"running": "", "long": "blocks", "many": "sequences", "short": "blocks"}
    events = stage.recorder.drain()
    told = [e for e in events if isinstance(e, WaitReasonsChanged)]
    assert [(e.requests, e.reasons) for e in told] == [(["long", "many", "short"], ["blocks", "sequences", "blocks"])]
    completed = [e for e in events if isinstance(e, StepCompleted)]
    assert completed[-1].waiting_for == {"blocks": 2, "sequences": 1}
    stage.core.step()
    assert len([e for e in stage.recorder.drain() if isinstance(e, WaitReasonsChanged)]) == 1, "nothing has changed"


def test_while_admission_is_paused_those_who_run_go_on() -> None:
    stage = Stage(max_num_seqs=4)
    stage.submit("first", max_tokens=3)
    stage.core.step()
    stage.core.scheduler.admission.pause.begin(60.0, "test", "")
    stage.submit("second")

    outputs = [stage.core.step() for _ in range(3)]

    assert [output.request_id for step in outputs for output in step] == ["first", "first"]
    assert [(each.request, each.wait_reason) for each in stage.core.snapshot().requests] == [("second", "paused")]
    stage.core.scheduler.admission.pause.end("test", "")
    assert len(run_until_idle(stage.core)["second", 0]) == 2


def test_a_waiting_request_ends_at_its_deadline_and_says_so() -> None:
    stage = Stage()
    stage.submit("running", max_tokens=12)
    stage.submit("hasty", deadline=1.0, n=1)
    stage.core.step()
    stage.clock.advance(0.999)
    assert "hasty" in stage.core.live_request_ids()
    assert [output.request_id for output in stage.core.step()] == ["running"]
    stage.clock.advance(0.001)

    outputs = stage.core.step()

    assert (outputs[0].request_id, outputs[0].finish_reason) == ("hasty", FinishReason.DEADLINE)
    assert "1 seconds" in outputs[0].error
    finished = [e for e in stage.recorder.drain() if isinstance(e, RequestFinished)]
    assert [(e.request, e.reason, e.error) for e in finished] == [("hasty", "deadline", "DeadlineExceeded")]


def test_a_running_request_ends_at_its_deadline_and_frees_its_blocks() -> None:
    stage = Stage(deadline_seconds=60.0)
    stage.submit("slow", max_tokens=30, deadline=5.0)
    stage.core.step()
    stage.clock.advance(5.0)

    outputs = stage.core.step()

    assert [(output.request_id, output.finish_reason) for output in outputs] == [("slow", FinishReason.DEADLINE)]
    assert stage.core.manager.pool.num_used == 0
    assert not stage.core.has_work


def test_the_operators_deadline_cannot_be_prolonged() -> None:
    stage = Stage(deadline_seconds=2.0)
    stage.submit("patient", max_tokens=30, deadline=100.0)
    stage.submit("silent", max_tokens=30)
    stage.core.step()
    stage.clock.advance(2.0)

    outputs = stage.core.step()

    assert {output.request_id for output in outputs} == {"patient", "silent"}
    assert {output.finish_reason for output in outputs} == {FinishReason.DEADLINE}


def test_a_request_that_ended_in_time_is_not_ended_again_even_if_its_name_lives_on() -> None:
    stage = Stage()
    stage.submit("name", deadline=1.0)
    run_until_idle(stage.core)
    stage.submit("name", max_tokens=20)
    stage.clock.advance(2.0)

    outputs = stage.core.step()

    assert [(output.request_id, output.finish_reason) for output in outputs] == [("name", None)]


@pytest.mark.parametrize(
    ("changes", "param"),
    [({"priority": -1}, "priority"), ({"deadline_seconds": 0.0}, "deadline_seconds"),
     ({"deadline_seconds": float("nan")}, "deadline_seconds")],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_by_name(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestInvalid, match=param) as refused:
        check_valid(replace(make_request("r", [4, 5]), **changes), make_settings())
    assert refused.value.param == param


def test_without_reserve_a_request_starts_with_its_first_chunk() -> None:
    for reserve, running in [(True, ["first"]), (False, ["first", "long"])]:
        stage = Stage(num_blocks=11, max_num_seqs=4, max_prefill_chunk=4, reserve_prompt=reserve)
        stage.core.add(make_request("first", list(range(4, 20)), max_tokens=9, ignore_eos=True), 0)
        stage.core.step()
        stage.core.add(make_request("long", list(range(4, 36)), max_tokens=2, ignore_eos=True), 0)

        stage.core.step()

        assert [each.request_id for each in stage.core.scheduler.lifecycle.running] == running
        if not reserve:
            (_, long) = stage.core.scheduler.lifecycle.running
            assert len(stage.core.manager.table(long.sequences[0].owner)) == 1
        tokens = run_until_idle(stage.core)
        assert (len(tokens["long", 0]), len(tokens["first", 0])) == (2, 9)
