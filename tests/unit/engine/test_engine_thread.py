"""The engine on its thread: bounded queue, aborts, drain, stop, liveness."""

import threading
import time

import pytest
from builders import NullModel, Recorder, make_request, make_settings
from engine_stage import Collected, running_engine, wait_for

from kvwatch.errors import ControlError
from kvwatch.ledger.ledger import Ledger
from kvwatch.telemetry.events import DrainStarted, EngineEnded, EngineStalled, RequestFinished, RequestRejected
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.errors import EngineOverloaded, RequestInvalid
from kvwatch_engine.contracts.request import FinishReason
from kvwatch_engine.engine import Engine


def test_a_request_is_answered_and_the_engine_is_idle_again() -> None:
    with running_engine() as (engine, model, collected, _):
        engine.submit(make_request("r", [4, 5, 6], max_tokens=5, ignore_eos=True))
        wait_for(lambda: "r" in collected.reasons())

        tokens = [token for output in collected.outputs for token in output.token_ids]
        assert tokens == [model.next_token([4, 5, 6], 0, position) for position in range(5)]
        wait_for(lambda: engine.num_live_requests == 0)
        assert sum(engine.snapshot().tiers[0].ref_counts) == 0


def test_a_full_queue_refuses_by_requests_and_by_tokens() -> None:
    """vllm#2901, #18826: an unbounded queue lets every request time out."""
    with running_engine(max_num_seqs=1, max_queued_requests=2, max_queued_tokens=20) as (engine, model, _, log):
        recorder = Recorder(log)
        model.gate.clear()
        engine.submit(make_request("running", [4]))
        wait_for(lambda: len(engine._core.scheduler.lifecycle.running) == 1)
        engine.submit(make_request("waiting", [4] * 10))

        with pytest.raises(EngineOverloaded, match=r"20 prompt tokens") as by_tokens:
            engine.submit(make_request("too many tokens", [4] * 11))
        engine.submit(make_request("waiting too", [4]))
        with pytest.raises(EngineOverloaded, match=r"limit 2 requests"):
            engine.submit(make_request("one too many", [4]))

        assert by_tokens.value.reason == "queue_full"
        assert by_tokens.value.retry_after_seconds >= 1
        model.gate.set()
        wait_for(lambda: engine.num_live_requests == 0)
        rejected = [(e.request, e.reason) for e in recorder.drain() if isinstance(e, RequestRejected)]
        assert rejected == [("too many tokens", "queue_full"), ("one too many", "queue_full")]


@pytest.mark.parametrize(
    ("prompt", "sampling", "words"),
    [
        ([], {}, "empty"),
        ([50], {}, r"token id 50 .* \(0 to 49\)"),
        ([-1], {}, r"token id -1"),
        ([4] * 60, {"max_tokens": 5}, "65 tokens together"),
        ([4] * 64, {"max_tokens": 1}, "longest possible sequence has 64"),
        ([4], {"max_tokens": 0}, "at least 1"),
        ([4], {"n": 9}, "1 to 8 sequences"),
        ([4], {"n": 0}, "1 to 8 sequences"),
        ([4] * 30, {"n": 8, "max_tokens": 30}, "may need 71 blocks, but the pool has 40"),
    ],
)
def test_what_can_never_run_is_refused_at_once(prompt: list[int], sampling: dict[str, object], words: str) -> None:
    with running_engine() as (engine, _, _, _), pytest.raises(RequestInvalid, match=words):
        engine.submit(make_request("r", prompt, **sampling))


@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize("num_prompt_tokens", [1, 4, 5, 30])
def test_the_largest_max_tokens_runs_and_one_more_is_refused(num_prompt_tokens: int, n: int) -> None:
    with running_engine(num_blocks=20, eos_token_ids=()) as (engine, _, collected, _):
        largest = engine.max_new_tokens(num_prompt_tokens, n)
        prompt = [4] * num_prompt_tokens

        with pytest.raises(RequestInvalid):
            engine.submit(make_request("too long", prompt, n=n, max_tokens=largest + 1))
        if largest >= 1:
            engine.submit(make_request("fits", prompt, n=n, max_tokens=largest))
            wait_for(lambda: len([o for o in collected.outputs if o.finish_reason]) == n)
            assert {o.finish_reason for o in collected.outputs if o.finish_reason} == {FinishReason.LENGTH}


def test_a_prompt_that_the_queue_can_never_take_is_invalid_and_not_told_to_come_back() -> None:
    with running_engine(max_queued_tokens=10) as (engine, _, _, _):
        with pytest.raises(RequestInvalid, match="the queue takes 10"):
            engine.submit(make_request("r", [4] * 11))
        engine.submit(make_request("fits", [4] * 10))


def test_an_id_in_use_is_refused() -> None:
    with running_engine() as (engine, model, _, _):
        model.gate.clear()
        engine.submit(make_request("r", [4]))
        with pytest.raises(RequestInvalid, match="in use"):
            engine.submit(make_request("r", [4]))


def test_aborts_free_blocks_in_every_state_and_unknown_ids_are_ignored() -> None:
    with running_engine(max_num_seqs=1) as (engine, model, collected, _):
        model.gate.clear()
        engine.submit(make_request("running", [4] * 20, max_tokens=40, ignore_eos=True))
        wait_for(lambda: engine.num_live_requests == 1)
        engine.submit(make_request("waiting", [4] * 20))
        for request_id in ("running", "waiting", "running", "never heard of"):
            engine.abort(request_id)
        model.gate.set()

        wait_for(lambda: engine.num_live_requests == 0)

        assert collected.reasons() == {"running": FinishReason.ABORT, "waiting": FinishReason.ABORT}
        engine.check_integrity()
        assert sum(engine.snapshot().tiers[0].ref_counts) == 0


def test_a_draining_engine_finishes_what_it_has_and_takes_no_more() -> None:
    with running_engine() as (engine, model, collected, log):
        recorder = Recorder(log)
        model.gate.clear()
        engine.submit(make_request("r", [4], max_tokens=3, ignore_eos=True))
        engine.begin_drain(7.0)
        engine.begin_drain(7.0)

        with pytest.raises(EngineOverloaded) as refused:
            engine.submit(make_request("late", [4]))
        assert refused.value.reason == "draining"
        assert not engine.is_ready()
        model.gate.set()
        wait_for(lambda: collected.reasons() == {"r": FinishReason.LENGTH})
        assert engine.is_alive()
        assert [e.grace_ns for e in recorder.drain() if isinstance(e, DrainStarted)] == [7_000_000_000]


def test_stopping_tells_every_caller_and_is_safe_twice() -> None:
    with running_engine(max_num_seqs=2) as (engine, model, collected, _):
        model.gate.clear()
        engine.submit(make_request("a", [4], n=2, max_tokens=30, ignore_eos=True))
        engine.submit(make_request("b", [4]))
        stopper = threading.Thread(target=engine.stop)
        stopper.start()
        time.sleep(0.05)
        model.gate.set()
        stopper.join(5)
        engine.stop()

        ended = sorted((o.request_id, o.sequence) for o in collected.outputs if o.finish_reason is FinishReason.ABORT)
        assert ended == [("a", 0), ("a", 1), ("b", 0)]
        assert not engine.is_alive()
        with pytest.raises(ControlError, match="stopped"):
            engine.snapshot()


def test_a_stuck_step_makes_the_engine_count_as_dead_until_it_goes_on() -> None:
    """vllm#45414: Running 0, Waiting N, and /health said 200."""
    with running_engine(stall_seconds=0.05) as (engine, model, _, _):
        assert engine.is_alive()
        model.gate.clear()
        engine.submit(make_request("r", [4], max_tokens=2, ignore_eos=True))

        wait_for(lambda: not engine.is_alive())

        assert not engine.is_ready()
        with pytest.raises(ControlError, match="did not answer"):
            engine.snapshot(timeout_seconds=0.05)
        model.gate.set()
        wait_for(engine.is_alive)


def test_a_defect_in_the_engine_ends_all_requests_instead_of_hanging_them() -> None:
    with running_engine() as (engine, model, collected, _):
        model.gate.clear()
        engine.submit(make_request("r", [4] * 5, max_tokens=30, ignore_eos=True))
        wait_for(lambda: engine.num_live_requests == 1)
        engine._core.manager.prepare_write = None  # type: ignore[method-assign, assignment]
        model.gate.set()

        wait_for(lambda: collected.reasons() == {"r": FinishReason.ERROR})

        assert not engine.is_alive()
        with pytest.raises(EngineOverloaded):
            engine.submit(make_request("late", [4]))


def test_a_stall_is_told_while_it_lasts_once_and_is_over_with_the_step() -> None:
    """vllm#45414: nothing moved, and no metric said so."""
    with running_engine(stall_seconds=0.05) as (engine, model, _, log):
        ledger = Ledger()
        ledger.load(engine.snapshot())
        recorder = Recorder(log)
        model.gate.clear()
        engine.submit(make_request("r", [4], max_tokens=2, ignore_eos=True))
        wait_for(lambda: any(isinstance(e, EngineStalled) for e in recorder.drain()))
        time.sleep(0.1)

        (stalled,) = [e for e in recorder.drain() if isinstance(e, EngineStalled)]
        assert stalled.stuck_ns >= 50_000_000
        assert (stalled.num_running, stalled.num_waiting) == (1, 0)
        states: list[str] = []
        for event in list(recorder.events):
            ledger.apply(event)
        states.append(ledger.engine_state)
        num_applied = len(recorder.events)
        model.gate.set()
        wait_for(lambda: engine.num_live_requests == 0)
        for event in recorder.drain()[num_applied:]:
            ledger.apply(event)
        states.append(ledger.engine_state)
        assert states == ["stalled", "running"]
        assert [e.seq for e in recorder.events] == list(range(recorder.events[0].seq, log.head))


def test_an_idle_engine_never_counts_as_stalled() -> None:
    with running_engine(stall_seconds=0.02) as (engine, _, _, log):
        recorder = Recorder(log)
        time.sleep(0.15)

        assert engine.is_alive()
        assert [e for e in recorder.drain() if isinstance(e, EngineStalled)] == []


def test_the_last_event_says_whether_the_engine_was_stopped_or_has_failed() -> None:
    with running_engine() as (engine, model, _, log):
        recorder = Recorder(log)
        model.gate.clear()
        engine.submit(make_request("r", [4] * 5, max_tokens=30, ignore_eos=True))
        wait_for(lambda: engine.num_live_requests == 1)
        engine._core.manager.prepare_write = None  # type: ignore[method-assign, assignment]
        model.gate.set()
        wait_for(lambda: any(isinstance(e, EngineEnded) for e in recorder.drain()))
        failed = recorder.events
    with running_engine() as (engine, _, _, log):
        recorder = Recorder(log)
        engine.stop()
        stopped = recorder.drain()

    assert isinstance(failed[-1], EngineEnded)
    assert failed[-1].reason == "failed"
    assert [(e.reason, e.error) for e in failed if isinstance(e, RequestFinished)] == [("error", "EngineFailed")]
    assert [e.reason for e in stopped if isinstance(e, EngineEnded)] == ["stopped"]


def test_every_refusal_is_counted_under_its_reason() -> None:
    with running_engine(max_queued_tokens=10) as (engine, model, _, log):
        recorder = Recorder(log)
        model.gate.clear()
        engine.submit(make_request("live", [4] * 9))
        for request in (
            make_request("live", [4]),
            make_request("empty", []),
            make_request("long", [4] * 10, max_tokens=60),
            make_request("longer than the queue", [4] * 11),
        ):
            with pytest.raises(RequestInvalid):
                engine.submit(request)
        wait_for(lambda: len(engine._core.scheduler.lifecycle.running) == 1)
        engine.submit(make_request("waits", [4] * 9))
        with pytest.raises(EngineOverloaded):
            engine.submit(make_request("one too many", [4] * 9))
        engine.begin_drain(1.0)
        with pytest.raises(EngineOverloaded):
            engine.submit(make_request("late", [4]))
        model.gate.set()
        wait_for(lambda: engine.num_live_requests == 0)

        rejected = {e.request: e.reason for e in recorder.drain() if isinstance(e, RequestRejected)}
        assert rejected == {
            "live": "invalid",
            "empty": "invalid",
            "long": "too_long",
            "longer than the queue": "too_long",
            "one too many": "queue_full",
            "late": "draining",
        }


def test_the_snapshot_tells_state_settings_and_memory() -> None:
    config = make_settings(max_num_seqs=5)
    model = NullModel()
    model.block_size = config.block_size
    engine = Engine(config, model, EventLog(), Collected(), block_bytes=8, memory_bytes={"weights": 3, "kv": 328})
    engine.start()
    try:
        before = engine.snapshot()
        engine.begin_drain(1.0)
        after = engine.snapshot()
    finally:
        engine.stop()

    assert (before.engine_state, after.engine_state) == ("running", "draining")
    assert before.config["max_num_seqs"] == 5
    assert "max_prefill_chunk" not in before.config
    assert before.memory_bytes == {"weights": 3, "kv": 328}


def test_an_engine_that_was_paused_is_not_stuck_however_long_requests_wait() -> None:
    with running_engine(stall_seconds=1.0) as (engine, _, collected, log):
        recorder = Recorder(log)
        admission = engine._core.scheduler.admission
        admission.pause.begin(60.0, "test", "")
        engine.submit(make_request("r", [4], max_tokens=2, ignore_eos=True))
        wait_for(lambda: admission.waiting_for == {"paused": 1})

        time.sleep(2.5)
        assert engine.is_alive()
        assert not collected.outputs
        admission.pause.end("test", "")
        wait_for(lambda: "r" in collected.reasons())

        assert not any(isinstance(event, EngineStalled) for event in recorder.drain())


def test_requests_for_which_nothing_can_be_done_are_a_stall_too() -> None:
    """vllm#45414: Running 0, Waiting 5, and every metric looked as on an idle engine."""
    with running_engine(stall_seconds=0.05) as (engine, _, _, log):
        recorder = Recorder(log)
        schedule = engine._core.scheduler.schedule
        engine._core.scheduler.schedule = lambda _step: None  # type: ignore[method-assign, assignment]
        engine.submit(make_request("r", [4], max_tokens=2, ignore_eos=True))

        wait_for(lambda: any(isinstance(e, EngineStalled) for e in recorder.drain()))

        (stalled,) = [e for e in recorder.events if isinstance(e, EngineStalled)]
        assert (stalled.num_running, stalled.num_waiting) == (0, 1)
        engine._core.scheduler.schedule = schedule  # type: ignore[method-assign]
        wait_for(lambda: engine.num_live_requests == 0)
