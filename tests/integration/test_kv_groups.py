"""Tiny models with windows served by a real engine: text as transformers', whatever the blocks go through.

Mistral's layers all have a window; Qwen2's and Gemma 3's have it in some, which makes two and more KV groups.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from grouped_models import Reference, WatchedEngine
from tiny_models import VOCAB_SIZE, Architecture, make_tiny_model

from kvwatch.ledger.view import View
from kvwatch.telemetry import metrics as m
from kvwatch_engine.model.loader import LoadedModel, load_model

WINDOW = 21
NUM_TOKENS = 30
LENGTHS = (1, 3, 19, 20, 21, 22, 40, 90, 150)
CONFIGS: dict[Architecture, dict[str, Any]] = {
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "gemma3": {"sliding_window": WINDOW},
}
NUM_GROUPS = {"mistral": 1, "qwen2": 3, "gemma3": 3}


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture: Architecture = request.param
    return make_tiny_model(architecture, tmp_path_factory.mktemp(architecture), **CONFIGS[architecture])


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(str(folder), dtype="float32")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Iterator[Reference]:
    reference = Reference.load(folder)
    yield reference
    assert reference.num_excused <= 1


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Some begin alike, so that they share blocks."""
    generator = random.Random(3)
    common = [generator.randrange(3, VOCAB_SIZE) for _ in range(max(LENGTHS))]
    others = [[generator.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
    return [*others, common, common[:60], [*common[:80], *others[3]], [*common[:100], *others[6]]]


@pytest.fixture(scope="module")
def expected(reference: Reference, prompts: list[list[int]]) -> list[list[int]]:
    return [reference.answer(prompt, NUM_TOKENS) for prompt in prompts]


def watched(model: LoadedModel, **settings: Any) -> WatchedEngine:
    values = {"num_blocks": 500, "block_size": 4, "max_model_len": 256, "max_num_seqs": 8, "max_batch_tokens": 64}
    return WatchedEngine(model, **{**values, **settings})


def check(reference: Reference, prompts: list[list[int]], found: Any, expected: list[list[int]]) -> None:
    for prompt, answers, wanted in zip(prompts, found, expected, strict=True):
        for answer in answers:
            reference.check(prompt, answer, wanted)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("enable_prefix_cache", [True, False])
def test_text_is_transformers_cold_and_warm(
    model: LoadedModel,
    reference: Reference,
    prompts: list[list[int]],
    expected: list[list[int]],
    block_size: int,
    enable_prefix_cache: bool,
) -> None:
    num_blocks = 3000 // block_size * NUM_GROUPS[folder_architecture(model)]
    engine = watched(model, block_size=block_size, num_blocks=num_blocks, enable_prefix_cache=enable_prefix_cache)

    check(reference, prompts, engine.run(prompts, NUM_TOKENS), expected)
    hits = counter(engine, m.PREFIX_CACHE_HIT_TOKENS)
    check(reference, prompts, engine.run(prompts, NUM_TOKENS), expected)

    assert len(engine.core.manager.groups) == NUM_GROUPS[folder_architecture(model)]
    assert (counter(engine, m.PREFIX_CACHE_HIT_TOKENS) > hits + 300) is enable_prefix_cache
    assert all(
        (group.window is None) == (engine.most_held[group.number] * block_size > 170)
        for group in engine.core.manager.groups
    ), "full groups hold everything, sliding groups a window"


def test_text_is_transformers_with_preemptions_forced_by_a_pool_too_small(
    model: LoadedModel, reference: Reference, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    num_blocks = {"mistral": 30, "qwen2": 110, "gemma3": 110}[folder_architecture(model)]
    engine = watched(model, num_blocks=num_blocks, max_prefill_chunk=11)

    check(reference, prompts, engine.run(prompts, NUM_TOKENS), expected)

    assert engine.core.scheduler.num_preemptions > 3, "the pool is meant to be too small"
    assert counter(engine, m.KV_BLOCK_EVICTIONS, "pressure") > 0


def test_samples_share_what_they_have_in_common_in_every_group(
    model: LoadedModel, reference: Reference, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """Greedy, so that all samples of a prompt say the same: copy-on-write keeps each one's blocks its own."""
    engine = watched(model)
    most_shared: dict[str, float] = {}

    def note(view: View) -> None:
        for group in engine.core.manager.groups:
            name = str(group.number)
            shared = view.value(m.KV_SHARED_BLOCKS, "device", name) or 0.0
            most_shared[name] = max(shared, most_shared.get(name, 0.0))

    engine.on_view = note
    check(reference, prompts, engine.run(prompts, NUM_TOKENS, n=3), expected)

    assert min(most_shared.values()) > 2
    assert counter(engine, m.KV_BLOCK_COPIES) >= 2 * len(engine.core.manager.groups)


def test_a_pool_that_is_resized_in_the_middle_changes_nothing(
    model: LoadedModel, reference: Reference, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    engine = watched(model, num_blocks=600)
    sizes = iter([900, 450, 700, 430] * 10)

    def resize_now_and_then(_view: View) -> None:
        if engine.core.num_steps % 7 == 3:
            engine.core.resize(engine.core.prepare_resize(next(sizes)))

    engine.on_view = resize_now_and_then

    check(reference, prompts, engine.run(prompts, NUM_TOKENS), expected)


def counter(engine: WatchedEngine, metric: Any, reason: str | None = None) -> float:
    """Return a counter of the device."""
    labels = ("device",) if reason is None else ("device", reason)
    return engine.mirror.view.value(metric, *labels) or 0.0


def folder_architecture(model: LoadedModel) -> str:
    return {"MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2", "Gemma3ForCausalLM": "gemma3"}[
        model.info.architecture
    ]
