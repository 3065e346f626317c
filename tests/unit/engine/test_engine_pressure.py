"""A pool that is too small: who waits, who yields, and what is counted as a hit."""

from typing import Any

import pytest
from builders import FakeClock, NullModel, Recorder, make_core, make_request, run_until_idle

from kvwatch.telemetry.events import (
    AllocationFailed,
    BlocksEvicted,
    RequestAdmitted,
    RequestFinished,
    RequestPreempted,
    RequestResumed,
    StepCompleted,
    StepScheduled,
)
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.scheduling.policy import worst_case_blocks


def expected(prompt: list[int], count: int) -> list[int]:
    return [NullModel().next_token(prompt, 0, position) for position in range(count)]


@pytest.mark.parametrize("enable_prefix_cache", [True, False])
def test_preempted_requests_continue_token_for_token_and_their_hits_are_counted_apart(
    enable_prefix_cache: bool,
) -> None:
    """vllm#25780: random prompts showed 32 % hits, since preempted requests hit their own blocks again."""
    log = EventLog()
    recorder = Recorder(log)
    core = make_core(log=log, num_blocks=11, max_num_seqs=4, enable_prefix_cache=enable_prefix_cache)
    prompts = {f"r{i}": [10 + i, 20 + i, 30 + i, 40 + i, 5] for i in range(4)}

    for request_id, prompt in prompts.items():
        core.add(make_request(request_id, prompt, max_tokens=16, ignore_eos=True), 0)
    tokens = run_until_idle(core)

    assert tokens == {(request_id, 0): expected(prompt, 16) for request_id, prompt in prompts.items()}
    events = recorder.drain()
    preempted = [e for e in events if isinstance(e, RequestPreempted)]
    resumed = [e for e in events if isinstance(e, RequestResumed)]
    assert preempted
    assert len(resumed) == len(preempted)
    admitted = [e for e in events if isinstance(e, RequestAdmitted)]
    assert [e.request for e in admitted] == list(prompts), "a lookup is counted once for each request"
    assert sum(e.hit_tokens for e in admitted) == 0
    if not enable_prefix_cache:
        assert sum(e.hit_tokens for e in resumed) == 0
    completed = [e for e in events if isinstance(e, StepCompleted)]
    recomputed = sum(e.recomputed_tokens for e in completed)
    assert recomputed == sum(e.recompute_tokens for e in resumed)
    computed = sum(sum(e.num_tokens) for e in events if isinstance(e, StepScheduled))
    assert computed == sum(len(prompt) + 15 for prompt in prompts.values()) + recomputed
    finished = {e.request: e for e in events if isinstance(e, RequestFinished)}
    assert sum(e.num_preemptions for e in finished.values()) == len(preempted)
    assert all(e.reason == "length" for e in finished.values())


def test_a_resumed_request_computes_again_only_what_it_does_not_find() -> None:
    log = EventLog()
    recorder = Recorder(log)
    core = make_core(log=log, num_blocks=9, max_num_seqs=2)
    core.add(make_request("old", [4, 5, 6, 7, 8, 9, 10, 11], max_tokens=13, ignore_eos=True), 0)
    core.add(make_request("new", [5, 5, 6, 7, 8, 9, 10, 11], max_tokens=18, ignore_eos=True), 0)
    core.add(make_request("next", [6, 5, 6, 7, 8, 9, 10, 11], max_tokens=2, ignore_eos=True), 0)

    run_until_idle(core)

    events = recorder.drain()
    preempted = [e for e in events if isinstance(e, RequestPreempted)]
    resumed = [e for e in events if isinstance(e, RequestResumed)]
    assert [e.request for e in preempted] == [e.request for e in resumed] == ["new"]
    assert resumed[0].hit_tokens > 0
    admitted = [e for e in events if isinstance(e, RequestAdmitted)]
    assert [(e.request, e.hit_tokens) for e in admitted] == [("old", 0), ("new", 0), ("next", 0)]
    assert resumed[0].recompute_tokens == preempted[0].tokens_at_risk - resumed[0].hit_tokens
    assert sum(e.recomputed_tokens for e in events if isinstance(e, StepCompleted)) == resumed[0].recompute_tokens


def test_evictions_tell_ages_idle_times_and_hits_by_the_clock() -> None:
    clock = FakeClock()
    log = EventLog(clock=clock)
    recorder = Recorder(log)
    core = make_core(log=log, num_blocks=4)  # three usable blocks of four tokens
    prompt = list(range(10, 15))
    for request_id in ("first", "again"):  # the second one hits the first block
        core.add(make_request(request_id, prompt, max_tokens=1), 0)
        run_until_idle(core)
        clock.advance(10)

    core.add(make_request("other", list(range(30, 42)), max_tokens=1), 0)
    run_until_idle(core)

    evicted = [e for e in recorder.drain() if isinstance(e, BlocksEvicted)]
    assert [(e.ages_ns, e.idles_ns, e.hits) for e in evicted] == [([20_000_000_000], [10_000_000_000], [1])]


def test_the_newest_request_yields_and_says_in_whose_favour() -> None:
    log = EventLog()
    recorder = Recorder(log)
    core = make_core(log=log, num_blocks=7, max_num_seqs=2, enable_prefix_cache=False)
    core.add(make_request("old", [4, 5, 6, 7, 8, 9, 10, 11], max_tokens=13, ignore_eos=True), 0)
    core.add(make_request("new", [5, 5, 6, 7, 8, 9, 10, 11], max_tokens=13, ignore_eos=True), 0)

    run_until_idle(core)

    preempted = [e for e in recorder.drain() if isinstance(e, RequestPreempted)]
    assert [(e.request, e.beneficiary) for e in preempted] == [("new", "old")]
    assert preempted[0].num_blocks == 3


def test_the_watermark_keeps_blocks_for_running_requests_but_not_from_an_idle_engine() -> None:
    log = EventLog()
    recorder = Recorder(log)
    core = make_core(log=log, num_blocks=9, watermark_blocks=6, enable_prefix_cache=False)
    core.add(make_request("first", list(range(4, 20)), max_tokens=2, ignore_eos=True), 0)  # 4 of 8 blocks
    core.add(make_request("second", [4, 5], max_tokens=2, ignore_eos=True), 0)

    core.step()

    lifecycle = core.scheduler.lifecycle
    assert [request.request_id for request in lifecycle.running] == ["first"]
    assert [(request.request_id, request.wait_reason) for request in lifecycle.waiting] == [("second", "blocks")]
    failed = [e for e in recorder.drain() if isinstance(e, AllocationFailed)]
    assert [(e.request, e.needed, e.available, e.reason) for e in failed] == [("second", 1, 0, "admission")]
    run_until_idle(core)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"max_num_seqs": 1}, "sequences"), ({"max_num_seqs": 4, "max_batch_tokens": 4}, "tokens")],
)
def test_waiting_requests_say_what_they_wait_for(settings: dict[str, Any], reason: str) -> None:
    log = EventLog()
    recorder = Recorder(log)
    core = make_core(log=log, **settings)
    core.add(make_request("first", list(range(4, 20))), 0)
    core.add(make_request("second", [4, 5]), 0)

    core.step()

    completed = [e for e in recorder.drain() if isinstance(e, StepCompleted)]
    assert completed[-1].waiting_for == {reason: 1}
    assert (completed[-1].num_running, completed[-1].num_waiting) == (1, 1)


def test_blocks_are_evicted_only_on_demand_oldest_first_and_the_tail_before_the_head() -> None:
    log = EventLog()
    recorder = Recorder(log)
    core = make_core(log=log, num_blocks=6)  # five usable blocks of four tokens
    core.add(make_request("first", list(range(10, 22)), max_tokens=1), 0)  # three full blocks
    run_until_idle(core)
    pool = core.manager.pool
    assert (pool.num_cached, pool.num_empty) == (3, 2)

    core.add(make_request("second", list(range(30, 46)), max_tokens=1), 0)  # four blocks: two are evicted
    run_until_idle(core)

    evicted = [e for e in recorder.drain() if isinstance(e, BlocksEvicted)]
    assert [(len(e.block_ids), e.reason, e.request) for e in evicted] == [(2, "pressure", "second")]
    assert evicted[0].hits == [0, 0]
    core.add(make_request("third", list(range(10, 22)), max_tokens=1), 0)
    core.step()
    admitted = [e for e in recorder.drain() if isinstance(e, RequestAdmitted)]
    assert admitted[-1].hit_tokens == 4, "the head of the chain outlived its tail"


def test_a_step_that_fails_ends_its_requests_and_leaves_the_engine_whole() -> None:
    model = NullModel()
    core = make_core(model)

    def fail(_step: object) -> None:
        raise RuntimeError("made to fail")

    model.on_step = fail
    core.add(make_request("r", list(range(4, 20))), 0)

    outputs = core.step()

    assert [(o.request_id, o.finish_reason) for o in outputs] == [("r", "error")]
    assert outputs[0].error
    assert core.manager.pool.num_used == 0
    core.check_integrity()
    assert not core.has_work


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "n", "expected_blocks"),
    [(4, 1, 1, 1), (4, 2, 1, 2), (5, 1, 3, 1 + 3), (8, 9, 2, 2 + 2 * 2), (1, 4, 4, 4)],
)
def test_the_worst_case_is_what_a_request_really_holds(
    prompt: int, max_tokens: int, n: int, expected_blocks: int
) -> None:
    assert worst_case_blocks(prompt, max_tokens, n, 4) == expected_blocks
    log = EventLog()
    recorder = Recorder(log)
    core = make_core(log=log, num_blocks=expected_blocks + 1)  # exactly enough: it must run without preemption

    core.add(make_request("r", list(range(4, 4 + prompt)), n=n, max_tokens=max_tokens, ignore_eos=True), 0)
    run_until_idle(core)

    events = recorder.drain()
    assert not [e for e in events if isinstance(e, RequestPreempted)]
    peaks = [e.peak_blocks for e in events if isinstance(e, RequestFinished)]
    if max_tokens > 1:  # with one token the sequences end before they would write
        assert peaks == [expected_blocks]
