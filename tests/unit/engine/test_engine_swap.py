"""Preemption by swap: requests go on where they were, whatever their transfers do."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any, TypeVar

import pytest
from builders import LedgerFollower, NullModel, Recorder, make_core, make_request, make_settings, run_until_idle
from dict_tiers import DictTiers

from kvwatch.telemetry.events import (
    RequestAdmitted,
    RequestPreempted,
    RequestResumed,
    StepCompleted,
    SwapAbandoned,
)
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.schema import Event
from kvwatch_engine.contracts.request import FinishReason, SequenceOutput
from kvwatch_engine.contracts.step import StepInput, StepResult
from kvwatch_engine.contracts.tiers import TransferKind
from kvwatch_engine.core import EngineCore
from kvwatch_engine.engine import Engine
from kvwatch_engine.memory.block_manager import BlockManager
from kvwatch_engine.scheduling.cost_model import CostModel
from kvwatch_engine.scheduling.request import RequestState

E = TypeVar("E", bound=Event)


class TimedModel(NullModel):
    """A null model whose steps take a microsecond a token."""

    num_computed = 0

    def execute(self, step: StepInput) -> StepResult:
        self.num_computed += step.num_tokens
        result = super().execute(step)
        return replace(result, forward_ns=1000 * step.num_tokens)


class Stage:
    """A core with tiers over dictionaries, in which two requests do not fit."""

    def __init__(self, *, tiers: dict[str, Any] | None = None, **settings: Any) -> None:
        self.log = EventLog()
        self.recorder = Recorder(self.log)
        self.model = TimedModel()
        values: dict[str, Any] = {"num_blocks": 7, "max_num_seqs": 4, "enable_prefix_cache": False, **settings}
        self.core: EngineCore = make_core(
            self.model,
            self.log,
            make_tiers=lambda manager: DictTiers(manager, self.log, self.model, Random(0), **(tiers or {})),
            preemption_mode=values.pop("preemption_mode", "swap"),
            **values,
        )
        tiers_made = self.core.tiers
        assert isinstance(tiers_made, DictTiers)
        self.tiers = tiers_made
        self.ledger = LedgerFollower(self.log, self.core.snapshot)

    def submit_two(self, max_tokens: int = 13) -> None:
        for name, first in (("old", 4), ("new", 5)):
            prompt = [first, 5, 6, 7, 8, 9, 10, 11]
            self.core.add(make_request(name, prompt, max_tokens=max_tokens, ignore_eos=True), 0)

    def step_until_preempted(self) -> None:
        while self.core.scheduler.num_preemptions == 0:
            self.core.step()

    def of(self, cls: type[E]) -> list[E]:
        return [event for event in self.recorder.drain() if isinstance(event, cls)]


def expected(first: int, count: int) -> list[int]:
    return [NullModel().next_token([first, 5, 6, 7, 8, 9, 10, 11], 0, position) for position in range(count)]


def test_a_swapped_request_goes_on_where_it_was_and_computes_nothing_again() -> None:
    stage = Stage()
    stage.submit_two()

    tokens = run_until_idle(stage.core)

    assert tokens == {("old", 0): expected(4, 13), ("new", 0): expected(5, 13)}
    preempted, resumed = stage.of(RequestPreempted), stage.of(RequestResumed)
    assert [(e.request, e.mode, e.reason, e.beneficiary) for e in preempted] == [("new", "swap", "blocks", "old")]
    assert [(e.request, e.mode, e.hit_tokens, e.recompute_tokens) for e in resumed] == [("new", "swap", 0, 0)]
    assert stage.model.num_computed == 2 * (8 + 12)
    assert sum(e.recomputed_tokens for e in stage.of(StepCompleted)) == 0
    assert stage.tiers.num_done == {TransferKind.SWAP_OUT: 1, TransferKind.SWAP_IN: 1, TransferKind.RESTORE: 0}
    stage.ledger.catch_up()


def test_while_blocks_are_on_their_way_out_whoever_needs_them_waits_and_nobody_else_yields() -> None:
    stage = Stage(tiers={"max_polls": 0})
    stage.submit_two()
    stage.core.step()
    stage.tiers._max_polls = 6
    stage.tiers._random = Random(3)  # some polls long
    stage.step_until_preempted()
    transfer = stage.tiers.in_flight[0]
    transfer.polls_left = 3

    waited = 0
    while stage.tiers.in_flight:
        states = {each.request: (each.state, each.wait_reason) for each in stage.core.snapshot().requests}
        assert states == {"old": ("running", ""), "new": ("swapped", "transfer")}
        assert {owner.request for owner in stage.core.manager.owners()} == {"old", "new"}, "it keeps its blocks"
        assert stage.core.has_work
        assert stage.core.step() == [] or not stage.tiers.in_flight
        waited += 1
        stage.ledger.catch_up()

    assert waited == 4
    assert stage.core.scheduler.num_preemptions == 1
    stage.tiers._max_polls = 0
    assert run_until_idle(stage.core)["new", 0][-1] == expected(5, 13)[-1]


@pytest.mark.parametrize("failing", [TransferKind.SWAP_OUT, TransferKind.SWAP_IN])
def test_a_failed_transfer_falls_back_to_recomputation(failing: TransferKind) -> None:
    stage = Stage()
    stage.submit_two()
    tokens: dict[str, list[int]] = {"old": [], "new": []}
    while stage.core.has_work:
        for transfer in stage.tiers.in_flight:
            transfer.fails = transfer.kind is failing
        for output in stage.core.step():
            tokens[output.request_id] += output.token_ids
        stage.ledger.catch_up()

    assert tokens == {"old": expected(4, 13), "new": expected(5, 13)}
    assert [(e.request, e.reason) for e in stage.of(SwapAbandoned)] == [("new", "copy")]
    (resumed,) = stage.of(RequestResumed)
    assert (resumed.mode, resumed.recompute_tokens > 0) == ("recompute", True)
    assert sum(e.recomputed_tokens for e in stage.of(StepCompleted)) == resumed.recompute_tokens


@pytest.mark.parametrize("when", ["out", "away", "in"])
def test_a_request_that_ends_while_it_is_away_leaves_nothing_behind(when: str) -> None:
    stage = Stage()
    stage.submit_two()
    stage.step_until_preempted()
    lifecycle = stage.core.scheduler.lifecycle
    if when != "out":
        while stage.tiers.in_flight:
            stage.core.step()
    if when == "in":
        while not lifecycle.arriving:
            stage.core.step()

    outputs = stage.core.abort("new")

    assert [(output.request_id, output.finish_reason) for output in outputs] == [("new", FinishReason.ABORT)]
    stage.ledger.catch_up()
    run_until_idle(stage.core)
    assert (stage.core.manager.pool.num_used, stage.tiers.kept, stage.tiers.in_flight) == (0, {}, [])
    stage.core.check_integrity()
    stage.ledger.catch_up()


def test_several_sequences_share_again_what_they_shared_before() -> None:
    stage = Stage(num_blocks=12)
    stage.core.add(make_request("old", [4, 5, 6, 7, 8, 9, 10, 11], max_tokens=20, ignore_eos=True), 0)
    stage.core.add(make_request("two", [5, 5, 6, 7, 8, 9], n=2, max_tokens=12, ignore_eos=True), 0)
    stage.step_until_preempted()
    two = stage.core.scheduler.lifecycle.find("two")
    assert two is not None
    assert two.state is RequestState.SWAPPED
    before = {each.sequence: each.block_ids for each in stage.core.snapshot().sequences if each.request == "two"}
    num_shared = len(set(before[0]) & set(before[1]))
    assert num_shared >= 1

    tokens = run_until_idle(stage.core)

    assert {key: len(found) for key, found in tokens.items()}.keys() == {("old", 0), ("two", 0), ("two", 1)}
    assert stage.tiers.num_done[TransferKind.SWAP_IN] >= 1
    stage.ledger.catch_up()


@pytest.mark.parametrize(("seconds_per_block", "mode"), [(1e-9, "swap"), (1e-1, "recompute"), (None, "swap")])
def test_auto_takes_the_cheaper_and_tells_both_estimates(seconds_per_block: float | None, mode: str) -> None:
    stage = Stage(tiers={"seconds_per_block": seconds_per_block}, preemption_mode="auto")
    stage.submit_two()

    run_until_idle(stage.core)

    first = stage.of(RequestPreempted)[0]
    assert first.mode == mode
    assert first.recompute_estimate_ns == pytest.approx(1000 * first.tokens_at_risk, rel=0.01)
    expected_swap = None if seconds_per_block is None else round(first.num_blocks * seconds_per_block * 1e9)
    assert first.swap_estimate_ns == expected_swap


def test_before_any_transfer_was_measured_auto_lets_one_request_find_out() -> None:
    stage = Stage(num_blocks=11, max_num_seqs=5, max_batch_tokens=64, preemption_mode="auto")
    for first in range(4, 9):  # all need their third block in the same step, and there is none
        stage.core.add(make_request(str(first), [first, 5, 6, 7, 8, 9, 10, 11], max_tokens=5, ignore_eos=True), 0)

    stage.step_until_preempted()
    modes = [(event.request, event.mode) for event in stage.of(RequestPreempted)]
    tokens = run_until_idle(stage.core)

    assert modes == [("8", "swap"), ("7", "recompute")]
    assert tokens.keys() == {(str(first), 0) for first in range(4, 9)}
    assert stage.core.manager.pool.num_used == 0


def test_a_full_host_and_the_mode_recompute_swap_nothing() -> None:
    for tiers, mode in [({"host_blocks": 1}, "swap"), ({}, "recompute")]:
        stage = Stage(tiers=tiers, preemption_mode=mode)
        stage.submit_two()
        run_until_idle(stage.core)
        assert {event.mode for event in stage.of(RequestPreempted)} == {"recompute"}


def test_hits_in_other_tiers_are_restored_first_and_told_by_tier() -> None:
    """vllm#43711 (O68): there was a hit, and nothing told which lookup it came from."""
    stage = Stage(tiers={"num_prefixes": 100}, enable_prefix_cache=True, num_blocks=12)
    prompt = list(range(4, 30))
    stage.core.add(make_request("first", prompt, max_tokens=2, ignore_eos=True), 0)
    answer = run_until_idle(stage.core)["first", 0]
    stage.tiers.poll()
    stage.core.manager.pool.clear_cache()
    by_tier = {hit.tier: 0 for hit in stage.tiers.find(list(stage.tiers.prefixes))}
    for hit in stage.tiers.find(list(stage.tiers.prefixes)):
        by_tier[hit.tier] += 4 * len(hit.hashes)
    assert sum(by_tier.values()) == 24

    stage.core.add(make_request("again", prompt, max_tokens=2, ignore_eos=True), 0)
    assert stage.core.step() == [], "it waits until its blocks have arrived"
    states = {each.request: (each.state, each.wait_reason) for each in stage.core.snapshot().requests}
    assert states == {"again": ("waiting", "transfer")}
    stage.ledger.catch_up()
    assert run_until_idle(stage.core)["again", 0] == answer

    again = next(e for e in stage.of(RequestAdmitted) if e.request == "again")
    assert (again.hit_tokens, again.host_hit_tokens, again.disk_hit_tokens) == (
        0, by_tier.get("host", 0), by_tier.get("disk", 0),
    )  # fmt: skip
    stage.ledger.catch_up()


def test_the_engines_own_thread_waits_for_transfers_and_serves_on() -> None:
    model, log = TimedModel(), EventLog()
    recorder = Recorder(log)
    done: dict[str, list[int]] = {}
    ends = threading.Semaphore(0)

    def listen(outputs: Sequence[SequenceOutput]) -> None:
        for output in outputs:
            done.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                ends.release()

    def make_tiers(manager: BlockManager) -> DictTiers:
        return DictTiers(manager, log, model, Random(1), max_polls=5)

    settings = make_settings(num_blocks=7, max_num_seqs=4, enable_prefix_cache=False, preemption_mode="swap")
    model.block_size = settings.block_size
    engine = Engine(settings, model, log, listen, make_tiers=make_tiers)
    engine.start()
    try:
        for name, first in (("old", 4), ("new", 5)):
            engine.submit(make_request(name, [first, 5, 6, 7, 8, 9, 10, 11], max_tokens=13, ignore_eos=True))
        assert ends.acquire(timeout=10)
        assert ends.acquire(timeout=10)
        engine.check_integrity()
        assert engine.is_alive()
        states = engine.snapshot().tiers[0].ref_counts
    finally:
        engine.stop()

    assert done == {"old": expected(4, 13), "new": expected(5, 13)}
    assert sum(states) == 0
    assert [event.mode for event in recorder.drain() if isinstance(event, RequestPreempted)] == ["swap"]


def test_the_cost_model_learns_from_prefill_and_from_what_was_found_again() -> None:
    cost = CostModel()
    assert cost.recompute_seconds(100) is None
    cost.note_step(64, 0, 10**9)
    assert cost.prefill_tokens_per_second is None, "a step that only decodes says nothing"
    for _ in range(50):
        cost.note_step(100, 90, 10**8)
    assert cost.prefill_tokens_per_second == pytest.approx(1000)
    assert cost.recompute_seconds(500) == pytest.approx(0.5)
    for _ in range(50):
        cost.note_step(100, 100, 10**7)
    assert cost.prefill_tokens_per_second == pytest.approx(10_000, rel=0.05), "what is new counts"
    cost.note_resumed(100, 25)
    assert cost.recompute_seconds(1000) == pytest.approx(0.025, rel=0.05)
