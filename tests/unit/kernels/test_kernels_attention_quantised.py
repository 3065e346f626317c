"""Attention over quantised caches, soft cap and position bias, against naive float64 attention on what is stored."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from kernel_batches import DenseSequence, PagedBatch, dense_sequence, naive_attention, paged_batch
from torch import Tensor

from kvwatch_kernels.errors import ShapeError
from kvwatch_kernels.quant import QUANTISED_LIMITS

STORED = list(QUANTISED_LIMITS)
LENGTHS = ((1, 1), (1, 15), (1, 17), (5, 5), (7, 65), (1, 256), (1, 257), (40, 300), (3, 600))


@pytest.fixture(autouse=True)
def _restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def mixed_sequences(heads: tuple[int, int] = (6, 2), head_dim: int = 64) -> list[DenseSequence]:
    return [dense_sequence(q, n, heads=heads, head_dim=head_dim, seed=seed) for seed, (q, n) in enumerate(LENGTHS)]


def slopes(num_heads: int) -> Tensor:
    return torch.tensor([2.0 ** (-8 * (head + 1) / num_heads) for head in range(num_heads)])


def relative_error(actual: Tensor, truth: Tensor) -> float:
    """Largest error relative to the largest number of the truth."""
    assert actual.isfinite().all()
    return float((actual.double() - truth.double()).abs().max() / truth.abs().max())


@pytest.mark.parametrize("dtype", STORED, ids=str)
@pytest.mark.parametrize("block_size", [1, 8, 16, 24])
@pytest.mark.parametrize(
    ("heads", "head_dim"), [((9, 3), 64), ((4, 2), 128), ((5, 1), 80), ((2, 1), 8), ((3, 3), 36)], ids=str
)
def test_a_mixed_batch_equals_naive_attention_on_what_is_stored(
    heads: tuple[int, int], head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    sequences = mixed_sequences(heads, head_dim)
    batch = paged_batch(sequences, block_size=block_size).quantised(dtype)
    truth = naive_attention([sequence.as_stored(dtype) for sequence in sequences])

    assert relative_error(batch.attend(), truth) < 2e-6
    assert relative_error(batch.attend_by_reference(), truth) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, *STORED], ids=str)
@pytest.mark.parametrize("soft_cap", [None, 0.7, 30.0])
@pytest.mark.parametrize("is_biased", [False, True])
@pytest.mark.parametrize("window", [None, 40])
def test_cap_bias_and_window_apply_in_their_order(
    window: int | None, is_biased: bool, soft_cap: float | None, dtype: torch.dtype
) -> None:
    sequences = mixed_sequences()
    for sequence in sequences:
        sequence.query.mul_(4.0)  # so that a cap is felt
    shape = {"soft_cap": soft_cap, "alibi_slopes": slopes(6) if is_biased else None}
    batch = replace(paged_batch(sequences), **shape)  # type: ignore[arg-type]  # each value is of its field's type
    stored = sequences
    if dtype != torch.float32:
        batch, stored = batch.quantised(dtype), [sequence.as_stored(dtype) for sequence in sequences]
    truth = naive_attention(stored, window, **shape)  # type: ignore[arg-type]

    assert relative_error(batch.attend(window), truth) < 4e-6
    assert relative_error(batch.attend_by_reference(window), truth) < 4e-6


@pytest.mark.parametrize("dtype", STORED, ids=str)
@pytest.mark.parametrize("query_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_queries_of_half_the_size_see_the_same_cache(query_dtype: torch.dtype, dtype: torch.dtype) -> None:
    sequences = [
        DenseSequence(s.query.to(query_dtype), s.keys.to(query_dtype), s.values.to(query_dtype))
        for s in mixed_sequences()
    ]

    out = paged_batch(sequences).quantised(dtype).attend()

    assert out.dtype == query_dtype
    truth = naive_attention([sequence.as_stored(dtype) for sequence in sequences])
    torch.testing.assert_close(out.double(), truth, rtol=2**-8, atol=2e-5)


@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_chunks_blocks_batches_and_threads_change_no_bit(dtype: torch.dtype) -> None:
    prompt = dense_sequence(700, 700, heads=(6, 2), seed=5)
    others = [dense_sequence(q, n, heads=(6, 2), seed=9) for q, n in ((1, 4), (90, 90), (1, 900))]
    shape = {"soft_cap": 20.0, "alibi_slopes": slopes(6)}

    def attend(sequences: list[DenseSequence], block_size: int = 16) -> Tensor:
        batch = paged_batch(sequences, block_size=block_size)
        return replace(batch, **shape).quantised(dtype).attend()  # type: ignore[arg-type]

    whole = attend([prompt])
    assert torch.equal(attend([*others, prompt])[-700:], whole)
    for block_size in (1, 8, 48):
        assert torch.equal(attend([prompt], block_size), whole)
    for first, end in ((0, 1), (255, 256), (256, 257), (300, 421), (699, 700)):
        assert torch.equal(attend([prompt.last_queries(first, end)]), whole[first:end])
    for num_threads in (1, 3):
        torch.set_num_threads(num_threads)
        assert torch.equal(attend([prompt]), whole)


@pytest.mark.parametrize("dtype", STORED, ids=str)
@pytest.mark.parametrize("fill", [float("nan"), 0.0])
def test_what_lies_in_hidden_slots_has_no_effect_be_it_number_or_scale(fill: float, dtype: torch.dtype) -> None:
    sequences = [dense_sequence(queries, context) for queries, context in ((1, 3), (6, 130), (40, 41), (1, 300))]
    batch = paged_batch(sequences, fill=fill).quantised(dtype)
    expected = batch.attend()
    assert batch.key_scales is not None
    assert batch.value_scales is not None
    is_used = torch.zeros(batch.key_cache.shape[:3], dtype=torch.bool)
    for table, context_len in zip(batch.block_tables, batch.context_lens, strict=True):
        for position in range(context_len):
            is_used[table[position // 16], :, position % 16] = True
    for cache, scales in ((batch.key_cache, batch.key_scales), (batch.value_cache, batch.value_scales)):
        scales[~is_used] = float("inf")
        cache.view(torch.uint8)[~is_used] = 0x7F  # NaN in both FP8 formats

    assert torch.equal(batch.attend(), expected)


@pytest.mark.parametrize("dtype", STORED, ids=str)
@pytest.mark.parametrize("side", ["key", "value"])
def test_a_broken_token_reaches_those_who_see_it_and_nobody_else(side: str, dtype: torch.dtype) -> None:
    """One NaN makes its token's scale NaN; other tokens of the block keep theirs."""
    sequence = dense_sequence(20, 90, heads=(2, 2))
    clean = paged_batch([sequence]).quantised(dtype).attend()
    broken = DenseSequence(sequence.query, sequence.keys.clone(), sequence.values.clone())
    (broken.keys if side == "key" else broken.values)[80, 1, 7] = float("nan")

    out = paged_batch([broken]).quantised(dtype).attend()

    # Queries are positions 70 to 89; head 0 is whole.
    assert torch.equal(out[:10], clean[:10])
    assert torch.equal(out[:, 0], clean[:, 0])
    assert out[10:, 1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_a_stored_nan_is_a_nan(dtype: torch.dtype) -> None:
    batch = paged_batch([dense_sequence(1, 90, heads=(2, 2))]).quantised(dtype)
    block = batch.block_tables[0, 2]
    batch.value_cache[block, 1, 3, 9] = float("nan")
    batch.key_cache[block, 0, 3, 9] = float("nan")

    out = batch.attend()

    assert out[0, 0].isnan().all()
    assert out[0, 1].isnan().tolist() == [index == 9 for index in range(64)]


def test_one_batch_serves_layers_with_scales_of_their_own() -> None:
    sequences = mixed_sequences()
    layers = [paged_batch(sequences, seed=3).quantised(torch.int8) for _ in range(2)]
    for scales in (layers[1].key_scales, layers[1].value_scales):
        assert scales is not None
        scales.mul_(2.0)

    assert not torch.equal(layers[0].attend(), layers[1].attend())
    assert relative_error(layers[1].attend(), layers[1].attend_by_reference()) < 2e-6


def refused(batch: PagedBatch, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        batch.attend()


def test_scales_that_do_not_fit_are_named() -> None:
    plain = paged_batch([dense_sequence(1, 33)])
    batch = plain.quantised(torch.int8)
    assert batch.key_scales is not None

    refused(replace(batch, key_scales=None), "key_scales is None: must be given, as the cache is quantised")
    refused(replace(plain, value_scales=batch.value_scales), "value_scales is given, but a cache of torch.float32 has")
    refused(replace(batch, key_scales=batch.key_scales[1:]), r"key_scales has shape \[5, 2, 16\]: must be \[6, 2, 16\]")
    refused(replace(batch, key_scales=batch.key_scales.double()), "key_scales has dtype torch.float64")
    refused(replace(batch, key_scales=batch.key_scales.mT.contiguous().mT), "key_scales has stride 2 in its last dim")
    refused(replace(batch, query=batch.query.double()), "query has dtype torch.float64: must be one of torch.float32")


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("soft_cap is 0", {"soft_cap": 0.0}),
        ("soft_cap is inf: must be from", {"soft_cap": float("inf")}),
        (r"alibi_slopes is torch.float32\[2\]: must be torch.float32\[4\]", {"alibi_slopes": torch.zeros(2)}),
        ("alibi_slopes is torch.float64", {"alibi_slopes": torch.zeros(4).double()}),
        ("alibi_slopes has stride 2: must be contiguous", {"alibi_slopes": torch.zeros(8)[::2]}),
    ],
)
def test_bounds_and_slopes_that_make_no_sense_are_named(message: str, changes: dict[str, object]) -> None:
    refused(replace(paged_batch([dense_sequence(1, 33)]), **changes), message)  # type: ignore[arg-type]
