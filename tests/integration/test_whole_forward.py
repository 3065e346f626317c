"""All layers as one call of compiled code give the bits of the same layers called one by one."""

import platform
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from paged_sequences import PagedSequence, packed_step, paged_sequences
from tiny_models import Architecture, make_tiny_model

from kvwatch_engine.contracts.step import StepInput
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.model.attention import StepAttention
from kvwatch_engine.model.kv_groups import LayerPlaces
from kvwatch_engine.model.loader import LoadedModel, load_model
from kvwatch_engine.model.runner import ModelRunner
from kvwatch_engine.model.whole_forward import WholeForward
from kvwatch_kernels.cpu.program import Program
from kvwatch_kernels.cpu.rms_norm import rms_norm_call
from kvwatch_kernels.errors import ShapeError
from kvwatch_kernels.forward import OPERATIONS
from kvwatch_kernels.linear import is_fast
from kvwatch_kernels.rms_norm import rms_norm

BLOCK_SIZE = 8
NUM_BLOCKS = 400
CHUNKS = (3, 1, 40, 1, 1, 100, 7)
"""Tokens of a sequence in each step, at most."""


@pytest.fixture(autouse=True)
def restored_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def loaded(architecture: Architecture, dtype: str, folder: Path) -> LoadedModel:
    if not is_fast(torch.device("cpu"), getattr(torch, dtype)):
        pytest.skip(f"this processor has no panels of our own for {dtype}")
    return load_model(str(make_tiny_model(architecture, folder)), dtype=dtype)


def cache_of(model: LoadedModel, kv_dtype: str = "auto") -> KVCache:
    return KVCache(model.cache_spec(BLOCK_SIZE, kv_dtype), NUM_BLOCKS)  # type: ignore[arg-type]


def whole_of(model: LoadedModel, cache: KVCache) -> WholeForward:
    whole = WholeForward.of(model.decoder, cache, LayerPlaces(model.info.groups))
    assert whole is not None
    return whole


def steps_of(model: LoadedModel, lengths: list[int]) -> Iterator[StepInput]:
    """Yield steps that mix prefill chunks and decodes until all sequences are done."""
    prompts = [[(31 * n + 7 * i) % 500 for i in range(length)] for n, length in enumerate(lengths)]
    sequences: list[PagedSequence] = paged_sequences(
        prompts, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, num_groups=len(model.info.groups), seed=1
    )
    turn = 0
    while any(s.num_computed < len(s.token_ids) for s in sequences):
        parts = []
        for index, sequence in enumerate(sequences):
            left = len(sequence.token_ids) - sequence.num_computed
            if left:
                parts.append((sequence, min(left, CHUNKS[(turn + index) % len(CHUNKS)])))
        yield packed_step(parts, block_size=BLOCK_SIZE, windows=[group.window for group in model.info.groups])
        for sequence, count in parts:
            sequence.num_computed += count
        turn += 1


def layer_by_layer(model: LoadedModel, cache: KVCache, step: StepInput) -> torch.Tensor:
    attention = StepAttention.of_step(cache, step, LayerPlaces(model.info.groups))
    return model.decoder.hidden_states(torch.tensor(step.token_ids), torch.tensor(step.positions), attention)


def at_once(whole: WholeForward, model: LoadedModel, cache: KVCache, step: StepInput) -> torch.Tensor:
    attention = StepAttention.of_step(cache, step, LayerPlaces(model.info.groups))
    whole.run(step.token_ids, step.positions, attention)
    return whole.hidden_states()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3", "gemma3"])
def test_the_same_bits_in_every_step(architecture: Architecture, dtype: str, tmp_path: Path) -> None:
    model = loaded(architecture, dtype, tmp_path)
    one, other = cache_of(model), cache_of(model)
    whole = whole_of(model, other)

    with torch.inference_mode():
        for step in steps_of(model, [5, 300, 41, 1, 130]):
            expected = layer_by_layer(model, one, step)
            assert torch.equal(at_once(whole, model, other, step), expected), step.num_tokens
    assert torch.equal(one.blocks, other.blocks)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_bits_over_a_quantised_cache(dtype: str, kv_dtype: str, tmp_path: Path) -> None:
    model = loaded("llama", dtype, tmp_path)
    one, other = cache_of(model, kv_dtype), cache_of(model, kv_dtype)
    whole = whole_of(model, other)

    with torch.inference_mode():
        for step in steps_of(model, [5, 150, 41]):
            expected = layer_by_layer(model, one, step)
            assert torch.equal(at_once(whole, model, other, step), expected), step.num_tokens
    assert torch.equal(one.blocks, other.blocks)


def test_the_number_of_threads_changes_no_bit_and_may_change(tmp_path: Path) -> None:
    model = loaded("qwen3", "float32", tmp_path)
    one, other = cache_of(model), cache_of(model)
    whole = whole_of(model, other)

    with torch.inference_mode():
        for number, step in enumerate(steps_of(model, [200, 90])):
            torch.set_num_threads(1)
            expected = layer_by_layer(model, one, step)
            torch.set_num_threads((2, 1, 4, 3)[number % 4])
            assert torch.equal(at_once(whole, model, other, step), expected)


def test_more_tokens_than_ever_before_make_room(tmp_path: Path) -> None:
    model = loaded("llama", "float32", tmp_path)
    one, other = cache_of(model), cache_of(model)
    whole = whole_of(model, other)

    with torch.inference_mode():
        for length in (1, 63, 64, 65, 700):
            prompt = [i % 500 for i in range(length)]
            (sequence,) = paged_sequences([prompt], block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, seed=3)
            step = packed_step([(sequence, length)], block_size=BLOCK_SIZE)
            assert torch.equal(at_once(whole, model, other, step), layer_by_layer(model, one, step)), length


def test_a_block_outside_of_the_cache_is_told_and_the_next_step_is_right(tmp_path: Path) -> None:
    model = loaded("llama", "float32", tmp_path)
    one, other = cache_of(model), cache_of(model)
    whole = whole_of(model, other)
    step = next(iter(steps_of(model, [20])))
    group = step.groups[0]
    wrong = np.full_like(group.block_tables, NUM_BLOCKS + 5)

    with torch.inference_mode():
        attention = StepAttention(
            other,
            [type(group)(slot_mapping=group.slot_mapping, block_tables=wrong)],
            query_starts=step.query_starts,
            context_lens=step.context_lens,
        )
        with pytest.raises(ShapeError, match=f"block_tables names block {NUM_BLOCKS + 5}"):
            whole.run(step.token_ids, step.positions, attention)
        assert torch.equal(at_once(whole, model, other, step), layer_by_layer(model, one, step))


def test_the_time_of_a_run_is_that_of_its_operations(tmp_path: Path) -> None:
    model = loaded("llama", "float32", tmp_path)
    cache = cache_of(model)
    whole = whole_of(model, cache)

    with torch.inference_mode():
        for step in steps_of(model, [300, 200]):
            started = time.perf_counter_ns()
            at_once(whole, model, cache, step)
            passed = time.perf_counter_ns() - started
            durations = whole.operation_times()
            if platform.machine() in ("x86_64", "AMD64"):
                assert durations is not None
            if durations is not None:
                assert durations._fields == tuple(f"{operation}_ns" for operation in OPERATIONS)
                assert all(duration > 0 for duration in durations)
                assert sum(durations) <= passed


def test_the_runner_takes_it_where_it_can_and_tells_the_time_of_the_operations(tmp_path: Path) -> None:
    model = loaded("llama", "float32", tmp_path)
    runner = ModelRunner(model, cache_of(model))

    assert runner.runs_whole_steps
    for step in steps_of(model, [60, 40]):
        result = runner.execute(step)
        times = (*(result.operations or ()), result.logits_ns)
        assert all(each is not None and each >= 0 for each in times)
        assert sum(each or 0 for each in times) <= result.forward_ns
        if platform.machine() in ("x86_64", "AMD64"):
            assert result.operations is not None


def test_a_model_of_transformers_runs_layer_by_layer(tmp_path: Path) -> None:
    folder = str(make_tiny_model("llama", tmp_path))
    model = load_model(folder, dtype="float32", implementation="transformers")
    runner = ModelRunner(model, cache_of(model))

    assert not runner.runs_whole_steps
    for step in steps_of(model, [12]):
        result = runner.execute(step)
        assert result.operations is None, "nobody has measured them"
        assert result.logits_ns is not None
        assert 0 < result.logits_ns <= result.forward_ns


def test_threads_wait_for_each_other_between_two_calls() -> None:
    """Each norm reads what the one before it wrote, in small pieces: one that ran ahead would read old numbers."""
    width, num_rows = 64, 4_096
    weight = torch.full((width,), 1.5)
    buffers = [torch.randn(num_rows, width) for _ in range(20)]
    expected = buffers[0]
    for _ in buffers[1:]:
        expected = rms_norm(expected, weight, 1e-6)
    calls = [rms_norm_call(x, weight, 1e-6, None, out, width) for x, out in pairwise(buffers)]
    program = Program(calls, [0] * len(calls))
    torch.set_num_threads(3)

    for _ in range(30):
        for buffer in buffers[1:]:
            buffer.fill_(7.0)
        program.begin()
        program.run()
        assert torch.equal(buffers[-1], expected)


def test_time_counts_to_the_kind_of_the_call_that_took_it() -> None:
    """Of three kinds the second has thousands of times the work of the others, before and after which it is called."""
    weight = torch.ones(1024)
    small, large = torch.randn(1, 1024), torch.randn(4_096, 1024)
    out_small, out_large = torch.empty_like(small), torch.empty_like(large)
    little = rms_norm_call(small, weight, 1e-6, None, out_small, 1024)
    much = rms_norm_call(large, weight, 1e-6, None, out_large, 1024)
    program = Program([little, much, little, much], kinds=[0, 1, 2, 1])
    torch.set_num_threads(1)

    durations = []
    for _ in range(20):
        program.begin()
        program.run()
        durations.append(program.durations_ns())

    if None in durations:
        pytest.skip("this processor has no clock that can be read")
    first, second, third = (min(each[kind] for each in durations if each is not None) for kind in range(3))
    assert second > 20 * first
    assert second > 20 * third


def test_calls_are_counted_by_what_a_layer_is_made_of(tmp_path: Path) -> None:
    model = loaded("llama", "float32", tmp_path)
    cache = cache_of(model)
    whole = whole_of(model, cache)
    with torch.inference_mode():
        at_once(whole, model, cache, next(iter(steps_of(model, [5]))))

    num_layers = len(model.decoder.weights.layers)  # type: ignore[attr-defined]
    per_layer = {"linear": 4, "attention": 1, "rotary": 1, "norm": 2, "activation": 1}
    assert whole.num_calls() == {operation: num * num_layers for operation, num in per_layer.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_logits_have_the_same_bits_and_the_best_of_them_is_the_first(
    architecture: Architecture, dtype: str, tmp_path: Path
) -> None:
    model = loaded(architecture, dtype, tmp_path)
    one, other = cache_of(model), cache_of(model)
    whole = whole_of(model, other)
    assert whole.has_logits

    with torch.inference_mode():
        for step in steps_of(model, [5, 300, 41, 1, 130]):
            rows = np.arange(step.num_tokens - 1, -1, -3, dtype=np.int64)
            expected = model.decoder.logits(layer_by_layer(model, one, step)[torch.tensor(rows)])
            whole.run(
                step.token_ids, step.positions, StepAttention.of_step(other, step, LayerPlaces(model.info.groups))
            )
            logits = whole.logits(rows)
            assert torch.equal(torch.tensor(np.stack([logits.row(i) for i in range(len(rows))])), expected)
            assert logits.best == expected.numpy().argmax(axis=1).tolist()
            assert logits.are_finite == [True] * len(rows)


@pytest.mark.parametrize("is_token", [True, False], ids=["token_ids", "positions"])
def test_a_row_that_a_table_does_not_have_is_told_and_the_next_step_is_right(is_token: bool, tmp_path: Path) -> None:
    model = loaded("llama", "float32", tmp_path)
    one, other = cache_of(model), cache_of(model)
    whole = whole_of(model, other)
    step = next(iter(steps_of(model, [20])))
    columns = [np.array(step.token_ids), np.array(step.positions)]
    columns[0 if is_token else 1][1] = -3

    with torch.inference_mode():
        attention = StepAttention.of_step(other, step, LayerPlaces(model.info.groups))
        with pytest.raises(ShapeError, match="a token's id or position is -3"):
            whole.run(columns[0], columns[1], attention)
        assert torch.equal(at_once(whole, model, other, step), layer_by_layer(model, one, step))


def test_positions_beyond_all_so_far_get_angles(tmp_path: Path) -> None:
    model = loaded("llama", "float32", tmp_path)
    one, other = cache_of(model), cache_of(model)
    whole = whole_of(model, other)

    with torch.inference_mode():
        for first in (0, 4_090, 9_000):
            step = next(iter(steps_of(model, [12])))
            moved = replace(step, positions=step.positions + first)
            assert torch.equal(at_once(whole, model, other, moved), layer_by_layer(model, one, moved)), first
