"""Gemma 3 270M, whose layers are of two kinds, served for real: text as transformers', blocks as its windows say."""

from collections.abc import Iterator

import pytest
import torch
from gemma3 import WINDOW, gemma_folder, texts
from grouped_models import Reference, WatchedEngine
from transformers import AutoTokenizer

from kvwatch.telemetry import metrics as m
from kvwatch_engine.model.loader import LoadedModel, load_model

LENGTHS = (10, 60, 150, 300, 505, 530, 800, 1100, 1500, 2000)
"""Of the prompts in tokens: below, at and far beyond the window."""
NUM_TOKENS = 16
BLOCK_SIZE = 16

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Pieces of the texts; the two longest begin alike."""
    tokenizer = AutoTokenizer.from_pretrained(gemma_folder())
    token_ids = tokenizer(texts()).input_ids
    begin = token_ids[0]
    assert begin == tokenizer.bos_token_id
    pieces, first = [], 1
    for length in LENGTHS[:-1]:
        pieces.append([begin, *token_ids[first : first + length - 1]])
        first += length // 2
    longest = [*pieces[-1][:1000], *token_ids[-1000:]]
    return [*pieces, longest]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(str(gemma_folder()), dtype="float32")


@pytest.fixture(scope="module")
def reference() -> Iterator[Reference]:
    reference = Reference.load(gemma_folder())
    yield reference
    assert reference.num_excused <= 2


@pytest.fixture(scope="module")
def expected(reference: Reference, prompts: list[list[int]]) -> list[list[int]]:
    return [reference.answer(prompt, NUM_TOKENS) for prompt in prompts]


def engine_for(model: LoadedModel, num_blocks: int) -> WatchedEngine:
    return WatchedEngine(
        model,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=4096,
        max_num_seqs=4,
        max_batch_tokens=256,
        watermark_blocks=8,
    )


def test_its_layers_make_five_sliding_groups_and_a_full_one(model: LoadedModel) -> None:
    assert [(len(group.layers), group.window) for group in model.info.groups] == [(3, None)] + [(3, WINDOW)] * 5
    assert [group.layers[0] for group in model.info.groups] == [5, 0, 3, 7, 10, 14]
    assert model.info.architecture == "Gemma3ForCausalLM"


def test_greedy_text_is_transformers_with_the_prefix_cache_on(
    model: LoadedModel, reference: Reference, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """Cold, then warm; in a batch, with chunks that cross the window; the pool is full of NaN before."""
    engine = engine_for(model, num_blocks=2600)
    for is_warm in (False, True):
        for prompt, (answer,), wanted in zip(prompts, engine.run(prompts, NUM_TOKENS), expected, strict=True):
            reference.check(prompt, answer, wanted)
        hits = engine.mirror.view.value(m.PREFIX_CACHE_HIT_TOKENS, "device") or 0.0
        # Alike are 1,000 tokens of the two longest: 62 blocks, which begin to be known while both are computed.
        assert hits >= (sum(length - 1 - BLOCK_SIZE for length in LENGTHS[:-1]) if is_warm else 0)

    bound = WINDOW // BLOCK_SIZE + 2
    assert engine.most_held[0] == -(-(max(LENGTHS) + NUM_TOKENS - 1) // BLOCK_SIZE)
    assert all(engine.most_held[number] <= bound for number in range(1, 6))
    assert engine.mirror.ledger.differences(engine.core.snapshot()) == []


def test_greedy_text_is_transformers_in_a_pool_too_small(
    model: LoadedModel, reference: Reference, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """The longest alone needs 126 blocks with full attention and 5 * 49 with windows while its chunks are computed."""
    engine = engine_for(model, num_blocks=560)
    for prompt, (answer,), wanted in zip(prompts, engine.run(prompts, NUM_TOKENS), expected, strict=True):
        reference.check(prompt, answer, wanted)

    assert engine.core.scheduler.num_preemptions > 0 or engine.core.scheduler.admission.waiting_for == {}


@pytest.fixture(scope="module", autouse=True)
def two_torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
