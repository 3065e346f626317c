"""The decoder over a paged cache computes what transformers computes, however its tokens are cut and mixed."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_sequences import PagedSequence, packed_step, paged_sequences, sample_row
from tiny_models import ARCHITECTURES, VOCAB_SIZE, Architecture, make_tiny_model
from transformers import AutoModelForCausalLM

from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.model.attention import StepAttention
from kvwatch_engine.model.kv_groups import LayerPlaces
from kvwatch_engine.model.loader import LoadedModel, load_model
from kvwatch_engine.model.runner import ModelRunner

TOLERANCE = 2e-4
NUM_BLOCKS = 400
PROMPT_LENGTHS = (37, 1, 64, 16, 50)
NEW_TOKENS = 24

Part = tuple[PagedSequence, int]


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> Architecture:
    chosen: Architecture = request.param
    return chosen


@pytest.fixture(scope="module")
def folder(architecture: Architecture, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A window shorter than the prompts, so that forgetting it would show; Llama has none.
    window: dict[str, dict[str, Any]] = {
        "llama": {},
        "mistral": {"sliding_window": 13},
        "qwen2": {"use_sliding_window": True, "sliding_window": 13, "max_window_layers": 1},
        "qwen3": {"use_sliding_window": True, "sliding_window": 13, "max_window_layers": 2},
        "gemma3": {"sliding_window": 13},
    }
    return make_tiny_model(architecture, tmp_path_factory.mktemp(architecture), **window[architecture])


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(str(folder), dtype="float32")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def random_prompts() -> list[list[int]]:
    generator = random.Random(7)
    return [[generator.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in PROMPT_LENGTHS]


def nan_filled_cache(model: LoadedModel, block_size: int) -> KVCache:
    """Recycled slots may hold anything; nothing of it may reach a result."""
    cache = KVCache(model.cache_spec(block_size), NUM_BLOCKS)
    cache.data.fill_(float("nan"))
    return cache


def in_one_go(sequences: list[PagedSequence]) -> Iterator[list[Part]]:
    yield [(sequence, len(sequence.token_ids)) for sequence in sequences]


def in_chunks(sequences: list[PagedSequence]) -> Iterator[list[Part]]:
    while left := [(s, min(7, len(s.token_ids) - s.num_computed)) for s in sequences if has_more(s)]:
        yield left


def mixed_with_decode(sequences: list[PagedSequence]) -> Iterator[list[Part]]:
    """Odd sequences advance token by token, even ones in uneven chunks, in changing order."""
    generator = random.Random(3)
    while left := [(i, s) for i, s in enumerate(sequences) if has_more(s)]:
        generator.shuffle(left)
        yield [(s, 1 if i % 2 else min(1 + 6 * i, len(s.token_ids) - s.num_computed)) for i, s in left]


def has_more(sequence: PagedSequence) -> bool:
    return sequence.num_computed < len(sequence.token_ids)


@torch.inference_mode()
def paged_logits(model: LoadedModel, block_size: int, schedule: Any) -> list[torch.Tensor]:
    """Return each prompt's logits at every position, computed step by step as the schedule says."""
    cache = nan_filled_cache(model, block_size)
    groups = model.info.groups
    windows, places = [group.window for group in groups], LayerPlaces(groups)
    sequences = paged_sequences(random_prompts(), block_size=block_size, num_blocks=NUM_BLOCKS, num_groups=len(groups))
    rows: dict[int, list[torch.Tensor]] = {id(sequence): [] for sequence in sequences}
    for parts in schedule(sequences):
        step = packed_step(parts, block_size=block_size, windows=windows)
        attention = StepAttention.of_step(cache, step, places)
        hidden = model.decoder.hidden_states(
            torch.from_numpy(step.token_ids), torch.from_numpy(step.positions), attention
        )
        logits = torch.split(model.decoder.logits(hidden), [count for _, count in parts])
        for (sequence, count), part in zip(parts, logits, strict=True):
            rows[id(sequence)].append(part)
            sequence.num_computed += count
    return [torch.cat(rows[id(sequence)]) for sequence in sequences]


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("schedule", [in_one_go, in_chunks, mixed_with_decode])
def test_logits_equal_those_of_transformers(model: LoadedModel, reference: Any, block_size: int, schedule: Any) -> None:
    computed = paged_logits(model, block_size, schedule)

    for prompt, logits in zip(random_prompts(), computed, strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt])).logits[0]
        assert expected.std() > 0.5, "the reference is not degenerate"
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_greedy_continuations_of_a_batch_equal_generate(model: LoadedModel, reference: Any, block_size: int) -> None:
    prompts = random_prompts()
    runner = ModelRunner(model, nan_filled_cache(model, block_size))
    sequences = paged_sequences(
        prompts,
        block_size=block_size,
        num_blocks=NUM_BLOCKS,
        max_new_tokens=NEW_TOKENS,
        seed=5,
        num_groups=len(model.info.groups),
    )
    windows = [group.window for group in model.info.groups]

    for _ in range(NEW_TOKENS):
        parts = [(s, len(s.token_ids) - s.num_computed) for s in sequences]
        rows = [(index, sample_row()) for index in range(len(parts))]
        result = runner.execute(packed_step(parts, block_size=block_size, sampled=rows, windows=windows))
        for sequence, token_id in zip(sequences, result.token_ids, strict=True):
            sequence.num_computed = len(sequence.token_ids)
            sequence.token_ids.append(token_id)

    for prompt, sequence in zip(prompts, sequences, strict=True):
        generated = reference.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert sequence.token_ids == generated[0].tolist()


def test_bfloat16_stays_near_float32(folder: Path, reference: Any) -> None:
    model = load_model(str(folder), dtype="bfloat16")

    computed = paged_logits(model, 16, in_chunks)

    assert model.info.dtype == "bfloat16"
    for prompt, logits in zip(random_prompts(), computed, strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt])).logits[0]
        assert torch.isfinite(logits).all()
        assert (logits - expected).abs().mean() < 0.05 * expected.std()
