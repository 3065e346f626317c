"""Who yields: pure decisions, then in an engine."""

from collections.abc import Iterable

import pytest
from builders import ROOT, FakeClock, Recorder, make_core, make_request, make_settings, run_until_idle

from kvwatch.telemetry.events import RequestPreempted
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.request import GenerationRequest
from kvwatch_engine.contracts.sampling import SamplingParams
from kvwatch_engine.memory.block_hash import HashChain
from kvwatch_engine.scheduling.request import Request
from kvwatch_engine.scheduling.victims import VictimOrder, choose_victims


def request(name: str, arrival: int, *, priority: int = 0, computed: int = 4, preemptions: int = 0) -> Request:
    source = GenerationRequest(
        request_id=name, prompt_token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=9), priority=priority
    )
    made = Request(source, arrival=arrival, queued_ns=arrival, seeds=[0], chain=HashChain(ROOT, 4))
    made.sequences[0].num_computed = computed
    made.num_preemptions = preemptions
    return made


def victims(
    candidates: list[Request], needy: Request, need: int, freed: dict[str, int], **settings: object
) -> list[str]:
    """Choose among requests that each free so many blocks of their own."""

    def freed_by(requests: Iterable[Request]) -> int:
        return sum(freed.get(each.request_id, 1) for each in requests)

    now = int(settings.pop("now_ns", 0))  # type: ignore[call-overload]
    order = VictimOrder(make_settings(**settings), now)
    return [each.request_id for each in choose_victims(candidates, needy, need, order, freed_by)]


def test_the_policies_choose_as_they_are_called() -> None:
    old = request("old", 0, computed=9)
    mid = request("mid", 1, computed=2)
    new = request("new", 2, computed=5)
    for policy, expected in [("newest", "new"), ("least-computed", "mid"), ("lowest-priority", "new")]:
        assert victims([old, mid, new], old, 1, {}, victim_policy=policy) == [expected]


@pytest.mark.parametrize("policy", ["newest", "least-computed", "lowest-priority"])
def test_priorities_come_first_in_every_policy(policy: str) -> None:
    urgent = request("urgent", 5, computed=0)
    patient = request("patient", 0, priority=2, computed=99)
    assert victims([urgent, patient], urgent, 1, {}, victim_policy=policy) == ["patient"]
    assert victims([urgent, patient], patient, 1, {}, victim_policy=policy) == ["patient"], "it yields itself"


def test_age_makes_up_for_priority_but_not_where_the_declared_one_counts() -> None:
    urgent, patient = request("urgent", 5), request("patient", 0, priority=1)
    aged = {"now_ns": 10_000_000_000, "priority_aging_seconds": 5.0}
    assert victims([urgent, patient], patient, 1, {}, victim_policy="newest", **aged) == ["urgent"]
    assert victims([urgent, patient], urgent, 1, {}, victim_policy="lowest-priority", **aged) == ["patient"]


def test_whoever_was_preempted_often_is_protected_but_not_from_higher_priorities() -> None:
    old, new = request("old", 0), request("new", 1, preemptions=3)
    assert victims([old, new], old, 1, {}) == ["old"], "it would now yield before the protected one"
    assert victims([old, new], new, 1, {}) == ["old"]
    patient = request("patient", 2, priority=1, preemptions=9)
    assert victims([old, patient], old, 1, {}) == ["patient"]


def test_nobody_yields_who_frees_nothing_or_is_not_needed() -> None:
    old, mid, new = request("old", 0), request("mid", 1), request("new", 2)
    assert victims([old, mid, new], old, 1, {"new": 0}) == ["mid"]
    assert victims([old, mid, new], old, 5, {"new": 1, "mid": 5}) == ["mid"], "the newest alone is not enough"
    assert victims([old, mid, new], old, 6, {"new": 1, "mid": 5}) == ["new", "mid"]
    assert victims([old, mid, new], mid, 2, {"new": 1, "mid": 3}) == ["mid"], "others would be needed: it yields itself"
    assert victims([old], old, 1, {"old": 0}) == []


def test_no_more_are_preempted_than_one_needs() -> None:
    log = EventLog()
    recorder = Recorder(log)
    core = make_core(log=log, num_blocks=13, max_num_seqs=6, enable_prefix_cache=False)
    for index in range(6):
        core.add(make_request(f"r{index}", [4 + index, 5, 6, 7, 8], max_tokens=12, ignore_eos=True), 0)  # two blocks
    while core.scheduler.num_preemptions == 0:
        core.step()

    preempted = [event for event in recorder.drain() if isinstance(event, RequestPreempted)]
    # Five sequences need a block at once: every two of them live on what one yields.
    assert [event.request for event in preempted] == ["r5", "r4"]
    assert [event.num_blocks for event in preempted] == [2, 2]
    assert {len(tokens) for tokens in run_until_idle(core).values()} <= set(range(1, 13))


@pytest.mark.parametrize("policy", ["newest", "least-computed", "lowest-priority"])
def test_with_every_policy_everybody_ends_and_the_protected_are_left_alone(policy: str) -> None:
    clock = FakeClock()
    log = EventLog(clock=clock)
    recorder = Recorder(log)
    core = make_core(
        log=log, num_blocks=14, max_num_seqs=8, victim_policy=policy, protect_after_preemptions=2, watermark_blocks=0
    )
    for index in range(8):
        core.add(make_request(f"r{index}", [4 + index] * 6, max_tokens=20, ignore_eos=True), clock.monotonic_ns())

    tokens = run_until_idle(core)

    assert all(len(tokens[f"r{index}", 0]) == 20 for index in range(8))
    counts: dict[str, int] = {}
    for event in recorder.drain():
        if isinstance(event, RequestPreempted):
            counts[event.request] = counts.get(event.request, 0) + 1
    assert counts, "the pool is too small for all"
    assert max(counts.values()) <= 4, counts
