"""Adapters in the engine: who may use them, who still does, and which tokens of a step are theirs."""

from dataclasses import replace

import pytest
from builders import LedgerFollower, NullModel, Recorder, make_core, make_request, run_until_idle
from engine_stage import GatedModel, running_engine, wait_for
from hypothesis import given
from hypothesis import strategies as st

from kvwatch.telemetry.events import AdapterFreed, AdapterLoaded, RequestRejected
from kvwatch_engine.contracts.adapter import Adapter, LoadId
from kvwatch_engine.contracts.errors import RequestInvalid
from kvwatch_engine.contracts.step import StepInput

A, B = LoadId("a" * 32), LoadId("b" * 32)


def adapter_of(load_id: LoadId, num_bytes: int = 100) -> Adapter:
    return Adapter(name=f"adapter {load_id[0]}", load_id=load_id, rank=8, num_bytes=num_bytes, fingerprint="f")


def test_only_an_admitted_adapter_can_be_used() -> None:
    with running_engine() as (engine, _, collected, log):
        recorder = Recorder(log)
        request = replace(make_request("r", [4, 5, 6]), load_id=A)
        with pytest.raises(RequestInvalid) as refused:
            engine.submit(request)
        engine.adapters.admit(adapter_of(A))
        engine.submit(request)
        wait_for(lambda: "r" in collected.reasons())

        assert (refused.value.param, refused.value.code) == ("model", "model_not_found")
        assert [event.reason for event in recorder.drain() if isinstance(event, RequestRejected)] == ["invalid"]


def test_a_retired_adapter_is_freed_when_its_last_request_has_ended_and_not_before() -> None:
    ended_when_freed: list[set[str]] = []
    with running_engine() as (engine, model, collected, _):
        engine.adapters.admit(adapter_of(A))
        model.gate.clear()
        for name, max_tokens in (("short", 1), ("long", 6)):
            request = make_request(name, [4, 5, 6], max_tokens=max_tokens, ignore_eos=True)
            engine.submit(replace(request, load_id=A))

        engine.adapters.retire(A, lambda: ended_when_freed.append(set(collected.reasons())))
        with pytest.raises(RequestInvalid):
            engine.submit(replace(make_request("late", [4, 5, 6]), load_id=A))
        assert ended_when_freed == []

        model.gate.set()
        wait_for(lambda: bool(ended_when_freed))
        assert ended_when_freed == [{"short", "long"}]


def test_an_adapter_is_freed_as_well_when_its_waiting_request_is_aborted() -> None:
    freed: list[str] = []
    with running_engine(max_num_seqs=1) as (engine, model, _, _):
        engine.adapters.admit(adapter_of(A))
        model.gate.clear()
        engine.submit(make_request("first", [4, 5, 6], ignore_eos=True))
        engine.submit(replace(make_request("second", [4, 5, 6]), load_id=A))
        engine.adapters.retire(A, lambda: freed.append("a"))
        engine.abort("second")

        model.gate.set()
        wait_for(lambda: freed == ["a"])


def test_an_idle_engine_frees_at_once_and_only_once() -> None:
    freed: list[str] = []
    with running_engine() as (engine, _, _, _):
        engine.adapters.admit(adapter_of(A))
        for _ in range(2):
            engine.adapters.retire(A, lambda: freed.append("a"))
        engine.adapters.retire(B, lambda: freed.append("b"))

        wait_for(lambda: freed == ["a"])
        engine.snapshot()
        assert freed == ["a"]


def test_loading_and_freeing_are_told_with_the_memory_that_all_adapters_take() -> None:
    with running_engine() as (engine, _, _, log):
        follower, recorder = LedgerFollower(log, engine.snapshot), Recorder(log)
        assert "adapters" not in engine.snapshot().memory_bytes
        engine.adapters.admit(adapter_of(A, 100))
        engine.adapters.admit(adapter_of(B, 20))
        wait_for(lambda: engine.snapshot().memory_bytes.get("adapters") == 120)
        engine.adapters.retire(A, lambda: None)
        wait_for(lambda: engine.snapshot().memory_bytes["adapters"] == 20)
        follower.catch_up()
        told = [event for event in recorder.drain() if isinstance(event, AdapterLoaded | AdapterFreed)]

    assert [(event.adapter, event.num_bytes, event.total_bytes) for event in told] == [
        ("adapter a", 100, 100), ("adapter b", 20, 120), ("adapter a", 100, 20),
    ]  # fmt: skip
    assert isinstance(told[2], AdapterFreed)
    assert told[2].in_use_ns >= 0
    assert told[0].load_id == told[2].load_id == A
    assert follower.ledger.memory_bytes == {"adapters": 20}


@given(st.lists(st.tuples(st.sampled_from([None, A, B]), st.integers(1, 9)), min_size=1, max_size=8))
def test_the_tokens_of_an_adapter_lie_side_by_side_and_all_of_them_are_in_its_span(
    asked: list[tuple[LoadId | None, int]],
) -> None:
    """Each request's tokens name it, so that every step tells whose tokens its spans hold."""
    seen: list[StepInput] = []
    model = NullModel(vocab_size=1000)
    model.on_step = seen.append
    core = make_core(model, vocab_size=1000, max_batch_tokens=16, eos_token_ids=(), enable_prefix_cache=False)
    for number, (load_id, length) in enumerate(asked):
        core.add(replace(make_request(str(number), [number] * length, max_tokens=1), load_id=load_id), 0)

    run_until_idle(core)

    for step in seen:
        spans = {token: span.load_id for span in step.adapters for token in range(span.start, span.end)}
        assert [asked[owner][0] for owner in step.token_ids.tolist()] == [spans.get(t) for t in range(step.num_tokens)]
        assert len({span.load_id for span in step.adapters}) == len(step.adapters), "one span for each adapter"


def test_requests_of_different_adapters_share_no_block_and_those_of_one_do() -> None:
    core = make_core(num_blocks=200)
    prompt = list(range(4, 21))

    def hits(load_id: LoadId | None, salt: str = "") -> int:
        core.add(replace(make_request("r", prompt), load_id=load_id, cache_salt=salt), 0)
        return max(output.num_cached_tokens for _ in range(50) for output in core.step())

    keys = [(None, ""), (A, ""), (B, ""), (A, "s"), (None, "s"), (None, A)]
    assert [hits(*key) for key in keys] == [0] * 6
    assert [hits(*key) for key in keys] == [16] * 6


def test_a_step_without_adapters_has_no_spans_and_keeps_its_order() -> None:
    seen: list[StepInput] = []
    model = GatedModel()
    model.on_step = seen.append
    core = make_core(model)
    for number in range(3):
        core.add(make_request(str(number), [10 + number] * 3, max_tokens=1), 0)

    run_until_idle(core)

    assert [step.adapters for step in seen] == [()]
    assert seen[0].token_ids.tolist() == [10] * 3 + [11] * 3 + [12] * 3
