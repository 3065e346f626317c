"""Quantised KV caches through the whole engine: the same model, more tokens in the memory, nearly the same text."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from kv_quality import MAX_PERPLEXITY_RISE, MIN_AGREEMENT, long_texts, predict
from paged_sequences import packed_step, paged_sequences, sample_row
from server_process import ServerProcess, serve_process
from tiny_models import embedded_model_folder, make_tiny_model

from kvwatch_engine.contracts.cache import QUANTISED_DTYPES, KVDtype
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.model.loader import LoadedModel, load_model
from kvwatch_engine.model.runner import ModelRunner
from kvwatch_kernels.quant import dequantise

KV_DTYPES = tuple(QUANTISED_DTYPES)
BLOCK_SIZE = 4
PROMPT = list(range(3, 40))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(str(make_tiny_model("qwen3", tmp_path_factory.mktemp("model"))), dtype="float32")


def runner_with(model: LoadedModel, kv_dtype: KVDtype, num_blocks: int = 32) -> ModelRunner:
    return ModelRunner(model, KVCache(model.cache_spec(BLOCK_SIZE, kv_dtype), num_blocks))


def run_prompt(runner: ModelRunner) -> tuple[list[int], list[int]]:
    """Prefill in two chunks, decode five tokens; return all tokens and the block ids."""
    sequence = paged_sequences([PROMPT], block_size=BLOCK_SIZE, num_blocks=32, max_new_tokens=5)[0]
    runner.execute(packed_step([(sequence, 20)], block_size=BLOCK_SIZE))
    sequence.num_computed = 20
    for _ in range(5):
        count = len(sequence.token_ids) - sequence.num_computed
        step = packed_step([(sequence, count)], block_size=BLOCK_SIZE, sampled=[(0, sample_row())])
        sequence.num_computed += count
        sequence.token_ids += runner.execute(step).token_ids
    return sequence.token_ids, sequence.block_ids


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_the_cache_holds_what_the_plain_cache_holds_but_for_rounding(model: LoadedModel, kv_dtype: KVDtype) -> None:
    plain, quantised = runner_with(model, "auto"), runner_with(model, kv_dtype)

    _, blocks = run_prompt(plain)
    run_prompt(quantised)

    scales = quantised.kv_cache.scales
    assert scales is not None
    expected = plain.kv_cache.data[blocks[:5]]  # the first 20 tokens: they come before any sampled one
    actual = dequantise(quantised.kv_cache.data, scales)[blocks[:5]]
    # Layer by layer errors add up: only the first layer's keys and values come from equal inputs.
    tolerance = {"int8": 0.004, "fp8_e4m3": 0.0626, "fp8_e5m2": 0.126}[kv_dtype]
    largest = expected[:, 0].abs().amax(dim=-1, keepdim=True)
    assert ((actual - expected)[:, 0].abs() / largest).max() < tolerance
    assert not torch.equal(actual, expected)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_copied_block_reads_like_its_source(model: LoadedModel, kv_dtype: KVDtype) -> None:
    """Copy-on-write takes the scales along: a fork into a copied block goes on like the original."""
    runner = runner_with(model, kv_dtype)
    tokens, blocks = run_prompt(runner)
    fork = paged_sequences([tokens[:-1]], block_size=BLOCK_SIZE, num_blocks=32)[0]
    last = len(fork.token_ids) - 1
    spare = next(block for block in range(1, 32) if block not in blocks)
    fork.block_ids = list(blocks[: last // BLOCK_SIZE + 1])
    source, fork.block_ids[-1] = fork.block_ids[-1], spare
    fork.num_computed = last
    runner.kv_cache.copy_blocks(np.array([source]), np.array([spare]))
    runner.kv_cache.blocks[source] = 0xFF

    step = packed_step([(fork, 1)], block_size=BLOCK_SIZE, sampled=[(0, sample_row())])

    assert runner.execute(step).token_ids == tokens[-1:]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_warm_up_and_rebind_serve_quantised_caches(model: LoadedModel, kv_dtype: KVDtype) -> None:
    runner = runner_with(model, "auto")
    runner.rebind(KVCache(model.cache_spec(8, kv_dtype), 32))

    runner.warm_up(20)

    assert (runner.kv_cache.blocks == 0).all()
    assert runner.kv_cache.spec.is_quantised


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_broken_sequence_does_not_reach_its_neighbours(model: LoadedModel, kv_dtype: KVDtype) -> None:
    """A NaN in one sequence's scales, as a broken number would leave it, stays in that sequence."""
    expected = runner_with(model, kv_dtype)
    runner = runner_with(model, kv_dtype)
    whole, broken = paged_sequences([PROMPT, PROMPT], block_size=BLOCK_SIZE, num_blocks=32, max_new_tokens=2)
    for each in (expected, runner):
        each.execute(packed_step([(whole, 36), (broken, 36)], block_size=BLOCK_SIZE))
    scales = runner.kv_cache.scales
    assert scales is not None
    scales[broken.block_ids[1]] = float("nan")
    whole.num_computed = broken.num_computed = 36

    step = packed_step([(whole, 1), (broken, 1)], block_size=BLOCK_SIZE, sampled=[(0, sample_row())])

    assert runner.execute(step).token_ids == expected.execute(step).token_ids


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serve_process(
        embedded_model_folder(), "--served-model-name", "smol", "--kv-dtype", "int8", "--kv-memory", "64MiB"
    ) as running:
        yield running


@pytest.mark.model
def test_the_embedded_model_answers_from_an_int8_cache(server: ServerProcess) -> None:
    with server.openai() as client:
        answer = client.chat.completions.create(
            model="smol",
            messages=[{"role": "user", "content": "What is the capital of France? Answer briefly."}],
            temperature=0,
            max_tokens=20,
        )

    assert answer.choices[0].message.content == "The capital of France is Paris."


@pytest.mark.model
def test_the_metrics_tell_the_true_size_of_quantised_blocks(server: ServerProcess) -> None:
    """Of 30 layers, 3 heads of 64, 16 tokens: a byte for an element and four for the scale of a head."""
    metrics = server.metrics()
    block_bytes = 16 * 30 * 2 * 3 * (64 + 4)

    (size,) = {value for name, value in metrics.items() if re.match(r"kvwatch_kv_block_bytes\b", name)}
    (capacity,) = {value for name, value in metrics.items() if re.match(r"kvwatch_kv_token_capacity\b", name)}

    assert size == block_bytes
    assert capacity == (64 * 2**20 // block_bytes - 1) * 16


@pytest.mark.model
def test_on_one_text_predictions_stay_close() -> None:
    """The short version of the test below."""
    embedded, texts = embedded_and_texts(["dialogue"])
    plain = predict(embedded, texts, "auto")
    assert len(plain.best) > 900

    for kv_dtype in KV_DTYPES:
        quantised = predict(embedded, texts, kv_dtype)
        assert quantised.rise_over(plain) <= 1.5 * MAX_PERPLEXITY_RISE[kv_dtype], kv_dtype
        assert MIN_AGREEMENT[kv_dtype] <= quantised.agreement_with(plain) < 1.0, kv_dtype


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_on_eight_thousand_tokens_perplexity_and_best_tokens_stay_within_bounds() -> None:
    embedded, texts = embedded_and_texts()
    plain = predict(embedded, texts, "auto")
    assert len(plain.best) >= 8000

    for kv_dtype in KV_DTYPES:
        quantised = predict(embedded, texts, kv_dtype)
        assert quantised.rise_over(plain) <= MAX_PERPLEXITY_RISE[kv_dtype], kv_dtype
        assert MIN_AGREEMENT[kv_dtype] <= quantised.agreement_with(plain) < 1.0, kv_dtype


def embedded_and_texts(names: list[str] | None = None) -> tuple[LoadedModel, list[list[int]]]:
    """The embedded model, computing in float32, and texts in its tokens."""
    folder: Path = embedded_model_folder()
    return load_model(str(folder), dtype="float32"), long_texts(folder, names)
