"""What the engine says happened: who asked, what was lost, what was refused, and why something ended."""

from typing import TypeVar

import pytest
from builders import FakeClock, NullModel, Recorder, make_core, make_pool, make_request, run_until_idle

from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.events import (
    BlocksEvicted,
    BlocksReleased,
    BlocksStored,
    OutOfMemory,
    RequestAdmitted,
    RequestFinished,
    RequestPreempted,
    RequestQueued,
    RequestRecovered,
    RequestResumed,
    StepCompleted,
    StepFailed,
)
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.schema import Event
from kvwatch_engine.contracts.block import BlockHash
from kvwatch_engine.contracts.request import FinishReason, GenerationRequest, RequestOrigin
from kvwatch_engine.contracts.sampling import SamplingParams
from kvwatch_engine.contracts.step import StepInput
from kvwatch_engine.memory.block_pool import BlockPool, Owner, StoredRun

E = TypeVar("E", bound=Event)


def of(recorder: Recorder, cls: type[E]) -> list[E]:
    return [event for event in recorder.drain() if isinstance(event, cls)]


def test_a_queued_request_tells_all_that_is_known_from_outside() -> None:
    log = EventLog()
    recorder = Recorder(log)
    core = make_core(log=log)
    origin = RequestOrigin(
        operation="chat", is_stream=True, trace_parent="00-a-b-01", trace_state="x=y", tenant="blue", adapter="sql"
    )
    sampling = SamplingParams(temperature=0.5, top_p=0.9, top_k=7, seed=11, max_tokens=2)
    core.add(GenerationRequest(request_id="r", prompt_token_ids=(4, 5), sampling=sampling, origin=origin), 17)
    run_until_idle(core)

    (queued,) = of(recorder, RequestQueued)
    assert (queued.operation, queued.is_stream, queued.trace_parent, queued.trace_state) == (
        "chat",
        True,
        "00-a-b-01",
        "x=y",
    )
    assert (queued.tenant, queued.adapter, queued.queued_ns) == ("blue", "sql", 17)
    assert (queued.max_tokens, queued.temperature, queued.top_p, queued.top_k, queued.seed) == (2, 0.5, 0.9, 7, 11)
    (finished,) = of(recorder, RequestFinished)
    assert (finished.tenant, finished.lora, finished.error) == ("blue", "sql", "")


@pytest.mark.parametrize("is_asked_for", [False, True])
def test_token_ids_of_stored_blocks_are_told_only_when_asked_for(is_asked_for: bool) -> None:
    log = EventLog()
    recorder = Recorder(log)
    core = make_core(log=log, emit_token_ids=is_asked_for)
    prompt = list(range(10, 19))
    core.add(make_request("r", prompt, max_tokens=9, ignore_eos=True), 0)
    tokens = run_until_idle(core)["r", 0]

    stored = of(recorder, BlocksStored)
    assert [(e.request, e.sequence) for e in stored] == [("r", 0)] * len(stored)
    assert [e.first_index for e in stored] == [0, 2, 3]
    told = [ids for e in stored for ids in e.token_ids or []]
    assert told == ([[*prompt, *tokens][i : i + 4] for i in range(0, 16, 4)] if is_asked_for else [])


def test_a_run_of_stored_blocks_that_is_broken_by_a_known_one_keeps_places_and_tokens_right() -> None:
    log = EventLog()
    recorder = Recorder(log)
    core = make_core(log=log, emit_token_ids=True, max_batch_tokens=64)
    prompt = list(range(10, 23))  # all are prefilled in the same step, so that none finds another's blocks
    for name, first in (("a", prompt), ("b", prompt), ("c", [*prompt[:4], *range(30, 39)])):
        core.add(make_request(name, first, max_tokens=1), 0)
    run_until_idle(core)

    stored = of(recorder, BlocksStored)
    assert [(e.request, e.first_index, len(e.block_ids)) for e in stored] == [("a", 0, 3), ("c", 1, 2)]
    assert stored[1].parent == stored[0].hashes[0]
    assert stored[1].token_ids == [[30, 31, 32, 33], [34, 35, 36, 37]]


def test_a_resumed_request_says_when_it_has_everything_again() -> None:
    clock = FakeClock()
    log = EventLog(clock=clock)
    recorder = Recorder(log)
    model = NullModel()
    core = make_core(model, log, num_blocks=7, max_num_seqs=2, max_prefill_chunk=4, enable_prefix_cache=False)
    model.on_step = lambda _step: clock.advance(1)
    core.add(make_request("old", [4, 5, 6, 7, 8, 9, 10, 11], max_tokens=13, ignore_eos=True), 0)
    core.add(make_request("new", [5, 5, 6, 7, 8, 9, 10, 11], max_tokens=13, ignore_eos=True), 0)
    run_until_idle(core)

    (preempted,), (resumed,) = of(recorder, RequestPreempted), of(recorder, RequestResumed)
    (recovered,) = of(recorder, RequestRecovered)
    num_steps = -(-preempted.tokens_at_risk // 4)  # a chunk of four tokens each second
    assert recovered.request == "new"
    assert recovered.recompute_ns == num_steps * 1_000_000_000
    assert recovered.time_ns - resumed.time_ns == recovered.recompute_ns
    finished = {e.request: e for e in of(recorder, RequestFinished)}
    assert finished["new"].recomputed_tokens == resumed.recompute_tokens == preempted.tokens_at_risk
    assert finished["old"].recomputed_tokens == 0


def test_a_request_that_is_aborted_before_it_has_recovered_never_says_so() -> None:
    log = EventLog()
    recorder = Recorder(log)
    core = make_core(log=log, num_blocks=7, max_num_seqs=2, max_prefill_chunk=2, enable_prefix_cache=False)
    core.add(make_request("old", [4, 5, 6, 7, 8, 9, 10, 11], max_tokens=13, ignore_eos=True), 0)
    core.add(make_request("new", [5, 5, 6, 7, 8, 9, 10, 11], max_tokens=13, ignore_eos=True), 0)
    while not of(recorder, RequestResumed):
        core.step()
    core.abort("new")
    run_until_idle(core)

    assert of(recorder, RequestRecovered) == []


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError("made to fail"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 1 byte"), True),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory"), True),
        (RuntimeError("made to fail"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_a_step_without_memory_is_told_apart_from_any_other_failure(error: Exception, is_memory: bool) -> None:
    log = EventLog()
    recorder = Recorder(log)
    model = NullModel()
    core = make_core(model, log)

    def fail(_step: StepInput) -> None:
        raise error

    model.on_step = fail
    core.add(make_request("r", list(range(4, 11))), 0)
    run_until_idle(core)

    smaller_and_smaller = [(7, 1), (3, 1), (1, 1)] if is_memory else []
    assert [(e.num_tokens, e.num_sequences) for e in of(recorder, OutOfMemory)] == smaller_and_smaller
    assert [e.error for e in of(recorder, StepFailed)] == [type(error).__name__] * (len(smaller_and_smaller) or 1)
    assert [(e.reason, e.error) for e in of(recorder, RequestFinished)] == [("error", type(error).__name__)]
    assert of(recorder, StepCompleted) == [], "a step that failed is no step that took some time"


def test_a_request_that_waits_for_many_steps_is_looked_up_once() -> None:
    """vllm#43736 (O02), Mooncake#1160 (O10), LMCache#1260 (O07): retries and decodes were counted as lookups."""
    log = EventLog()
    recorder = Recorder(log)
    core = make_core(log=log, num_blocks=8)
    core.add(make_request("holds all", list(range(4, 20)), max_tokens=12, ignore_eos=True), 0)
    core.add(make_request("waits", list(range(4, 24)), max_tokens=2, ignore_eos=True), 0)
    run_until_idle(core)

    admitted = {e.request: e for e in of(recorder, RequestAdmitted)}
    assert len(admitted) == len(of(recorder, RequestAdmitted)) == 2
    assert [e.queried_tokens for e in admitted.values()] == [16, 20], "all that was asked for, not what was found"
    assert admitted["waits"].hit_tokens == 16


@pytest.mark.parametrize(("num_tokens", "hit", "lost"), [(3, 0, 3), (8, 4, 4), (9, 8, 1), (11, 8, 3), (12, 8, 4)])
def test_tokens_that_no_block_could_hold_are_told_apart_from_misses(num_tokens: int, hit: int, lost: int) -> None:
    """vllm#54607 (O04): 0 hits were right, but nobody could tell a short prefix from none. vllm-ascend#7965 (O05)."""
    log = EventLog()
    recorder = Recorder(log)
    core = make_core(log=log)
    for name in ("first", "again"):
        core.add(make_request(name, list(range(10, 10 + num_tokens)), max_tokens=1), 0)
        run_until_idle(core)

    again = of(recorder, RequestAdmitted)[1]
    assert (again.queried_tokens, again.hit_tokens, again.granularity_lost_tokens) == (num_tokens, hit, lost)


def test_what_was_evicted_and_then_asked_for_is_regretted_once_and_a_reset_never_is() -> None:
    log = EventLog()
    recorder = Recorder(log)
    core = make_core(log=log, num_blocks=5)
    first, other = list(range(10, 22)), list(range(30, 42))

    def run(name: str, prompt: list[int]) -> RequestAdmitted:
        core.add(make_request(name, prompt, max_tokens=1), 0)
        run_until_idle(core)
        return of(recorder, RequestAdmitted)[-1]

    assert run("first", first).regretted_tokens == 0
    assert run("other", other).regretted_tokens == 0  # evicts two of the first one's three blocks
    again = run("again", first)
    assert (again.hit_tokens, again.regretted_tokens) == (4, 4), "the last block can never hit"
    core.manager.pool.clear_cache()
    assert run("after a reset", other).regretted_tokens == 0


def test_a_prompt_of_which_nothing_is_left_is_regretted_from_its_first_block_on() -> None:
    log = EventLog()
    recorder = Recorder(log)
    core = make_core(log=log, num_blocks=5)
    for name, first_token in (("first", 10), ("other", 30), ("unrelated", 50), ("again", 10)):
        core.add(make_request(name, list(range(first_token, first_token + 12)), max_tokens=1), 0)
        run_until_idle(core)

    admitted = of(recorder, RequestAdmitted)

    assert [(event.hit_tokens, event.regretted_tokens) for event in admitted] == [(0, 0), (0, 0), (0, 0), (0, 8)]


def test_the_memory_of_evictions_is_bounded_by_the_pool() -> None:
    log = EventLog()
    Recorder(log)
    core = make_core(log=log, num_blocks=6)
    for number in range(40):
        core.add(make_request(f"r{number}", [number, *range(10, 21)], max_tokens=1), 0)
        run_until_idle(core)

    assert 6 <= len(core.manager.pool._evicted) < 12


def test_what_was_stored_again_and_evicted_again_is_remembered_from_then_on() -> None:
    log = EventLog()
    Recorder(log)
    pool = make_pool(4, log)  # three blocks; four to eight evictions are remembered

    for number in (1, 2, 3, 4, 1, 5, 6, 7, 8, 9, 10, 11):  # evicts 1, 2, 3, 4, then 1, 5, 6, 7, then 8
        _put(pool, number)

    assert [number for number in range(1, 12) if _would_have_hit(pool, number)] == [1, 5, 6, 7, 8, 9, 10, 11]


def test_what_went_when_the_pool_shrank_is_not_regretted_though_it_was_evicted_once_before() -> None:
    log = EventLog()
    Recorder(log)
    pool = make_pool(4, log)
    for number in (1, 2, 3, 4, 1, 5, 6):  # evicts 1, 2, 3 and 4; then 1 is the next
        _put(pool, number)
    assert pool.find(BlockHash(bytes([1]))) is not None
    plan = pool.plan_resize(3)
    assert plan is not None

    pool.resize(plan)

    assert pool.find(BlockHash(bytes([1]))) is None
    assert [number for number in range(1, 7) if _would_have_hit(pool, number)] == [2, 3, 4, 5, 6]


def _put(pool: BlockPool, number: int) -> None:
    owner = Owner("r", 0)
    blocks = pool.allocate(1, owner, "prefill")
    assert blocks is not None
    pool.store(blocks, [BlockHash(bytes([number]))], None, StoredRun(owner, 0))
    pool.release(blocks, owner, "finished")


def _would_have_hit(pool: BlockPool, number: int) -> bool:
    return pool.would_have_hit(BlockHash(bytes([number])))


def test_evictions_count_the_blocks_that_were_dropped_and_say_for_whom() -> None:
    """sglang#12983 (O13): what was asked for was counted. sglang#39604 (O53): a removal without a reason."""
    log = EventLog()
    recorder = Recorder(log)
    core = make_core(log=log, num_blocks=6)
    core.add(make_request("first", list(range(10, 22)), max_tokens=1), 0)
    run_until_idle(core)
    core.add(make_request("second", list(range(30, 46)), max_tokens=1), 0)  # needs four blocks, two are empty
    run_until_idle(core)
    num_cached = core.manager.pool.num_cached
    core.manager.pool.clear_cache()

    evicted = of(recorder, BlocksEvicted)
    assert [(len(e.hashes), e.reason, e.request) for e in evicted] == [
        (2, "pressure", "second"),
        (num_cached, "reset", ""),
    ]
    assert {e.reason for e in of(recorder, BlocksReleased)} == {"finished"}


@pytest.mark.parametrize("state", ["waiting", "running", "preempted", "resumed"])
def test_an_aborted_request_holds_nothing_whatever_its_state_and_is_counted_once(state: str) -> None:
    """vllm#46283 (O58): aborts in one state never freed their blocks. vllm#55634 (O17), LMCache#4185 (O61)."""
    log = EventLog()
    recorder = Recorder(log)
    core = make_core(log=log, num_blocks=7, max_num_seqs=2, max_prefill_chunk=2, enable_prefix_cache=False)
    core.add(make_request("old", [4, 5, 6, 7, 8, 9, 10, 11], max_tokens=13, ignore_eos=True), 0)
    core.add(make_request("new", [5, 5, 6, 7, 8, 9, 10, 11], max_tokens=13, ignore_eos=True), 0)
    reached: dict[str, type[Event]] = {
        "running": RequestAdmitted,
        "preempted": RequestPreempted,
        "resumed": RequestResumed,
    }
    while state in reached and not any(getattr(e, "request", "") == "new" for e in of(recorder, reached[state])):
        core.step()
    outputs = core.abort("new") + core.abort("new") + core.abort("never heard of")

    assert [(o.request_id, o.finish_reason) for o in outputs] == [("new", FinishReason.ABORT)]
    assert all(owner.request != "new" for owner in core.manager.owners())
    run_until_idle(core)
    assert sorted((e.request, e.reason) for e in of(recorder, RequestFinished)) == [("new", "abort"), ("old", "length")]
    assert core.manager.pool.num_used == 0


def test_a_preemption_names_the_victim_what_it_may_lose_and_in_whose_favour() -> None:
    """vllm#44772, #49984 (O64): preemptions that only a counter told."""
    log = EventLog()
    recorder = Recorder(log)
    core = make_core(log=log, num_blocks=7, max_num_seqs=2, enable_prefix_cache=False)
    core.add(make_request("old", [4, 5, 6, 7, 8, 9, 10, 11], max_tokens=13, ignore_eos=True), 0)
    core.add(make_request("new", [5, 5, 6, 7, 8, 9, 10, 11], max_tokens=13, ignore_eos=True), 0)
    while not (preempted := of(recorder, RequestPreempted)):
        held = len(core.manager.table(core.scheduler.lifecycle.running[-1].sequences[0].owner)) if core.num_steps else 0
        computed = core.scheduler.lifecycle.running[-1].sequences[0].num_computed if core.num_steps else 0
        core.step()

    (event,) = preempted
    assert (event.request, event.beneficiary, event.num_blocks, event.tokens_at_risk) == ("new", "old", held, computed)


def test_each_of_several_sequences_tells_why_it_ended_and_one_alone_has_told_it() -> None:
    prompt, sampling = (4, 5, 6), {"max_tokens": 12, "seed": 3}
    core = make_core()
    core.add(make_request("r", prompt, n=2, **sampling), 0)
    first, second = (tokens for _, tokens in sorted(run_until_idle(core).items()))
    own = next(token for token in first[:-1] if token not in second)
    log = EventLog()
    recorder = Recorder(log)
    core = make_core(log=log)

    core.add(make_request("two", prompt, n=2, stop_token_ids=(own,), **sampling), 0)
    core.add(make_request("one", prompt, stop_token_ids=(own,), **sampling), 0)
    run_until_idle(core)

    told = {event.request: (event.reason, event.reasons) for event in of(recorder, RequestFinished)}
    assert told == {"two": ("length", ["stop", "length"]), "one": ("stop", [])}


def test_names_of_kinds_of_time_do_not_stay_at_their_last_value() -> None:
    """sglang#4244 (O20), sglang#5625 (O14): rates and ratios as gauges keep what they last saw, or fall to 0."""
    gauges = {metric.name for metric in m.CATALOGUE if metric.kind == "gauge"}

    assert not [name for name in gauges if "throughput" in name or "hit_rate" in name or "hit_ratio" in name]
