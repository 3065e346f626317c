"""The model runner on a device: what it says is what it says on the CPU, with graphs and without, before and after
`rebind`."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the engine's models need transformers")

from paged_sequences import packed_step, paged_sequences, sample_row
from tiny_models import make_tiny_model

from kvwatch_engine.contracts.cache import KVDtype
from kvwatch_engine.contracts.sampling import SamplingParams
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.model.devices import choose_device
from kvwatch_engine.model.loader import LoadedModel, load_model
from kvwatch_engine.model.runner import ModelRunner

BLOCK_SIZE, NUM_BLOCKS = 16, 64
LENGTHS = (5, 33, 1, 16, 20)
PARAMS = SamplingParams(temperature=0.0, logprobs=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Heads of 64, which is the least that the kernels are made for.
    return make_tiny_model("qwen3", tmp_path_factory.mktemp("qwen3"), head_dim=64)


@pytest.fixture(scope="module")
def on_cpu(folder: Path) -> LoadedModel:
    return load_model(str(folder), dtype="float32")


@pytest.fixture(scope="module")
def on_gpu(folder: Path) -> Iterator[LoadedModel]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # no TF32: the CPU is the oracle
    yield load_model(str(folder), dtype="float32", device=choose_device("cuda"))
    torch.set_float32_matmul_precision(before)


def runner_of(model: LoadedModel, kv_dtype: KVDtype = "auto", *, num_blocks: int = NUM_BLOCKS) -> ModelRunner:
    return ModelRunner(model, KVCache(model.cache_spec(BLOCK_SIZE, kv_dtype), num_blocks, model.device))


def generated(runner: ModelRunner, *, num_new: int = 8, chunk: int = 1000) -> tuple[list[list[int]], list[list[float]]]:
    """Return the tokens and their logprobs that greedy decoding of all prompts in one batch gives."""
    prompts = [[(7 * i + 3 * length) % 500 for i in range(length)] for length in LENGTHS]
    sequences = paged_sequences(prompts, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, max_new_tokens=num_new)
    tokens: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
    while min(map(len, tokens)) < num_new:
        parts = [(s, min(chunk, len(s.token_ids) - s.num_computed)) for s in sequences]
        rows = [
            (index, sample_row(PARAMS, position=len(tokens[index])))
            for index, (s, count) in enumerate(parts)
            if s.num_computed + count == len(s.token_ids)
        ]
        result = runner.execute(packed_step(parts, block_size=BLOCK_SIZE, sampled=rows))
        for sequence, count in parts:
            sequence.num_computed += count
        for (index, _), token, position in zip(rows, result.token_ids, result.logprobs, strict=True):
            assert position is not None
            sequences[index].token_ids.append(token)
            tokens[index].append(token)
            logprobs[index].append(position.chosen.logprob)
    return [line[:num_new] for line in tokens], [line[:num_new] for line in logprobs]


def assert_alike(found: ModelRunner, expected: ModelRunner, *, within: float, chunk: int = 1000) -> None:
    tokens, logprobs = generated(found, chunk=chunk)
    expected_tokens, expected_logprobs = generated(expected, chunk=chunk)
    assert tokens == expected_tokens
    for line, expected_line in zip(logprobs, expected_logprobs, strict=True):
        assert line == pytest.approx(expected_line, abs=within)


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("chunk", [1000, 4])
def test_the_device_generates_what_the_cpu_generates(
    on_cpu: LoadedModel, on_gpu: LoadedModel, is_captured: bool, chunk: int
) -> None:
    runner = runner_of(on_gpu)
    if is_captured:
        runner.warm_up(128)

    assert_alike(runner, runner_of(on_cpu), within=1e-3, chunk=chunk)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8_e4m3", "fp8_e5m2"])
def test_with_a_quantised_cache_it_generates_what_the_cpu_generates_with_one(
    on_cpu: LoadedModel, on_gpu: LoadedModel, kv_dtype: KVDtype
) -> None:
    runner = runner_of(on_gpu, kv_dtype)
    runner.warm_up(128)

    # Keys that differ in their last bit may be rounded to different bytes.
    assert_alike(runner, runner_of(on_cpu, kv_dtype), within=3e-2)


def test_graphs_are_captured_anew_for_another_cache(on_cpu: LoadedModel, on_gpu: LoadedModel) -> None:
    runner = runner_of(on_gpu)
    runner.warm_up(128)
    generated(runner)

    runner.rebind(KVCache(on_gpu.cache_spec(BLOCK_SIZE), NUM_BLOCKS + 8, on_gpu.device))

    assert_alike(runner, runner_of(on_cpu), within=1e-3)


def test_a_rebuilt_cache_keeps_its_blocks_and_graphs_read_it(on_cpu: LoadedModel, on_gpu: LoadedModel) -> None:
    runner = runner_of(on_gpu)
    runner.warm_up(128)
    runner.kv_cache.blocks[9] = 7

    runner.rebuild(NUM_BLOCKS - 8, torch.tensor([9]).numpy(), torch.tensor([2]).numpy())

    assert (runner.kv_cache.blocks[2] == 7).all()
    assert not runner.kv_cache.blocks[9].any()
    runner.rebuild(NUM_BLOCKS, torch.zeros(0, dtype=torch.int64).numpy(), torch.zeros(0, dtype=torch.int64).numpy())
    assert_alike(runner, runner_of(on_cpu), within=1e-3)


def test_capturing_writes_nothing_to_the_cache(on_gpu: LoadedModel) -> None:
    runner = runner_of(on_gpu)

    runner.warm_up(128)

    assert not runner.kv_cache.blocks.any()


def test_a_fork_continues_in_a_copy_of_its_block(on_gpu: LoadedModel) -> None:
    runner = runner_of(on_gpu)
    cache = runner.kv_cache
    cache.blocks[3] = 7
    cache.copy_blocks(torch.tensor([3]).numpy(), torch.tensor([5]).numpy())

    assert torch.equal(cache.blocks[5], cache.blocks[3])
