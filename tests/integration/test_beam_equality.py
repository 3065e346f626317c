"""Beam search finds transformers' sequences with transformers' scores, whatever the engine does to get there.

In fp32. The sequences are the same; a score may differ by rounding, which grows with the score.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from beam_reference import Found, engine_beams, reference_beams
from builders import Recorder, make_settings
from prompts import PROMPTS
from slot_store import InlineWorker
from tiny_models import VOCAB_SIZE, embedded_model_folder, make_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvwatch.telemetry.events import SwappedIn
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.sampling import BeamParams, EarlyStopping
from kvwatch_engine.core import EngineCore
from kvwatch_engine.memory.block_manager import BlockManager
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.memory.tiers.block_file import StoreIdentity
from kvwatch_engine.memory.tiers.device import device_store
from kvwatch_engine.memory.tiers.tiers import Machine, MemoryTiers, TierSettings
from kvwatch_engine.model.loader import LoadedModel, load_model
from kvwatch_engine.model.runner import ModelRunner
from kvwatch_engine.scheduling.policy import worst_case_blocks

SCORE_TOLERANCE = 1e-4
RELATIVE_TOLERANCE = 1e-6
"""transformers keeps scores in fp32; a negative length penalty makes them large."""


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("beams"), seed=3)


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(str(folder), dtype="float32")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def make_engine(model: LoadedModel, ends: Sequence[int] = (), *, host_blocks: int = 0, **settings: Any) -> EngineCore:
    values: dict[str, object] = {
        "num_blocks": 400, "block_size": 8, "max_model_len": 512, "max_num_seqs": 32, "max_batch_tokens": 128,
        "vocab_size": model.info.vocab_size, "eos_token_ids": tuple(ends), **settings,
    }  # fmt: skip
    limits = make_settings(**values)
    cache = KVCache(model.cache_spec(limits.block_size), limits.num_blocks)
    cache.data.fill_(float("nan"))
    log = EventLog()

    def make_tiers(manager: BlockManager) -> MemoryTiers:
        spec = cache.spec
        identity = StoreIdentity(
            weights_fingerprint=model.info.weights_fingerprint,
            kv_dtype=spec.dtype,
            block_size=spec.block_size,
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
        )
        tiers = TierSettings(host_bytes=host_blocks * spec.block_bytes)
        machine = Machine(device_store(lambda: cache), make_worker=InlineWorker)
        return MemoryTiers(manager, tiers, machine, identity, spec.block_bytes, log)

    return EngineCore(limits, ModelRunner(model, cache), log, make_tiers=make_tiers if host_blocks else None)


def check(found: list[Found], expected: list[Found]) -> None:
    """The same sequences with the same scores; those of equal scores in any order."""
    for place, each in enumerate(expected):
        score = pytest.approx(each.score, rel=RELATIVE_TOLERANCE, abs=SCORE_TOLERANCE)
        assert found[place].score == score
        assert each.token_ids in [ours.token_ids for ours in found if ours.score == score]
    assert len(found) == len(expected)


def random_prompt(random: Random) -> list[int]:
    return [random.randrange(3, VOCAB_SIZE) for _ in range(random.randint(1, 30))]


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0, -1.0])
@pytest.mark.parametrize("width", [2, 4, 6])
def test_every_way_of_searching_finds_what_transformers_finds(
    model: LoadedModel, reference: Any, width: int, length_penalty: float, early_stopping: EarlyStopping
) -> None:
    """With few, many or no end tokens, so that searches end at once, somewhere, or at the last token."""
    random = Random(f"{width} {length_penalty} {early_stopping}")
    for num_ends in (0, 10, 60, 150):
        ends = random.sample(range(3, VOCAB_SIZE), num_ends)
        beams = BeamParams(width=width, length_penalty=length_penalty, early_stopping=early_stopping)
        prompt, max_tokens = random_prompt(random), random.choice([1, 2, 9, 24])

        [found] = engine_beams(make_engine(model, ends), [prompt], beams=beams, n=width, max_tokens=max_tokens)

        check(found, reference_beams(reference, prompt, beams, max_tokens=max_tokens, ends=ends))


def test_never_searches_on_where_false_stops_as_in_transformers(model: LoadedModel, reference: Any) -> None:
    num_different = 0
    for seed in range(6):
        random = Random(seed)
        ends, prompt = random.sample(range(3, VOCAB_SIZE), 20), random_prompt(random)
        found: list[list[Found]] = []
        for early_stopping in (False, "never"):
            beams = BeamParams(width=2, early_stopping=early_stopping)
            found += engine_beams(make_engine(model, ends), [prompt], beams=beams, n=2, max_tokens=40)
            check(found[-1], reference_beams(reference, prompt, beams, max_tokens=40, ends=ends))
        num_different += found[0] != found[1]
    assert num_different, "the seeds are meant to show the difference"


def test_penalties_and_a_least_length_change_scores_as_in_transformers(model: LoadedModel, reference: Any) -> None:
    random = Random(11)
    ends = random.sample(range(3, VOCAB_SIZE), 80)
    beams, prompt = BeamParams(width=4), random_prompt(random)

    [found] = engine_beams(
        make_engine(model, ends), [prompt], beams=beams, n=4, max_tokens=20, min_tokens=6, repetition_penalty=1.3
    )

    expected = reference_beams(
        reference, prompt, beams, max_tokens=20, ends=ends, min_new_tokens=6, repetition_penalty=1.3
    )
    assert min(len(each.token_ids) for each in expected) > 6
    check(found, expected)


@pytest.mark.parametrize("enable_prefix_cache", [True, False])
@pytest.mark.parametrize("block_size", [1, 8, 16])
def test_groups_that_preempt_each_other_in_a_pool_too_small_find_the_same(
    model: LoadedModel, reference: Any, block_size: int, enable_prefix_cache: bool
) -> None:
    random = Random(5)
    prompts = [random_prompt(random) for _ in range(4)]
    beams = BeamParams(width=4, early_stopping="never")
    capacity = max(worst_case_blocks(len(prompt), 30, 4, block_size) for prompt in prompts)
    core = make_engine(
        model, block_size=block_size, num_blocks=1 + capacity, max_prefill_chunk=7,
        enable_prefix_cache=enable_prefix_cache,
    )  # fmt: skip

    found = engine_beams(core, prompts, beams=beams, n=4, max_tokens=30)

    assert core.scheduler.num_preemptions > 0, "the pool is meant to be too small"
    for prompt, group in zip(prompts, found, strict=True):
        check(group, reference_beams(reference, prompt, beams, max_tokens=30))


@pytest.mark.parametrize("block_size", [1, 8])
def test_groups_that_are_swapped_out_and_in_find_the_same(model: LoadedModel, reference: Any, block_size: int) -> None:
    """What beams share is moved once, and shared again."""
    random = Random(5)
    prompts = [random_prompt(random) for _ in range(4)]
    beams = BeamParams(width=4, early_stopping="never")
    capacity = max(worst_case_blocks(len(prompt), 30, 4, block_size) for prompt in prompts)
    core = make_engine(
        model, block_size=block_size, num_blocks=1 + capacity, preemption_mode="swap", host_blocks=4 * capacity
    )
    recorder = Recorder(core.log)

    found = engine_beams(core, prompts, beams=beams, n=4, max_tokens=30)

    swapped = [event for event in recorder.drain() if isinstance(event, SwappedIn)]
    assert swapped, "the pool is meant to be too small"
    for prompt, group in zip(prompts, found, strict=True):
        check(group, reference_beams(reference, prompt, beams, max_tokens=30))


@pytest.mark.model
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("width", "num_prompts"), [(4, 4), (6, 4), *(pytest.param(w, 20, marks=pytest.mark.slow) for w in (4, 6))]
)
def test_the_embedded_model_finds_what_transformers_finds(width: int, num_prompts: int) -> None:
    folder = embedded_model_folder()
    model = load_model("embedded", dtype="float32")
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer(prompt).input_ids for prompt in PROMPTS[:num_prompts]]
    beams, ends = BeamParams(width=width), model.info.eos_token_ids
    core = make_engine(model, ends, block_size=16, max_num_seqs=3 * width)

    found = engine_beams(core, prompts, beams=beams, n=width, max_tokens=20)

    for prompt, group in zip(prompts, found, strict=True):
        check(group, reference_beams(reference, prompt, beams, max_tokens=20, ends=ends))
