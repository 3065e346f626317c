"""Admission is paused for a time, and resumed; single requests are ended."""

import pytest
from live_stage import ASK, live_stage
from openai_server import wait_until

from kvwatch.errors import ChangeRefused
from kvwatch.telemetry.events import AdmissionPaused, AdmissionResumed
from kvwatch_engine.contracts.request import FinishReason


def test_while_admission_is_paused_nobody_starts_and_who_runs_goes_on() -> None:
    with live_stage() as stage:
        stage.submit("runs", [5, 6], max_tokens=30)
        stage.wait_begun(1)
        state = stage.control.pause_admission(3600, **ASK)
        stage.submit("waits", [7, 8])
        wait_until(lambda: ("runs", 0) in stage.reasons, 60)

        assert state.is_paused
        assert state.seconds_left is not None
        assert 3500 < state.seconds_left <= 3600
        assert ("waits", 0) not in stage.tokens
        assert stage.control.resume_admission(**ASK).is_paused is False
        stage.wait_idle()

        told = stage.recorder.drain()
        (paused,) = [event for event in told if isinstance(event, AdmissionPaused)]
        (resumed,) = [event for event in told if isinstance(event, AdmissionResumed)]
        assert (paused.actor, paused.duration_ns) == ("night shift", 3_600_000_000_000)
        assert resumed.actor == "night shift"
        assert resumed.paused_ns > 0


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_pause_ends_by_itself_and_says_so(is_idle: bool) -> None:
    with live_stage() as stage:
        stage.control.pause_admission(0.2, **ASK)
        if not is_idle:
            stage.submit("waits", [7, 8])
        wait_until(lambda: any(isinstance(event, AdmissionResumed) for event in stage.recorder.drain()), 60)

        (resumed,) = [event for event in stage.recorder.events if isinstance(event, AdmissionResumed)]
        assert (resumed.actor, resumed.reason) == ("", "its time is over")
        assert resumed.paused_ns >= 200_000_000
        assert stage.control.admission().is_paused is False
        stage.wait_idle()


@pytest.mark.parametrize("seconds", [0.0, -1.0, 3601.0, float("nan")])
def test_a_pause_has_an_end_within_the_hour(seconds: float) -> None:
    with live_stage() as stage, pytest.raises(ChangeRefused, match="at most 3600 s"):
        stage.control.pause_admission(seconds, **ASK)


def test_a_request_is_ended_and_an_unknown_one_is_said_to_be_so() -> None:
    with live_stage() as stage:
        stage.control.pause_admission(3600, **ASK)  # it is still there when it is to be ended
        stage.submit("long", [5, 6], max_tokens=40)

        assert stage.control.abort_request("long")
        assert stage.reasons["long", 0] is FinishReason.ABORT
        assert stage.control.abort_request("long") is False
        assert stage.control.abort_request("nobody") is False
