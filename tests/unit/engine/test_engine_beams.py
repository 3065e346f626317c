"""Beams share what they have in common, copy only a partial block, and live and end together."""

from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest
from builders import (
    LedgerFollower,
    NullModel,
    Recorder,
    make_core,
    make_groups,
    make_request,
    make_settings,
    run_until_idle,
)
from dict_tiers import DictTiers

from kvwatch.control.inspection import RequestQuery
from kvwatch.telemetry.events import (
    BlocksCopied,
    FirstToken,
    RequestFinished,
    RequestPreempted,
    RequestResumed,
    StepScheduled,
)
from kvwatch.telemetry.events.request import PreemptionMode
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.errors import RequestInvalid
from kvwatch_engine.contracts.request import FinishReason, GenerationRequest, SequenceOutput
from kvwatch_engine.contracts.sampling import BeamParams
from kvwatch_engine.contracts.step import SampleRow, StepInput, StepResult
from kvwatch_engine.core import EngineCore
from kvwatch_engine.live.inspection import inspect_requests
from kvwatch_engine.memory.block_manager import BlockManager
from kvwatch_engine.scheduling.beam_search import BeamSearch
from kvwatch_engine.scheduling.lifecycle import Preempted
from kvwatch_engine.scheduling.limits import check_length, check_valid
from kvwatch_engine.scheduling.policy import most_blocks

PROMPT = list(range(4, 14))  # 10 tokens at block size 4: two full blocks and a half
WIDTH = 4


def search_request(request_id: str = "r", prompt: list[int] = PROMPT, **sampling: object) -> GenerationRequest:
    values: dict[str, object] = {"beams": BeamParams(width=WIDTH), "n": WIDTH, "max_tokens": 12, "ignore_eos": True}
    return make_request(request_id, prompt, **{**values, **sampling})


def expected_moves(request: GenerationRequest) -> list[int]:
    """Return how many beams go on from another one's, step by step, as the search says that knows no blocks."""
    model, params = NullModel(), request.sampling
    assert params.beams is not None
    search = BeamSearch(params.beams, params.max_tokens, params.end_token_ids((3,)))
    moves: list[int] = []
    while True:
        for place, beam in list(search.beams.items()):
            row = SampleRow(
                params=params,
                seed=0,
                position=len(beam.token_ids),
                prompt_token_ids=request.prompt_token_ids,
                output_token_ids=beam.token_ids,
                num_candidates=search.num_candidates,
            )
            search.offer(place, model.candidates(row))
        made = search.advance()
        if made is None:
            return moves
        moves.append(len(made))


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_only_a_partial_block_is_copied_and_only_for_beams_that_leave_anothers_way(block_size: int) -> None:
    log = EventLog()
    recorder = Recorder(log)
    core = make_core(log=log, block_size=block_size, num_blocks=200)
    ledger = LedgerFollower(log, core.snapshot)

    core.add(search_request(), 0)
    while core.has_work:
        core.step()
        core.check_integrity()
        ledger.catch_up()

    moves = expected_moves(search_request())
    assert sum(moves) > 3 * WIDTH, "the beams are meant to leave each other's way"
    num_computed = range(len(PROMPT), len(PROMPT) + len(moves))
    expected = [count for count, computed in zip(moves, num_computed, strict=True) if computed % block_size]
    copies = [event for event in recorder.drain() if isinstance(event, BlocksCopied)]
    assert [len(event.sources) for event in copies] == [1] * sum(expected)
    assert core.manager.pool.num_used == 0


@pytest.mark.parametrize("block_size", [1, 4])
def test_a_beam_stores_blocks_under_the_names_of_the_way_that_it_goes_now(block_size: int) -> None:
    """Else whoever asks later for what it said before would be given K/V of something else."""
    core = make_core(block_size=block_size, num_blocks=200)
    core.add(search_request(), 0)
    num_checked = 0
    while core.has_work:
        core.step()
        for request in core.scheduler.lifecycle.requests():
            for beam in request.active_sequences():
                num_full = beam.num_computed // block_size
                fresh = core.chain_of(request).upto(num_full, beam.tokens)
                assert list(beam.chain.upto(num_full, beam.tokens)[:num_full]) == list(fresh)
                num_checked += num_full
    assert num_checked > 50


def test_what_all_beams_have_in_common_is_computed_and_held_once() -> None:
    log = EventLog()
    recorder = Recorder(log)
    core = make_core(log=log)

    core.add(search_request(n=2), 0)
    outputs = finish(core)

    events = recorder.drain()
    computed = sum(event.total_tokens for event in events if isinstance(event, StepScheduled))
    assert computed == len(PROMPT) + WIDTH * (12 - 1)
    [finished] = [event for event in events if isinstance(event, RequestFinished)]
    assert finished.peak_blocks is not None
    assert finished.peak_blocks <= 2 + WIDTH * 4
    assert finished.generated_tokens == sum(len(output.token_ids) for output in outputs) == 2 * 12
    assert [output.sequence for output in outputs] == [0, 1], "the best two are returned"
    assert len([event for event in events if isinstance(event, FirstToken)]) == 1


def test_a_step_that_has_no_room_for_all_beams_changes_nothing_of_what_is_found() -> None:
    expected = finish(core_with(search_request()))
    core = core_with(search_request(), max_batch_tokens=3)

    assert finish(core) == expected


def core_with(*requests: GenerationRequest, log: EventLog | None = None, **settings: Any) -> EngineCore:
    core = make_core(log=log, **settings)
    for request in requests:
        core.add(request, 0)
    return core


def finish(core: EngineCore) -> list[SequenceOutput]:
    outputs: list[SequenceOutput] = []
    for _ in range(2_000):
        outputs += core.step()
        core.check_integrity()
        if not core.has_work:
            break
    assert not core.has_work, "it never ends"
    assert core.manager.pool.num_used == 0
    return [replace(output, num_cached_tokens=0) for output in outputs]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("enable_prefix_cache", [True, False])
def test_a_group_that_is_preempted_finds_what_it_would_have_found_in_peace(
    mode: str, enable_prefix_cache: bool
) -> None:
    requests = [search_request(f"r{index}", [5 + index, *PROMPT], max_tokens=20) for index in range(3)]
    expected = sorted(finish(core_with(*requests, num_blocks=400, max_num_seqs=16)), key=key_of)
    log = EventLog()
    recorder = Recorder(log)
    model = NullModel()
    core = make_core(
        model, log, num_blocks=36, max_num_seqs=12, preemption_mode=mode, enable_prefix_cache=enable_prefix_cache,
        make_tiers=partial(tiers_of, log, model) if mode == "swap" else None,
    )  # fmt: skip
    ledger = LedgerFollower(log, core.snapshot)
    for request in requests:
        core.add(request, 0)
    outputs: list[SequenceOutput] = []
    while core.has_work:
        outputs += core.step()
        core.check_integrity()
        ledger.catch_up()

    preempted = [event for event in recorder.drain() if isinstance(event, RequestPreempted)]
    assert {event.mode for event in preempted} == {mode}
    assert sorted((replace(output, num_cached_tokens=0) for output in outputs), key=key_of) == expected
    assert core.manager.pool.num_used == 0


def key_of(output: SequenceOutput) -> tuple[str, int]:
    return output.request_id, output.sequence


@pytest.mark.parametrize("max_prefill_chunk", [None, 3, 5])
def test_beams_of_layers_with_a_window_never_need_more_than_they_were_let_in_with(
    max_prefill_chunk: int | None,
) -> None:
    """After a recomputation the first beam has given back what others share of it, but for the prompt."""
    requests = [search_request(f"r{index}", [5 + index, *PROMPT, *PROMPT], max_tokens=9) for index in range(6)]
    settings: dict[str, Any] = {"groups": make_groups(None, 6), "block_size": 1, "max_prefill_chunk": max_prefill_chunk}
    roomy = core_with(*requests, **settings, num_blocks=900, max_num_seqs=24)
    expected = sorted(finish(roomy), key=key_of)
    worst = most_blocks(roomy.settings, len(requests[0].prompt_token_ids), 9, WIDTH)
    log = EventLog()
    recorder = Recorder(log)
    core = core_with(*requests, log=log, **settings, num_blocks=1 + worst, max_num_seqs=24, enable_prefix_cache=False)

    assert sorted(finish(core), key=key_of) == expected
    assert [event for event in recorder.drain() if isinstance(event, RequestPreempted)]


def test_a_group_that_is_recomputed_computes_once_what_beams_have_in_common_with_the_first() -> None:
    log = EventLog()
    recorder = Recorder(log)
    core = core_with(search_request(max_tokens=20), log=log, enable_prefix_cache=False)
    for _ in range(12):
        core.step()
    [request] = core.scheduler.lifecycle.running
    leader, *followers = request.sequences
    apart = sum(each.num_computed - request.num_common_tokens(leader, each) for each in followers)
    assert 0 < apart < 3 * 11, "beams have more in common than the prompt"
    expected = leader.num_computed + apart

    core.scheduler.lifecycle.preempt(request, None, Preempted("recompute", "memory"))
    run_until_idle(core)

    events = recorder.drain()
    assert [event.recompute_tokens for event in events if isinstance(event, RequestResumed)] == [expected]
    assert [event.recomputed_tokens for event in events if isinstance(event, RequestFinished)] == [expected]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_group_that_is_preempted_between_two_of_its_beams_finds_the_same(mode: PreemptionMode) -> None:
    """Some of its beams have their candidates already, the others not: the budget was too short for all."""
    num_preempted = 0
    for number in range(12):
        request = search_request(prompt=[number, *PROMPT[: 1 + number % 5]], max_tokens=16)
        expected = finish(core_with(request))
        log, model = EventLog(), NullModel()
        make_tiers = partial(tiers_of, log, model) if mode == "swap" else None
        core = make_core(model, log, max_batch_tokens=3, make_tiers=make_tiers, preemption_mode=mode)
        core.add(request, 0)
        for _ in range(8 + number):
            core.step()
        [live] = core.scheduler.lifecycle.running
        done = [each.num_computed == each.num_tokens for each in live.sequences]
        num_preempted += any(done) and not all(done)
        core.scheduler._preemption._preempt(live, live, can_swap=True)

        assert finish(core) == expected
    assert num_preempted > 3


def tiers_of(log: EventLog, model: NullModel, manager: BlockManager) -> DictTiers:
    return DictTiers(manager, log, model, Random(0))


def test_who_looks_into_the_engine_sees_what_beams_hold_share_and_save() -> None:
    core = core_with(search_request(), search_request("twin", [*PROMPT[:8], 7, 7]))
    for _ in range(9):
        core.step()

    page = inspect_requests(core, RequestQuery())

    tables = {owner: list(core.manager.table(owner)) for owner in core.manager.owners()}
    for info in page.requests:
        own = [table for owner, table in tables.items() if owner.request == info.request]
        others = {block for owner, table in tables.items() if owner.request != info.request for block in table}
        held = {block for table in own for block in table}
        assert info.num_sequences == len(own) == WIDTH
        assert info.num_blocks == len(held)
        assert info.num_saved_blocks == sum(map(len, own)) - len(held) > 0
        assert info.num_foreign_blocks == len(held & others)
        assert info.num_shared_blocks == sum(sum(block in table for table in tables.values()) > 1 for block in held)


def test_an_abort_ends_all_beams_and_is_told_for_those_that_would_be_returned() -> None:
    core = core_with(search_request(n=2))
    for _ in range(5):
        core.step()

    outputs = core.abort("r")

    assert [(output.sequence, output.finish_reason) for output in outputs] == [(0, "abort"), (1, "abort")]
    assert core.manager.pool.num_used == 0
    assert not core.has_work


def test_no_beam_can_be_stopped_alone() -> None:
    expected = finish(core_with(search_request()))
    core = core_with(search_request())
    core.step()

    core.stop_sequence("r", 1)

    assert finish(core) == expected


class BrokenModel(NullModel):
    """A null model that has no candidates for the second row of its fifth step."""

    num_steps = 0

    def execute(self, step: StepInput) -> StepResult:
        self.num_steps += 1
        result = super().execute(step)
        return replace(result, errors={1: "made to fail"}) if self.num_steps == 5 else result


def test_a_beam_whose_logits_are_not_numbers_ends_its_whole_group() -> None:
    core = make_core(BrokenModel())
    core.add(search_request(n=3), 0)

    outputs = finish(core)

    assert [(output.sequence, output.finish_reason) for output in outputs] == [
        (place, FinishReason.ERROR) for place in range(3)
    ]


def test_a_search_that_could_need_more_than_the_pool_is_refused_with_its_worst_case() -> None:
    settings = make_settings(num_blocks=21)

    with pytest.raises(RequestInvalid, match=r"4 sequences of up to 34 tokens may need 30 blocks.*lower beam_width"):
        check_length(search_request(max_tokens=24), settings)


@pytest.mark.parametrize(
    ("sampling", "sentence"),
    [
        ({"beams": BeamParams(width=9)}, "beam_width is 9, but 1 to 8 sequences can run"),
        ({"n": 5}, "n is 5, but a beam search of width 4 finds 1 to 4"),
        ({"stop_token_ids": tuple(range(48))}, "beam_width is 4, which takes 52 tokens"),
    ],
)
def test_a_search_that_can_never_run_is_refused_by_name(sampling: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestInvalid, match=sentence):
        check_valid(search_request(**sampling), make_settings())
