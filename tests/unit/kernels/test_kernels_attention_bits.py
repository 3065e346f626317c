"""The reduction order depends on token positions only: equal bits whatever happens around a query."""

from collections.abc import Iterator

import pytest
import torch
from kernel_batches import DenseSequence, dense_sequence, paged_batch
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16]
WINDOWS = [None, 70, 600]
PROMPT_TOKENS = 820
BORDERS = [0, 1, 63, 64, 65, 127, 255, 256, 257, 511, 512, 513, 700, 767, 768, 819]


@pytest.fixture(autouse=True)
def _restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    """Unlike torch.equal this tells -0.0 from 0.0."""
    integers = torch.int32 if actual.dtype == torch.float32 else torch.int16
    return torch.equal(actual.view(integers), expected.view(integers))


def prompt(dtype: torch.dtype = torch.float32, head_dim: int = 64) -> DenseSequence:
    """A whole prompt: many tiles and four splits, as the sum of two would be the same in any order."""
    return dense_sequence(PROMPT_TOKENS, PROMPT_TOKENS, heads=(6, 2), head_dim=head_dim, dtype=dtype, seed=5)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sequence_has_the_same_bits_alone_and_in_any_batch(dtype: torch.dtype, window: int | None) -> None:
    sequence = dense_sequence(1, 300, heads=(6, 2), dtype=dtype)
    others = [
        dense_sequence(q, n, heads=(6, 2), dtype=dtype, seed=9) for q, n in ((1, 4), (90, 90), (1, 900), (17, 40))
    ]

    alone = paged_batch([sequence]).attend(window)

    for place in range(len(others) + 1):
        batch = [*others[:place], sequence, *others[place:]]
        first = sum(len(other.query) for other in others[:place])
        assert same_bits(paged_batch(batch, seed=place).attend(window)[first : first + 1], alone)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk", [1, 23, 32, 64, 100])
def test_chunking_the_prefill_changes_no_bit(chunk: int, dtype: torch.dtype, window: int | None) -> None:
    sequence = prompt(dtype)
    whole = paged_batch([sequence]).attend(window)

    pieces = [
        paged_batch([sequence.last_queries(first, min(first + chunk, PROMPT_TOKENS))], seed=first).attend(window)
        # Token by token at the borders of tiles and splits only: every position would take minutes.
        for first in range(0, PROMPT_TOKENS, chunk)
        if chunk > 1 or first in BORDERS
    ]

    if chunk > 1:
        assert same_bits(torch.cat(pieces), whole)
    else:
        assert same_bits(torch.cat(pieces), whole[BORDERS])


@pytest.mark.parametrize("head_dim", [64, 80, 20])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_block_size_changes_no_bit(dtype: torch.dtype, head_dim: int) -> None:
    sequences = [
        prompt(dtype, head_dim),
        *(dense_sequence(1, n, heads=(6, 2), head_dim=head_dim, dtype=dtype) for n in (1, 15, 16, 17, 600)),
    ]
    expected = paged_batch(sequences, block_size=16).attend()

    for block_size in (1, 3, 8, 32, 48, 1024):
        assert same_bits(paged_batch(sequences, block_size=block_size).attend(), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype) -> None:
    batch = paged_batch([prompt(dtype), dense_sequence(1, 2000, heads=(6, 2), dtype=dtype)])
    torch.set_num_threads(1)
    expected = batch.attend()

    for num_threads in (2, 3, 5):
        torch.set_num_threads(num_threads)
        for _ in range(5):
            assert same_bits(batch.attend(), expected)


def test_reading_values_in_place_or_packed_changes_no_bit() -> None:
    """Four rows or fewer read values in place, more pack them: a decode must equal the row of a prefill."""
    sequence = prompt(head_dim=128)

    whole = paged_batch([sequence]).attend()
    last = paged_batch([sequence.last_queries(PROMPT_TOKENS - 1, PROMPT_TOKENS)]).attend()

    assert same_bits(last, whole[-1:])
