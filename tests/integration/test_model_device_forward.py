"""The GPU's forward pass as far as a CPU allows: staging, padding to buckets, void graphs. The rest is in tests/gpu."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cpu_attention import CpuAttention
from image_oracle import Oracle
from lora_adapters import make_adapter
from paged_sequences import PagedSequence, packed_step, paged_sequences
from tiny_models import make_tiny_model
from tiny_vision_model import IMAGE, NUM_IMAGE_TOKENS, make_tiny_vision_model

from kvwatch_engine.contracts.adapter import AdapterSpan
from kvwatch_engine.contracts.image import ImageSpan
from kvwatch_engine.contracts.step import ScoredSpan, StepInput
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.model.attention import StepAttention
from kvwatch_engine.model.graphs import DECODE_BUCKETS, DeviceForward, bucket_for, decode_buckets
from kvwatch_engine.model.loader import LoadedModel, load_model
from kvwatch_engine.model.prompt_logprobs import PromptScorer
from kvwatch_engine.model.runner import ModelRunner
from kvwatch_engine.model.staging import StagedStep, StagingSizes, StepStaging

BLOCK_SIZE = 8
NUM_BLOCKS = 40
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(str(folder), dtype="float32")


def addresses(staged: StagedStep) -> list[int]:
    """Return where each of the arrays begins."""
    by_group = [tensor for group in staged.groups for tensor in (group.slot_mapping, group.block_tables)]
    tensors = [staged.token_ids, staged.positions, staged.query_starts, staged.context_lens, staged.sampled, *by_group]
    return [tensor.data_ptr() for tensor in tensors]


def new_cache(model: LoadedModel, block_size: int = BLOCK_SIZE) -> KVCache:
    return KVCache(model.cache_spec(block_size), NUM_BLOCKS)


def device_forward(model: LoadedModel, cache: KVCache) -> DeviceForward:
    return DeviceForward(model.decoder, cache, model.info, CpuAttention)


def plain_logits(model: LoadedModel, cache: KVCache, step: StepInput, sampled: np.ndarray) -> torch.Tensor:
    with torch.inference_mode():
        attention = StepAttention.of_step(cache, step)
        hidden = model.decoder.hidden_states(torch.tensor(step.token_ids), torch.tensor(step.positions), attention)
        return model.decoder.logits(hidden[torch.tensor(sampled)])


def sequences_of(lengths: list[int]) -> list[PagedSequence]:
    prompts = [[(7 * i + 3 * length) % 500 for i in range(length)] for length in lengths]
    return paged_sequences(prompts, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, max_new_tokens=8)


def steps_of(lengths: list[int], num_decodes: int) -> Iterator[tuple[StepInput, np.ndarray]]:
    """Yield the prefill of all prompts in one step, then decode steps; each with the tokens that are sampled from."""
    sequences = sequences_of(lengths)
    for turn in range(1 + num_decodes):
        parts = [(s, len(s.token_ids) - s.num_computed) for s in sequences]
        step = packed_step(parts, block_size=BLOCK_SIZE)
        yield step, (step.query_starts[1:] - 1).astype(np.int64)
        for sequence in sequences:
            sequence.num_computed = len(sequence.token_ids)
            sequence.token_ids.append((turn * 31 + len(sequence.token_ids)) % 500)


@pytest.mark.parametrize("lengths", [[5], [20, 1, 9], [3, 17, 8, 8, 1]])
def test_padded_decode_steps_and_prefills_give_the_logits_and_the_cache_of_the_plain_path(
    model: LoadedModel, lengths: list[int]
) -> None:
    plain_cache, cache = new_cache(model), new_cache(model)
    forward = device_forward(model, cache)
    forward.capture(64)

    for step, sampled in steps_of(lengths, 4):
        logits = forward.logits(step, sampled)

        expected = plain_logits(model, plain_cache, step, sampled)
        assert logits.shape == expected.shape
        assert torch.allclose(logits, expected, atol=1e-5)
        assert torch.allclose(cache.data, plain_cache.data, atol=1e-5)
    assert (cache.data[0] == 0).all(), "padding is stored nowhere, not even in the null block"


def test_logits_of_a_subset_of_a_decode_step_are_those_asked_for(model: LoadedModel) -> None:
    cache, plain_cache = new_cache(model), new_cache(model)
    forward = device_forward(model, cache)
    forward.capture(8)

    for step, _ in steps_of([4, 6, 5], 1):
        some = np.array([2], dtype=np.int64)
        logits = forward.logits(step, some)
        assert torch.allclose(logits, plain_logits(model, plain_cache, step, some), atol=1e-5)


def test_a_step_that_tells_of_prompts_gives_what_the_plain_path_tells_also_of_single_tokens(model: LoadedModel) -> None:
    cache, plain_cache = new_cache(model), new_cache(model)
    forward, scorer = device_forward(model, cache), PromptScorer(model.decoder, model.info)
    forward.capture(64)

    for turn, (step, sampled) in enumerate(steps_of([20, 9], 1)):
        whole = (ScoredSpan(3, list(range(30, 46)), 4), ScoredSpan(21, [7, 8], 1))
        spans = whole if turn == 0 else (ScoredSpan(1, [9], 2),)
        scored_step = replace(step, scored=spans)
        logits, told = forward.logits_and_scores(scored_step, sampled, scorer)

        assert torch.allclose(logits, plain_logits(model, plain_cache, step, sampled), atol=1e-5)
        everything = np.arange(step.num_tokens, dtype=np.int64)
        expected = torch.log_softmax(plain_logits(model, plain_cache, step, everything), dim=-1).numpy()
        for span, found in zip(spans, told, strict=True):
            rows = expected[span.start : span.start + len(span.token_ids)]
            np.testing.assert_allclose(found.logprobs, rows[np.arange(len(rows)), span.token_ids], atol=1e-4)
            np.testing.assert_allclose(found.top_logprobs[:, 0], rows.max(axis=1), atol=1e-4)
    assert forward.buckets, "the graphs are still there"


def test_logits_stay_what_they_were_when_the_next_step_runs(model: LoadedModel) -> None:
    forward = device_forward(model, new_cache(model))
    forward.capture(8)
    first, second = list(steps_of([4, 6], 1))
    forward.logits(*first)

    logits = forward.logits(*second)
    before = logits.clone()
    forward.logits(*second)

    assert torch.equal(logits, before)


def test_capturing_writes_nothing_to_the_cache(model: LoadedModel) -> None:
    cache = new_cache(model)

    device_forward(model, cache).capture(16)

    assert (cache.data == 0).all()


def test_a_step_for_which_there_is_no_room_is_computed_all_the_same_and_makes_graphs_void(model: LoadedModel) -> None:
    cache, plain_cache = new_cache(model), new_cache(model)
    forward = device_forward(model, cache)
    forward.capture(4)
    assert forward.buckets == (1, 2, 4)

    for step, sampled in steps_of([30, 2], 1):
        logits = forward.logits(step, sampled)
        assert torch.allclose(logits, plain_logits(model, plain_cache, step, sampled), atol=1e-5)

    assert not forward.buckets


def test_without_a_capture_every_step_runs_as_it_is(model: LoadedModel) -> None:
    cache, plain_cache = new_cache(model), new_cache(model)
    forward = device_forward(model, cache)

    for step, sampled in steps_of([9, 2], 2):
        logits = forward.logits(step, sampled)
        assert torch.allclose(logits, plain_logits(model, plain_cache, step, sampled), atol=1e-5)


@pytest.mark.parametrize(
    ("num_seqs", "bucket"),
    [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 24), (64, 64), (65, 96), (256, 256), (257, None)],
)
def test_a_decode_step_takes_the_smallest_bucket_that_holds_it(num_seqs: int, bucket: int | None) -> None:
    assert bucket_for(num_seqs, DECODE_BUCKETS) == bucket


@pytest.mark.parametrize(
    ("max_seqs", "buckets"),
    [(1, (1,)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (20, (1, 2, 4, 8, 16, 20)), (5000, DECODE_BUCKETS)],
)
def test_no_bucket_is_larger_than_any_step_and_the_largest_step_has_one(
    max_seqs: int, buckets: tuple[int, ...]
) -> None:
    assert decode_buckets(max_seqs) == buckets


def test_staged_arrays_are_the_steps_and_every_step_lies_at_the_same_place() -> None:
    staging = StepStaging(CPU, StagingSizes(max_tokens=16, max_seqs=6, max_blocks=7))
    first, second = (step for step, _ in steps_of([5, 3], 1))

    staged = staging.stage(first, np.array([4, 7], dtype=np.int64))
    places = addresses(staged)
    assert staged.groups[0].slot_mapping.tolist() == first.slot_mapping.tolist()
    for name in ("token_ids", "positions", "query_starts", "context_lens"):
        assert getattr(staged, name).tolist() == getattr(first, name).tolist()
    width = first.block_tables.shape[1]
    assert staged.groups[0].block_tables[:, :width].tolist() == first.block_tables.tolist()
    assert not staged.groups[0].block_tables[:, width:].any()
    assert staged.sampled.tolist() == [4, 7]

    again = staging.stage(second, np.array([0, 1], dtype=np.int64))
    assert addresses(again) == places
    assert again.token_ids.tolist() == second.token_ids.tolist()


def test_padding_sees_the_null_block_and_is_stored_nowhere_whatever_was_there_before() -> None:
    staging = StepStaging(CPU, StagingSizes(max_tokens=16, max_seqs=6, max_blocks=7))
    (prefill, _), (decode, sampled) = steps_of([5, 3], 1)
    long = replace(prefill, block_tables=np.full((2, 7), 9, dtype=np.int32))
    for _ in range(2):  # both host buffers
        staging.stage(long, sampled)

    staged = staging.stage(decode, sampled, 5)

    assert staged.token_ids.tolist() == [*decode.token_ids.tolist(), 0, 0, 0]
    assert staged.groups[0].slot_mapping.tolist() == [*decode.slot_mapping.tolist(), -1, -1, -1]
    assert staged.positions.tolist()[2:] == [0, 0, 0]
    assert staged.query_starts.tolist() == [0, 1, 2, 3, 4, 5]
    assert staged.context_lens.tolist() == [6, 4, 1, 1, 1]
    assert not staged.groups[0].block_tables[2:].any()
    width = decode.block_tables.shape[1]
    assert not staged.groups[0].block_tables[:2, width:].any(), "nothing is left of the step before"
    assert staged.sampled.tolist() == [0, 1, 0, 0, 0]


def test_arrays_begin_at_multiples_of_sixteen_bytes_for_which_the_kernels_were_compiled() -> None:
    staging = StepStaging(CPU, StagingSizes(max_tokens=13, max_seqs=5, max_blocks=3))

    views = staging.views(13, 5, 13)

    base = views.token_ids.data_ptr()
    assert all((address - base) % 16 == 0 for address in addresses(views))


def test_a_cache_on_another_device_is_refused(model: LoadedModel) -> None:
    runner = ModelRunner(model, new_cache(model))

    with pytest.raises(ValueError, match="does not fit this model, which is on cpu"):
        runner.rebind(KVCache(model.cache_spec(BLOCK_SIZE), 4, "meta"))


def test_steps_with_adapters_pass_by_the_graphs_and_leave_them_captured(
    model: LoadedModel, folder: Path, tmp_path: Path
) -> None:
    adapter = model.adapters.load("a", make_adapter(folder, tmp_path / "a", seed=0))
    cache = new_cache(model)
    device = device_forward(model, cache)
    device.capture(16)
    sequences, sampled = sequences_of([9, 10, 11]), np.arange(3, dtype=np.int64)
    device.logits(packed_step([(s, len(s.token_ids) - 1) for s in sequences], block_size=BLOCK_SIZE), sampled)
    for sequence in sequences:
        sequence.num_computed = len(sequence.token_ids) - 1
    step = packed_step([(sequence, 1) for sequence in sequences], block_size=BLOCK_SIZE)
    spans = (AdapterSpan(adapter.load_id, 1, 3),)
    buckets = device.buckets

    plain = device.logits(step, sampled)
    adapted = device.logits(step, sampled, model.adapters.of_step(spans))
    again = device.logits(step, sampled)

    with torch.inference_mode():
        hidden = model.decoder.hidden_states(
            torch.tensor(step.token_ids), torch.tensor(step.positions), StepAttention.of_step(cache, step),
            model.adapters.of_step(spans),
        )  # fmt: skip
        expected = model.decoder.logits(hidden)
    torch.testing.assert_close(adapted, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(adapted[0], plain[0], atol=1e-4, rtol=0)
    assert float((adapted[1:] - plain[1:]).abs().mean()) > 0.1
    torch.testing.assert_close(again, plain, atol=1e-4, rtol=0)
    assert device.buckets == buckets


def test_a_step_of_one_image_token_is_not_taken_for_a_captured_decode_step(tmp_path: Path) -> None:
    folder = make_tiny_vision_model(tmp_path)
    model = load_model(str(folder), dtype="float32")
    assert model.images is not None
    prompt = Oracle(folder).prompt(f"{IMAGE} what?", 1)
    image = prompt.images[0].image
    cache, plain_cache = new_cache(model), new_cache(model)
    forward = device_forward(model, cache)
    forward.capture(16)
    [sequence] = paged_sequences([prompt.token_ids], block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, max_new_tokens=1)
    sampled = np.zeros(1, dtype=np.int64)

    for position in range(NUM_IMAGE_TOKENS):
        plain = packed_step([(sequence, 1)], block_size=BLOCK_SIZE)
        step = replace(plain, images=(ImageSpan(0, 1, position, image),))
        with torch.inference_mode():
            logits = forward.logits(step, sampled, images=model.images.of_step(step.images))
            hidden = model.decoder.hidden_states(
                torch.tensor(step.token_ids),
                torch.tensor(step.positions),
                StepAttention.of_step(plain_cache, step),
                images=model.images.of_step(step.images),
            )
            expected = model.decoder.logits(hidden)
        assert torch.allclose(logits, expected, atol=1e-5)
        assert not torch.allclose(logits, forward.logits(plain, sampled), atol=1e-2), "the token's own embedding"
        forward.logits(step, sampled, images=model.images.of_step(step.images))
        sequence.num_computed += 1
    assert model.images.num_encoded == 1
