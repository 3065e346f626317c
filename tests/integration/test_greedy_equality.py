"""Greedy text equals transformers' `generate`, token for token, whatever the engine does to get there.

Computed in fp32. Batch and chunk sizes change the order of additions in matrix products, so where the reference's two
best logits are closer than `NEAR_TIE` a divergence is excused, printed, and the rest of the text is checked by teacher
forcing: each of our tokens must be the reference's choice given our own text before it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from builders import Recorder, make_request
from prompts import PROMPTS
from tiny_models import embedded_model_folder
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvwatch.telemetry.events import DraftsVerified, StepScheduled
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.core import EngineCore
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.model.loader import LoadedModel, load_model
from kvwatch_engine.model.runner import ModelRunner

NEAR_TIE = 1e-4
MAX_EXCUSED_SHARE = 0.02
NUM_NEW_TOKENS = 40

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Reference:
    """transformers' model and its greedy answers."""

    model: Any
    prompts: list[list[int]]
    answers: list[list[int]]
    excused: list[bool]
    """For each text compared so far: whether it needed the excuse of a near tie."""

    def logits_after(self, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        """Return f32[len(answer), vocab]: the logits from which each token of `answer` is chosen."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([[*prompt, *answer]])).logits[0]
        return torch.as_tensor(logits[len(prompt) - 1 : -1])


@pytest.fixture(scope="module")
def reference() -> Iterator[Reference]:
    folder = embedded_model_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    answers = []
    for prompt in prompts:
        with torch.inference_mode():
            output = model.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=NUM_NEW_TOKENS, do_sample=False,
            )  # fmt: skip
        answers.append(output[0, len(prompt) :].tolist())
    reference = Reference(model, prompts, answers, [])
    yield reference
    share = sum(reference.excused) / max(1, len(reference.excused))
    print(f"{sum(reference.excused)} of {len(reference.excused)} texts needed the excuse of a near tie")
    assert share <= MAX_EXCUSED_SHARE


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model("embedded", dtype="float32")


def make_engine(model: LoadedModel, *, fill: float = 0.0, **settings: Any) -> EngineCore:
    values = {"block_size": 16, "num_blocks": 600, "max_model_len": 1024, "max_num_seqs": 16, "max_batch_tokens": 512}
    config = EngineSettings(**{**values, **settings}, eos_token_ids=model.info.eos_token_ids)
    cache = KVCache(model.cache_spec(config.block_size), config.num_blocks)
    if fill:
        cache.data.fill_(fill)
    return EngineCore(config, ModelRunner(model, cache), EventLog())


def generate(core: EngineCore, prompts: Sequence[Sequence[int]], *, together: bool) -> list[list[int]]:
    answers: dict[str, list[int]] = {}

    def run() -> None:
        while core.has_work:
            for output in core.step():
                assert not output.error
                answers.setdefault(output.request_id, []).extend(output.token_ids)

    for index, prompt in enumerate(prompts):
        core.add(make_request(str(index), prompt, max_tokens=NUM_NEW_TOKENS), 0)
        if not together:
            run()
    run()
    core.check_integrity()
    assert core.manager.pool.num_used == 0
    return [answers[str(index)] for index in range(len(prompts))]


def num_computed(core: EngineCore, run: Callable[[], None]) -> int:
    """Return how many tokens the model computed during `run`."""
    recorder = Recorder(core.log)
    run()
    return sum(event.total_tokens for event in recorder.drain() if isinstance(event, StepScheduled))


def check(reference: Reference, answers: list[list[int]]) -> None:
    for index, answer in enumerate(answers):
        is_different = answer != reference.answers[index]
        reference.excused.append(is_different and is_excused(reference, index, answer))


def is_excused(reference: Reference, index: int, answer: list[int]) -> bool:
    """Check an answer that differs from the reference's; fail unless it differs at a near tie only."""
    prompt, expected = reference.prompts[index], reference.answers[index]
    place = next((i for i, (a, b) in enumerate(zip(answer, expected, strict=False)) if a != b), None)
    assert place is not None, f"prompt {index}: {len(answer)} tokens instead of {len(expected)}"
    logits = reference.logits_after(prompt, answer)
    best = logits.topk(2).values
    gap = float(best[place, 0] - best[place, 1])
    print(f"prompt {index} differs at token {place}: the reference's two best logits differ by {gap:.2e}")
    assert gap < NEAR_TIE, f"prompt {index}, token {place}: {answer[place]} instead of {expected[place]}"
    for position, token in enumerate(answer[place:], place):
        loss = float(best[position, 0] - logits[position, token])
        assert loss < NEAR_TIE, f"prompt {index}, token {position}: {token} is not the reference's choice"
    return True


def test_the_prompts_are_as_different_as_they_should_be(reference: Reference) -> None:
    lengths = [len(prompt) for prompt in reference.prompts]
    assert len(PROMPTS) == len(set(PROMPTS)) == 20
    assert min(lengths) < 3
    assert max(lengths) > 100


def test_alone_cold_and_then_warm(reference: Reference, model: LoadedModel) -> None:
    core = make_engine(model)

    check(reference, generate(core, reference.prompts, together=False))

    computed = num_computed(core, lambda: check(reference, generate(core, reference.prompts, together=True)))
    assert computed < 0.8 * sum(len(prompt) + NUM_NEW_TOKENS for prompt in reference.prompts), "the cache was warm"


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_in_a_batch_of_16_with_prefill_in_chunks_of_32_cold_and_then_warm(
    reference: Reference, model: LoadedModel, block_size: int
) -> None:
    core = make_engine(model, block_size=block_size, max_prefill_chunk=32)

    check(reference, generate(core, reference.prompts, together=True))
    check(reference, generate(core, reference.prompts, together=True))


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("enable_prefix_cache", [True, False])
def test_with_preemptions_forced_by_a_pool_too_small(
    reference: Reference, model: LoadedModel, block_size: int, enable_prefix_cache: bool
) -> None:
    longest = max(len(prompt) for prompt in reference.prompts) + NUM_NEW_TOKENS
    num_blocks = 2 + max(-(-longest // block_size), 320 // block_size)
    core = make_engine(
        model, block_size=block_size, num_blocks=num_blocks, max_prefill_chunk=32,
        enable_prefix_cache=enable_prefix_cache,
    )  # fmt: skip

    answers = generate(core, reference.prompts, together=True)

    assert core.scheduler.num_preemptions > 3, "the pool is meant to be too small"
    check(reference, answers)


@pytest.mark.slow
@pytest.mark.parametrize("num_blocks", [600, 22])
def test_with_drafts_alone_and_together_cold_and_warm_and_preempted(
    reference: Reference, model: LoadedModel, num_blocks: int
) -> None:
    core = make_engine(
        model, num_blocks=num_blocks, max_prefill_chunk=32, num_speculative_tokens=5, prompt_lookup_min=1
    )
    recorder = Recorder(core.log)

    check(reference, generate(core, reference.prompts, together=True))
    check(reference, generate(core, reference.prompts, together=False))

    verified = [event for event in recorder.drain() if isinstance(event, DraftsVerified)]
    num_accepted = sum(event.accepted_tokens for event in verified)
    print(f"{num_accepted} tokens accepted, {sum(event.rejected_tokens for event in verified)} rejected")
    assert num_accepted > 50
    assert num_blocks == 600 or core.scheduler.num_preemptions > 0


def test_a_pool_full_of_nan_changes_nothing(reference: Reference, model: LoadedModel) -> None:
    """vllm#35138, flash-attn#1745: what lies in recycled slots must never reach an answer; 0 * NaN is NaN."""
    core = make_engine(model, fill=float("nan"), num_blocks=60, max_prefill_chunk=32)

    check(reference, generate(core, reference.prompts, together=True))


@pytest.mark.parametrize("n", [3, 8])
def test_parallel_samples_of_shared_prompts_are_all_the_same_text(
    reference: Reference, model: LoadedModel, n: int
) -> None:
    """At temperature 0: each of the sequences that share the prompt's blocks is the reference's answer."""
    core = make_engine(model, max_num_seqs=32)
    for index, prompt in enumerate(reference.prompts[:8]):
        core.add(make_request(str(index), prompt, n=n, max_tokens=NUM_NEW_TOKENS), 0)
    answers: dict[tuple[str, int], list[int]] = {}
    while core.has_work:
        for output in core.step():
            answers.setdefault((output.request_id, output.sequence), []).extend(output.token_ids)

    for (request_id, _), answer in answers.items():
        index = int(request_id)
        is_different = answer != reference.answers[index]
        reference.excused.append(is_different and is_excused(reference, index, answer))
    assert len(answers) == 8 * n
    assert core.manager.pool.num_used == 0
