"""One step of the runner: copies, forward pass, sampling, and what it leaves alone."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from paged_sequences import GREEDY, PagedSequence, packed_step, paged_sequences, sample_row
from tiny_models import embedded_model_folder, make_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvwatch_engine.contracts.sampling import SamplingParams
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.model.loader import LoadedModel, load_model
from kvwatch_engine.model.runner import ModelRunner

BLOCK_SIZE = 8
PROMPT = [(7 * i + 11) % 500 for i in range(20)]


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(str(make_tiny_model("qwen3", tmp_path_factory.mktemp("qwen3"))), dtype="float32")


@pytest.fixture
def runner(model: LoadedModel) -> ModelRunner:
    return ModelRunner(model, KVCache(model.cache_spec(BLOCK_SIZE), 32))


def sequence_of(prompt: list[int], max_new_tokens: int = 0, seed: int = 0) -> PagedSequence:
    return paged_sequences(
        [prompt], block_size=BLOCK_SIZE, num_blocks=32, max_new_tokens=max_new_tokens, seed=seed
    )[0]  # fmt: skip


def sampled_text(runner: ModelRunner, chunk: int, *, seed: int, others: int = 0) -> list[int]:
    """Generate 12 tokens of PROMPT at temperature 1, prefilled in chunks beside other sequences."""
    params = SamplingParams(temperature=1.0, top_p=0.95)
    prompts = [PROMPT, *([[3 + i] * 5 for i in range(others)])]
    sequences = paged_sequences(prompts, block_size=BLOCK_SIZE, num_blocks=32, max_new_tokens=30, seed=chunk)
    first = sequences[0]
    output: list[int] = []
    while len(output) < 12:
        parts = [(s, min(chunk, len(s.token_ids) - s.num_computed)) for s in sequences]
        done = [s.num_computed + count == len(s.token_ids) for s, count in parts]
        rows = [
            (index, sample_row(params, seed=seed if index == 0 else 1000 + index, position=len(output)))
            for index, is_done in enumerate(done)
            if is_done
        ]
        result = runner.execute(packed_step(parts, block_size=BLOCK_SIZE, sampled=rows))
        for sequence, count in parts:
            sequence.num_computed += count
        for (index, _), token_id in zip(rows, result.token_ids, strict=True):
            sequences[index].token_ids.append(token_id)
            if sequences[index] is first:
                output.append(token_id)
    return output


def test_the_same_seed_gives_the_same_text_whatever_the_chunks_and_the_batch(runner: ModelRunner) -> None:
    alone = sampled_text(runner, 100, seed=7)

    assert sampled_text(runner, 3, seed=7) == alone
    assert sampled_text(runner, 100, seed=7, others=2) == alone
    assert sampled_text(runner, 100, seed=8) != alone


def test_logits_are_computed_once_for_rows_that_share_a_token(runner: ModelRunner) -> None:
    params = SamplingParams(temperature=2.0, logprobs=0)
    rows = [(0, sample_row(params, seed=seed)) for seed in (1, 2, 1)]

    result = runner.execute(packed_step([(sequence_of(PROMPT), 20)], block_size=BLOCK_SIZE, sampled=rows))

    assert result.token_ids[0] == result.token_ids[2]
    assert result.token_ids[0] != result.token_ids[1]
    assert result.logprobs[0] == result.logprobs[2]


def test_rows_may_name_their_tokens_in_any_order(runner: ModelRunner) -> None:
    sequences = paged_sequences([PROMPT, PROMPT[:9]], block_size=BLOCK_SIZE, num_blocks=32)
    parts = [(s, len(s.token_ids)) for s in sequences]

    straight = runner.execute(packed_step(parts, block_size=BLOCK_SIZE, sampled=[(0, sample_row()), (1, sample_row())]))
    crossed = runner.execute(packed_step(parts, block_size=BLOCK_SIZE, sampled=[(1, sample_row()), (0, sample_row())]))

    assert crossed.token_ids == straight.token_ids[::-1]
    assert len(set(straight.token_ids)) == 2


def test_a_chunk_that_is_not_the_last_samples_nothing_but_fills_the_cache(runner: ModelRunner) -> None:
    sequence = sequence_of(PROMPT)

    result = runner.execute(packed_step([(sequence, 12)], block_size=BLOCK_SIZE))

    assert (result.token_ids, result.logprobs, result.errors) == ([], [], {})
    assert runner.kv_cache.data[sequence.block_ids[0]].abs().sum() > 0
    assert result.forward_ns > 0
    assert result.sample_ns > 0


def test_blocks_are_copied_before_anything_is_written(model: LoadedModel, runner: ModelRunner) -> None:
    """Copy-on-write: a fork continues in a copy of the partial block, and the original keeps its content."""
    original = sequence_of(PROMPT)
    runner.execute(packed_step([(original, 20)], block_size=BLOCK_SIZE))
    fork = PagedSequence([*PROMPT, 5], [*original.block_ids[:2], 31], num_computed=20)
    step = packed_step([(fork, 1)], block_size=BLOCK_SIZE, sampled=[(0, sample_row())])
    step = replace(
        step,
        copy_sources=np.array([original.block_ids[2]], dtype=np.int64),
        copy_destinations=np.array([31], dtype=np.int64),
    )
    before = runner.kv_cache.data[original.block_ids[2]].clone()

    forked = runner.execute(step)

    whole = sequence_of([*PROMPT, 5], seed=9)
    fresh = ModelRunner(model, KVCache(runner.kv_cache.spec, 32))
    expected = fresh.execute(packed_step([(whole, 21)], block_size=BLOCK_SIZE, sampled=[(0, sample_row())]))
    assert forked.token_ids == expected.token_ids
    assert torch.equal(runner.kv_cache.data[original.block_ids[2]], before)
    assert not torch.equal(runner.kv_cache.data[31], before)


def test_broken_logits_of_one_sequence_leave_the_others_alone(model: LoadedModel) -> None:
    runner = ModelRunner(model, KVCache(model.cache_spec(BLOCK_SIZE), 32))
    healthy, broken = paged_sequences([PROMPT, PROMPT], block_size=BLOCK_SIZE, num_blocks=32)
    for sequence in (healthy, broken):
        runner.execute(packed_step([(sequence, 19)], block_size=BLOCK_SIZE))
        sequence.num_computed = 19
    runner.kv_cache.data[broken.block_ids[1]] = float("nan")
    parts = [(broken, 1), (healthy, 1)]

    result = runner.execute(
        packed_step(parts, block_size=BLOCK_SIZE, sampled=[(0, sample_row()), (1, sample_row())])
    )  # fmt: skip

    alone = runner.execute(packed_step([(healthy, 1)], block_size=BLOCK_SIZE, sampled=[(0, sample_row())]))
    assert list(result.errors) == [0]
    assert result.token_ids[1] == alone.token_ids[0]


def test_read_only_step_arrays_are_accepted(runner: ModelRunner) -> None:
    step = packed_step([(sequence_of(PROMPT), 20)], block_size=BLOCK_SIZE, sampled=[(0, sample_row())])
    for array in (step.token_ids, step.positions, step.slot_mapping, step.query_starts, step.context_lens):
        array.flags.writeable = False
    for array in (step.block_tables, step.sample_indices, step.copy_sources, step.copy_destinations):
        array.flags.writeable = False

    assert len(runner.execute(step).token_ids) == 1


@pytest.mark.parametrize("max_tokens", [1, 20, 5000])
def test_warm_up_writes_nothing_to_the_cache(model: LoadedModel, max_tokens: int) -> None:
    runner = ModelRunner(model, KVCache(model.cache_spec(BLOCK_SIZE), 4))

    runner.warm_up(max_tokens)

    assert (runner.kv_cache.data == 0).all()


def test_another_cache_is_used_after_rebind(runner: ModelRunner) -> None:
    old = runner.kv_cache
    new = KVCache(replace(old.spec, block_size=16), 8)

    runner.rebind(new)
    sequence = paged_sequences([PROMPT], block_size=16, num_blocks=8)[0]
    runner.execute(packed_step([(sequence, 20)], block_size=16))

    assert runner.kv_cache is new
    assert new.data.abs().sum() > 0
    assert (old.data == 0).all()


@pytest.mark.parametrize("change", [{"num_layers": 2}, {"head_dim": 8}, {"dtype": "bfloat16"}, {"num_kv_heads": 1}])
def test_a_cache_of_another_models_shape_is_refused(runner: ModelRunner, change: dict[str, int | str]) -> None:
    spec = replace(runner.kv_cache.spec, **change)  # type: ignore[arg-type]  # one test for fields of two types

    with pytest.raises(ValueError, match="does not fit this model"):
        runner.rebind(KVCache(spec, 4))


@pytest.mark.model
def test_the_embedded_model_answers_as_transformers_does() -> None:
    folder: Path = embedded_model_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of France? Answer briefly."}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True).input_ids
    model = load_model(str(folder), dtype="float32")
    runner = ModelRunner(model, KVCache(model.cache_spec(16), 32))
    sequence = paged_sequences([prompt], block_size=16, num_blocks=32, max_new_tokens=10)[0]

    while sequence.token_ids[-1] not in model.info.eos_token_ids or len(sequence.token_ids) == len(prompt):
        step = packed_step(
            [(sequence, len(sequence.token_ids) - sequence.num_computed)],
            block_size=16,
            sampled=[(0, sample_row(GREEDY))],
        )
        sequence.num_computed = len(sequence.token_ids)
        sequence.token_ids += runner.execute(step).token_ids

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([prompt])
    expected = reference.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=10)
    assert sequence.token_ids == expected[0].tolist()
    assert tokenizer.decode(sequence.token_ids[len(prompt) : -1]) == "The capital of France is Paris."
