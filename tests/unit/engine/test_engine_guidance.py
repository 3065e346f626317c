"""Guided sequences in the engine: within their grammar whatever happens to them, and nobody else is touched."""

import re
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from builders import NullModel, Recorder, make_core, make_request, run_until_idle
from dict_tiers import DictTiers
from guided_stage import VOCAB_SIZE, compile_one
from openai_server import byte_level_tokenizer
from paged_sequences import sample_row

from kvwatch.telemetry.events import RequestFinished, RequestPreempted
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.errors import RequestInvalid
from kvwatch_engine.contracts.guidance import Guide
from kvwatch_engine.contracts.request import FinishReason, GenerationRequest, SequenceOutput
from kvwatch_engine.contracts.sampling import BeamParams, SamplingParams
from kvwatch_engine.core import EngineCore
from kvwatch_engine.model.sampler import sample
from kvwatch_engine.model.step_logits import StepLogits
from kvwatch_engine.scheduling.limits import check_valid

TOKENIZER = byte_level_tokenizer(VOCAB_SIZE)
END_TOKEN = 3
PATTERN = r"\{[a-z]{3,9}: ([0-9]{1,4}|true|false)\}"
DYING = 'start: a{1000000}\na: "x" | "xx"\n'
"""Its first token is cheap and its second takes more work than is allowed."""


@pytest.fixture(scope="module")
def guide() -> Guide:
    return compile_one("regex", PATTERN)


def guided(request_id: str, guide: Guide, prompt: list[int], **sampling: object) -> GenerationRequest:
    request = make_request(request_id, prompt, **{"max_tokens": 40, **sampling})
    return GenerationRequest(
        request_id=request_id, prompt_token_ids=request.prompt_token_ids, sampling=request.sampling, guide=guide
    )


def make_guided_core(log: EventLog, **settings: Any) -> EngineCore:
    return make_core(NullModel(VOCAB_SIZE), log, vocab_size=VOCAB_SIZE, **settings)


def text_of(tokens: list[int]) -> str:
    assert tokens[-1] == END_TOKEN, "it ended where its grammar does"
    return TOKENIZER.decode(tokens[:-1])


def prompts() -> dict[str, list[int]]:
    return {f"r{i}": [10 + i, 20 + i, 30 + i, 40 + i, 5] for i in range(4)}


def generate(guide: Guide, log: EventLog, **settings: Any) -> dict[tuple[str, int], list[int]]:
    """Return the tokens of two guided and two free requests that run together."""
    core = make_guided_core(log, **settings)
    for place, (request_id, prompt) in enumerate(prompts().items()):
        if place % 2:
            core.add(guided(request_id, guide, prompt), 0)
        else:
            core.add(make_request(request_id, prompt, max_tokens=24, ignore_eos=True), 0)
    return run_until_idle(core)


def test_guided_requests_keep_to_their_grammar_and_their_neighbours_say_what_they_say_alone(guide: Guide) -> None:
    tokens = generate(guide, EventLog(), num_blocks=200)

    for place, (request_id, prompt) in enumerate(prompts().items()):
        if place % 2:
            assert re.fullmatch(PATTERN, text_of(tokens[request_id, 0]))
        else:
            expected = [NullModel(VOCAB_SIZE).next_token(prompt, 0, position) for position in range(24)]
            assert tokens[request_id, 0] == expected


@pytest.mark.parametrize("enable_prefix_cache", [True, False])
def test_preempted_guided_requests_go_on_token_for_token(guide: Guide, enable_prefix_cache: bool) -> None:
    undisturbed = generate(guide, EventLog(), num_blocks=200)
    log = EventLog()
    recorder = Recorder(log)

    disturbed = generate(guide, log, num_blocks=14, max_num_seqs=4, enable_prefix_cache=enable_prefix_cache)

    preempted = {event.request for event in recorder.drain() if isinstance(event, RequestPreempted)}
    assert preempted & {"r1", "r3"}, "a guided one had to yield"
    assert disturbed == undisturbed


def test_swapped_guided_requests_go_on_token_for_token(guide: Guide) -> None:
    undisturbed = generate(guide, EventLog(), num_blocks=200)
    log, model = EventLog(), NullModel(VOCAB_SIZE)
    recorder = Recorder(log)
    core = make_core(
        model, log, make_tiers=lambda manager: DictTiers(manager, log, model, Random(0)), num_blocks=14,
        max_num_seqs=4, enable_prefix_cache=False, preemption_mode="swap", vocab_size=VOCAB_SIZE,
    )  # fmt: skip
    for place, (request_id, prompt) in enumerate(prompts().items()):
        free = make_request(request_id, prompt, max_tokens=24, ignore_eos=True)
        core.add(guided(request_id, guide, prompt) if place % 2 else free, 0)

    tokens = run_until_idle(core)

    modes = {event.request: event.mode for event in recorder.drain() if isinstance(event, RequestPreempted)}
    assert "swap" in {modes.get("r1"), modes.get("r3")}, "a guided one was swapped"
    assert tokens == undisturbed


def test_each_of_several_samples_follows_the_grammar_on_its_own(guide: Guide) -> None:
    core = make_guided_core(EventLog(), num_blocks=200)

    core.add(guided("r", guide, [9, 8, 7, 6, 5, 4], n=4, temperature=1.0, seed=11), 0)
    tokens = run_until_idle(core)

    texts = [text_of(tokens["r", index]) for index in range(4)]
    assert all(re.fullmatch(PATTERN, text) for text in texts)
    assert len(set(texts)) > 1


def test_a_grammar_that_takes_too_much_work_ends_its_own_sequence() -> None:
    log = EventLog()
    recorder = Recorder(log)
    core = make_guided_core(log, num_blocks=200)
    core.add(guided("dying", compile_one("grammar", DYING), [9, 8, 7], n=2, temperature=1.0), 0)
    core.add(make_request("other", [1, 2, 3], max_tokens=12, ignore_eos=True), 0)

    outputs: list[SequenceOutput] = []
    while core.has_work:
        outputs += core.step()

    failed = [o for o in outputs if o.finish_reason is FinishReason.ERROR]
    assert {(o.request_id, o.sequence) for o in failed} == {("dying", 0), ("dying", 1)}
    assert all(o.is_guide_error and "too much work" in o.error for o in failed)
    finished = {e.request: e for e in recorder.drain() if isinstance(e, RequestFinished)}
    assert finished["dying"].error == "GuideFailed"
    assert finished["other"].generated_tokens == 12
    assert core.manager.pool.num_used == 0


def test_a_beam_search_cannot_be_guided(guide: Guide) -> None:
    request = guided("r", guide, [1, 2], temperature=0.0, beams=BeamParams(width=2))

    with pytest.raises(RequestInvalid, match="grammar"):
        check_valid(request, make_guided_core(EventLog()).settings)


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_the_sampler_chooses_within_the_grammar_by_the_models_own_probabilities(
    guide: Guide, temperature: float
) -> None:
    logits = torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * 3
    params = SamplingParams(temperature=temperature, logprobs=2)
    free = [sample_row(params, seed=number) for number in range(3)]
    sequence = guide.start()
    sequence.prepare([], 0)
    allowed = sequence.allowed()
    assert len(allowed) == VOCAB_SIZE
    rows = [free[0], replace(free[1], guide=sequence), free[2]]

    alone, beside = sample(StepLogits.of(logits), free, [0, 1, 2]), sample(StepLogits.of(logits), rows, [0, 1, 2])

    assert [beside.token_ids[0], beside.token_ids[2]] == [alone.token_ids[0], alone.token_ids[2]]
    assert [beside.logprobs[0], beside.logprobs[2]] == [alone.logprobs[0], alone.logprobs[2]]
    token = beside.token_ids[1]
    assert allowed[token]
    masked = torch.where(torch.from_numpy(allowed), logits[1], torch.tensor(-torch.inf))
    if temperature == 0:
        assert token == int(masked.argmax())
    chosen = beside.logprobs[1]
    assert chosen is not None
    assert chosen.chosen.logprob == pytest.approx(float(logits[1].log_softmax(0)[token]), abs=1e-4)
