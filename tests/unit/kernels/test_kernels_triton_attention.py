"""The attention kernel in Triton against the reference, over a grid in which every pair of choices occurs.

Runs in Triton's interpreter (see conftest.py), in float32 and float16: bfloat16 is silently wrong there.
"""

from dataclasses import replace

import pytest
import torch
from triton_cases import (
    BARS,
    CHOICES,
    QUANTISED,
    Case,
    attend_by_reference,
    attend_in_triton,
    batch_of,
    pairwise,
    relative_error,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")  # NumPy's, about NaN

FULLER = [
    replace(Case(), lengths=lengths, dtype=dtype, stored=stored, head_dim=head_dim, is_split=is_split, is_spiked=True)
    for lengths in ("mixed", "long chunk", "long decode")
    for dtype in BARS
    for stored in (None, *QUANTISED)
    for head_dim in (64, 80, 128)
    for is_split in (False, True)
]


def check(case: Case) -> None:
    batch = batch_of(case)

    out = attend_in_triton(batch, case.sliding_window, is_split=case.is_split)

    assert relative_error(out, attend_by_reference(batch, case.sliding_window)) <= BARS[case.dtype]


@pytest.mark.parametrize("case", pairwise(CHOICES), ids=str)
def test_the_kernel_gives_what_the_reference_gives(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", FULLER, ids=str)
def test_the_kernel_gives_what_the_reference_gives_over_a_fuller_grid(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("dtype", BARS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_e4m3_is_right_without_the_device_converting_it(dtype: torch.dtype, head_dim: int) -> None:
    """sm_80 has no conversion: the kernel shifts the bits."""
    batch = batch_of(Case(dtype=dtype, stored=torch.float8_e4m3fn, head_dim=head_dim))

    out = attend_in_triton(batch, has_bits=True)

    assert relative_error(out, attend_by_reference(batch)) <= BARS[dtype]
    assert torch.equal(out, attend_in_triton(batch, has_bits=False))


@pytest.mark.parametrize("stored", QUANTISED, ids=str)
def test_values_of_every_size_keep_their_precision_in_float16(stored: torch.dtype) -> None:
    """Scales are folded into weights, which are float16: they may become neither subnormal nor infinite."""
    case = Case(dtype=torch.float16, stored=stored, lengths="chunk")
    batch = batch_of(case)
    assert batch.value_scales is not None

    for factor in (1e-12, 1e-6, 1.0, 1e3):
        scaled = replace(batch, value_scales=batch.value_scales * factor)
        out = attend_in_triton(scaled, out=torch.empty(batch.query.shape, dtype=torch.float32))

        assert relative_error(out, attend_by_reference(scaled)) <= BARS[torch.float16], factor


def test_a_strided_query_and_output_are_right() -> None:
    batch = batch_of(Case())
    num_tokens, num_heads, head_dim = batch.query.shape
    fused = torch.full((num_tokens, num_heads + 4, head_dim), float("nan"))
    fused[:, 1 : num_heads + 1] = batch.query
    wide_out = torch.zeros(num_tokens, num_heads + 1, head_dim)

    out = attend_in_triton(replace(batch, query=fused[:, 1 : num_heads + 1]), out=wide_out[:, 1:])

    assert torch.equal(out, attend_in_triton(batch))
    assert not wide_out[:, 0].any()


@pytest.mark.parametrize("is_split", [False, True])
def test_tokens_behind_the_last_sequence_are_left_alone(is_split: bool) -> None:
    """A captured graph has room for more tokens and sequences than a step has."""
    batch = batch_of(Case(lengths="long chunk"))
    num_tokens = len(batch.query)
    query = torch.cat((batch.query, torch.full((40, *batch.query.shape[1:]), float("nan"))))
    padded = replace(
        batch,
        query=query,
        query_starts=torch.tensor([*batch.query_starts, num_tokens, num_tokens], dtype=torch.int32).numpy(),
        context_lens=torch.tensor([*batch.context_lens, 0, 0], dtype=torch.int32).numpy(),
        block_tables=torch.cat(
            (torch.from_numpy(batch.block_tables), torch.full((2, 80), 0)[:, : batch.block_tables.shape[1]])
        )
        .int()
        .numpy(),
    )

    out = attend_in_triton(padded, is_split=is_split, out=torch.full_like(query, 7.0))

    assert torch.equal(out[:num_tokens], attend_in_triton(batch, is_split=is_split))
    assert (out[num_tokens:] == 7.0).all()


def test_with_splits_a_decode_depends_on_its_own_context_only() -> None:
    """Splits have a fixed size in tokens, so the order of the sums depends on positions."""
    batch = batch_of(Case(lengths="long decode"))
    alone = replace(
        batch,
        query=batch.query[3:],
        block_tables=batch.block_tables[3:].copy(),
        query_starts=batch.query_starts[:2].copy(),
        context_lens=batch.context_lens[3:].copy(),
    )

    assert torch.equal(attend_in_triton(batch, is_split=True)[3:], attend_in_triton(alone, is_split=True))


def test_a_batch_without_queries_is_nothing_to_do() -> None:
    batch = batch_of(Case(lengths="decode"))
    empty = replace(batch, query=batch.query[:0], query_starts=batch.query_starts * 0)

    assert attend_in_triton(empty).shape == (0, *batch.query.shape[1:])
