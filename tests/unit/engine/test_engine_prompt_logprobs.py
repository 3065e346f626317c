"""Log-probabilities of prompts: each token's are told once and in order, whatever happens to the request meanwhile."""

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
    run_until_idle,
)
from dict_tiers import DictTiers

from kvwatch.telemetry.events import RequestAdmitted, RequestPreempted, RequestResumed
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.request import SequenceOutput
from kvwatch_engine.contracts.sampling import BeamParams
from kvwatch_engine.contracts.step import StepInput
from kvwatch_engine.core import EngineCore

PROMPT = [(7 * place + 3) % 47 for place in range(23)]


class Told:
    """What a caller is told of a request's prompt, and of its answer."""

    def __init__(self, num_top: int) -> None:
        self.num_top = num_top
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.ranks: list[int] = []
        self.num_generated = 0

    def add(self, output: SequenceOutput) -> None:
        scored = output.prompt_logprobs
        if scored is not None:
            assert not self.num_generated, "all of the prompt is told before the answer begins"
            assert scored.top_token_ids.shape == scored.top_logprobs.shape == (len(scored.token_ids), self.num_top)
            self.token_ids += scored.token_ids.tolist()
            self.logprobs += scored.logprobs.tolist()
            self.ranks += scored.ranks.tolist()
        self.num_generated += len(output.token_ids)


def expected(prompt: list[int]) -> tuple[list[int], list[float], list[int]]:
    """Return what the null model says of each token but the first, which depends on its place and its neighbour."""
    states = [prompt[p] * 31 + prompt[p + 1] * 7 + p * 3 for p in range(len(prompt) - 1)]
    return prompt[1:], [-(state % 97) / 10 for state in states], [state % 11 + 1 for state in states]


def step_all(core: EngineCore, told: dict[str, Told], *, max_steps: int = 2000) -> None:
    for _ in range(max_steps):
        if not core.has_work:
            return
        for output in core.step():
            if output.request_id in told:
                told[output.request_id].add(output)
    raise AssertionError("still at work")


def check(told: Told, prompt: list[int]) -> None:
    assert (told.token_ids, told.logprobs, told.ranks) == expected(prompt)
    assert told.num_generated > 0


@pytest.mark.parametrize("chunk", [1, 4, 5, None])
@pytest.mark.parametrize("num_top", [0, 3])
def test_every_token_but_the_first_is_told_once_over_the_chunks_of_the_prompt(chunk: int | None, num_top: int) -> None:
    core = make_core(max_prefill_chunk=chunk)
    told = {str(number): Told(num_top) for number in range(3)}
    prompts = [PROMPT, PROMPT[:2], PROMPT[5:]]

    for number, prompt in enumerate(prompts):
        core.add(make_request(str(number), prompt, prompt_logprobs=num_top, max_tokens=3), 0)
    step_all(core, told)

    for number, prompt in enumerate(prompts):
        check(told[str(number)], prompt)


def test_a_prompt_of_one_token_has_none() -> None:
    core, told = make_core(), {"one": Told(2)}

    core.add(make_request("one", [5], prompt_logprobs=2, max_tokens=2, ignore_eos=True), 0)
    step_all(core, told)

    assert (told["one"].token_ids, told["one"].num_generated) == ([], 2)


def test_steps_have_nothing_of_it_when_nobody_asks() -> None:
    model, spans = NullModel(), []
    model.on_step = lambda step: spans.append(len(step.scored))
    core = make_core(model)

    core.add(make_request("plain", PROMPT, max_tokens=4, logprobs=3), 0)
    run_until_idle(core)

    assert set(spans) == {0}


def test_a_known_prefix_is_computed_all_the_same_and_others_still_find_it() -> None:
    log = EventLog()
    recorder = Recorder(log)
    core, told = make_core(log=log), {"asks": Told(1)}
    core.add(make_request("first", PROMPT, max_tokens=1), 0)
    run_until_idle(core)

    core.add(make_request("asks", PROMPT, prompt_logprobs=1, max_tokens=1), 0)
    step_all(core, told)
    core.add(make_request("last", PROMPT, max_tokens=1), 0)
    run_until_idle(core)

    check(told["asks"], PROMPT)
    admitted = {e.request: e for e in recorder.drain() if isinstance(e, RequestAdmitted)}
    assert {name: (e.queried_tokens, e.hit_tokens) for name, e in admitted.items()} == {
        "first": (23, 0), "asks": (0, 0), "last": (23, 20),
    }  # fmt: skip
    assert admitted["asks"].granularity_lost_tokens == admitted["asks"].regretted_tokens == 0
    core.check_integrity()


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_a_request_that_lost_its_blocks_on_the_way_tells_nothing_twice(
    num_steps: int, windows: tuple[int | None, ...]
) -> None:
    log = EventLog()
    recorder = Recorder(log)
    core = make_core(log=log, max_prefill_chunk=5, groups=make_groups(*windows), num_blocks=61)
    follower = LedgerFollower(log, core.snapshot)
    told = {"asks": Told(2)}
    core.add(make_request("asks", PROMPT, prompt_logprobs=2, max_tokens=6, ignore_eos=True), 0)
    for _ in range(num_steps):
        for output in core.step():
            told["asks"].add(output)

    request = core.scheduler.lifecycle.find("asks")
    assert request is not None
    core.scheduler.drop(request, "memory")
    step_all(core, told)

    check(told["asks"], PROMPT)
    assert told["asks"].num_generated == 6
    [resumed] = [e for e in recorder.drain() if isinstance(e, RequestResumed)]
    num_computed = min(5 * num_steps, len(PROMPT)) + max(0, num_steps - 5)
    assert resumed.hit_tokens == num_computed // 4 * 4, "what was told already may be found again"
    follower.catch_up()
    core.check_integrity()


def test_a_step_that_failed_for_lack_of_memory_is_told_when_it_succeeds() -> None:
    model = NullModel()
    core, told = make_core(model), {"asks": Told(1)}
    core.add(make_request("asks", PROMPT, prompt_logprobs=1, max_tokens=2), 0)
    lengths: list[int] = []

    def fail_if_large(step: StepInput) -> None:
        lengths.append(step.num_tokens)
        if step.num_tokens > 6:
            raise MemoryError("made to fail")

    model.on_step = fail_if_large
    step_all(core, told)

    check(told["asks"], PROMPT)
    assert lengths[:4] == [23, 11, 5, 5]


def test_samples_and_beams_of_one_prompt_are_told_of_it_once() -> None:
    for sampling in ({"n": 3}, {"n": 2, "beams": BeamParams(width=3)}):
        core, told = make_core(max_prefill_chunk=7), {"asks": Told(2)}

        core.add(make_request("asks", PROMPT, prompt_logprobs=2, max_tokens=4, **sampling), 0)
        step_all(core, told)

        check(told["asks"], PROMPT)


def test_a_swapped_request_goes_on_telling_where_it_was() -> None:
    log, model = EventLog(), NullModel()
    recorder = Recorder(log)

    def tiers(manager: Any) -> DictTiers:
        return DictTiers(manager, log, model, Random(0))

    settings = {"num_blocks": 8, "max_num_seqs": 4, "max_prefill_chunk": 4, "reserve_prompt": False}
    core = make_core(model, log, make_tiers=tiers, preemption_mode="swap", watermark_blocks=0, **settings)
    prompts = {"old": PROMPT[:16], "new": PROMPT[3:19]}
    told = {name: Told(1) for name in prompts}

    for name, prompt in prompts.items():
        core.add(make_request(name, prompt, prompt_logprobs=1, max_tokens=6, ignore_eos=True), 0)
    step_all(core, told)

    for name, prompt in prompts.items():
        check(told[name], prompt)
    assert {e.mode for e in recorder.drain() if isinstance(e, RequestPreempted)} == {"swap"}
