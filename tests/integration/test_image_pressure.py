"""Prompts with images while blocks move: swapped, restored from the host, laid out anew, shared by beams."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from builders import Recorder
from image_engine import BLOCK_SIZE, answers, cached_tokens, check, make_engine
from image_oracle import NUM_NEW_TOKENS, Oracle, Prompt
from tiny_vision_model import IMAGE, make_tiny_vision_model

from kvwatch.telemetry.events import RequestPreempted
from kvwatch_engine.contracts.sampling import BeamParams
from kvwatch_engine.core import EngineCore
from kvwatch_engine.live.changer import Changer, RebuildLimits
from kvwatch_engine.model.loader import LoadedModel, load_model


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision_model(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(str(folder), dtype="float32")


@pytest.fixture(scope="module")
def prompts(oracle: Oracle) -> list[Prompt]:
    return [oracle.prompt(f"look at {IMAGE} and {IMAGE}: {seed}", seed % 3, seed) for seed in range(6)]


def test_requests_with_images_are_swapped_out_and_in(oracle: Oracle, model: LoadedModel, prompts: list[Prompt]) -> None:
    core = make_engine(
        model, host_blocks=200, num_blocks=24, max_prefill_chunk=5, reserve_prompt=False, preemption_mode="swap"
    )
    recorder = Recorder(core.log)

    found = answers(core, prompts)

    assert "swap" in {event.mode for event in recorder.drain() if isinstance(event, RequestPreempted)}
    check(oracle, prompts, found)


def test_the_host_gives_back_the_blocks_of_an_image_to_that_image_only(oracle: Oracle, model: LoadedModel) -> None:
    words = "the same words stand before it: "
    first, other = oracle.prompt(f"{words}{IMAGE}!", 1), oracle.prompt(f"{words}{IMAGE}!", 2)
    core = make_engine(model, host_blocks=200, num_blocks=24)
    before = first.images[0].position // BLOCK_SIZE * BLOCK_SIZE
    assert cached_tokens(core, first) == 0
    for seed in range(10, 14):  # until nothing of it is left on the device
        answers(core, [oracle.prompt(f"{IMAGE}{IMAGE}", seed, seed)])

    assert cached_tokens(core, other) == before
    assert cached_tokens(core, first) == (len(first.token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE
    check(oracle, [first, other], answers(core, [first, other]))


def test_blocks_of_another_size_hold_the_same_images_and_no_others(
    oracle: Oracle, model: LoadedModel, prompts: list[Prompt]
) -> None:
    core = make_engine(model, max_prefill_chunk=5, max_batch_tokens=16)
    changer = Changer(core, RebuildLimits(cooldown_seconds=0.0))
    for index, prompt in enumerate(prompts):
        core.add(prompt.request(str(index)), 0)
    tokens: dict[str, list[int]] = {}
    num_changes = 0
    while core.has_work:
        for output in core.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        if core.num_steps % 5 == 0:
            change_block_size(core, changer, (8, 2, 4)[num_changes % 3])
            num_changes += 1

    assert num_changes > 3
    check(oracle, prompts, [tokens[str(index)] for index in range(len(prompts))])
    other = oracle.prompt(f"look at {IMAGE} and {IMAGE}: 1", 1, 9)
    size = core.settings.block_size
    answers(core, [prompts[1]])
    assert cached_tokens(core, prompts[1]) == (len(prompts[1].token_ids) - 1) // size * size
    assert cached_tokens(core, other) == other.images[1].position // size * size


def change_block_size(core: EngineCore, changer: Changer, size: int) -> None:
    _, carry_out = changer.prepare({"block_size": size}, [], actor="test", reason="", version=None)
    carry_out()
    core.check_integrity()


def test_beams_see_the_image_and_find_what_transformers_finds(oracle: Oracle, model: LoadedModel) -> None:
    prompt = oracle.prompt(f"look: {IMAGE}!", 6)
    ids = torch.tensor([prompt.token_ids])
    with torch.inference_mode():
        expected = oracle.model.generate(
            input_ids=ids, **prompt.seen(), attention_mask=torch.ones_like(ids), num_beams=3, num_return_sequences=3,
            do_sample=False, max_new_tokens=NUM_NEW_TOKENS, eos_token_id=None, pad_token_id=0,
            suppress_tokens=[oracle.placeholder],
        )[:, len(prompt.token_ids) :].tolist()  # fmt: skip
    core = make_engine(model)
    plain = prompt.request("r", n=3)
    core.add(replace(plain, sampling=replace(plain.sampling, beams=BeamParams(width=3))), 0)
    found: dict[int, list[int]] = {}

    while core.has_work:
        for output in core.step():
            found.setdefault(output.sequence, []).extend(output.token_ids)

    assert [found[sequence] for sequence in range(3)] == expected
