"""Cases for the attention kernel in Triton: a grid in which every pair of choices occurs, and how far a result is off.

Run where TRITON_INTERPRET=1 was set before Triton was imported, or on a device.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from kernel_batches import DenseSequence, PagedBatch, dense_sequence, paged_batch
from torch import Tensor

from kvwatch_kernels.reference import reference_paged_attention
from kvwatch_kernels.triton.attention import DeviceBatch, triton_paged_attention

QUANTISED = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
BARS = {torch.float32: 1e-5, torch.float16: 2e-3}
"""Largest error, relative to the largest output."""

CHOICES: Mapping[str, Sequence[object]] = {
    "head_dim": (64, 80, 96, 112, 128, 192, 256),
    "lengths": ("decode", "prompt", "chunk", "mixed", "long decode", "long chunk"),
    "heads": ((2, 2), (3, 1), (8, 2), (8, 1), (20, 1)),
    "block_size": (8, 16, 24, 64, 5),
    "stored": (None, *QUANTISED),
    "sliding_window": (None, 1, 17, 100),
    "dtype": (torch.float32, torch.float16),
    "soft_cap": (None, 5.0),
    "has_alibi": (False, True),
    "is_spiked": (False, True),
    "is_split": (False, True),
}


@dataclass(frozen=True)
class Case:
    """One point of the grid."""

    head_dim: int = 64
    lengths: str = "mixed"
    heads: tuple[int, int] = (4, 2)
    block_size: int = 16
    stored: torch.dtype | None = None
    """None: as the query"""
    sliding_window: int | None = None
    dtype: torch.dtype = torch.float32
    soft_cap: float | None = None
    has_alibi: bool = False
    is_spiked: bool = False
    """Keys and values at the blocks' borders are large, so that one more or less shows."""
    is_split: bool = False

    def __str__(self) -> str:
        stored = str(self.stored).removeprefix("torch.") if self.stored else "plain"
        parts = [str(self.dtype).removeprefix("torch."), stored, self.lengths.replace(" ", "_")]
        parts += [f"d{self.head_dim}", f"h{self.heads[0]}of{self.heads[1]}", f"b{self.block_size}"]
        parts += [f"w{self.sliding_window}"] if self.sliding_window else []
        parts += ["cap"] if self.soft_cap else []
        parts += ["alibi"] if self.has_alibi else []
        parts += ["spiked"] if self.is_spiked else []
        parts += ["split"] if self.is_split else []
        return "-".join(parts)


def pairwise(choices: Mapping[str, Sequence[object]]) -> list[Case]:
    """Cases in which every two choices of different names occur together; greedy, the same each time."""
    names = list(choices)
    open_pairs = {
        ((one, a), (other, b))
        for one, other in itertools.combinations(names, 2)
        for a in choices[one]
        for b in choices[other]
    }
    in_order = sorted(open_pairs, key=repr)
    cases = []
    while open_pairs:
        chosen = dict(next(pair for pair in in_order if pair in open_pairs))
        for name in names:
            if name not in chosen:
                chosen[name] = max(choices[name], key=lambda value: _count_new(chosen | {name: value}, open_pairs))
        open_pairs -= _pairs(chosen)
        cases.append(Case(**chosen))  # type: ignore[arg-type]  # values are of their fields' types
    return cases


def _pairs(chosen: Mapping[str, object]) -> set[tuple[tuple[str, object], tuple[str, object]]]:
    known = [(name, chosen[name]) for name in CHOICES if name in chosen]
    return set(itertools.combinations(known, 2))


def _count_new(chosen: Mapping[str, object], open_pairs: set[tuple[tuple[str, object], tuple[str, object]]]) -> int:
    return len(_pairs(chosen) & open_pairs)


def lengths_of(case: Case) -> list[tuple[int, int]]:
    """(queries, context) of each sequence."""
    size = case.block_size
    return {
        "decode": [(1, 1), (1, max(size - 1, 1)), (1, size), (0, 0), (1, size + 1), (1, 3 * size + 2)],
        "prompt": [(1, 1), (size - 1, size - 1), (0, 7), (size, size), (size + 1, size + 1)],
        "chunk": [(2, size + 1), (min(size, 24), 2 * size), (7, 4 * size + 1), (33, 90)],
        "mixed": [(1, size), (0, 0), (21, 21), (1, 2 * size + 1), (5, 3 * size - 1), (1, 1)],
        "long decode": [(1, 530), (1, 512), (1, 1), (1, 1100)],
        "long chunk": [(5, 515), (1, 40), (3, 1025)],
    }[case.lengths]


def batch_of(case: Case) -> PagedBatch:
    """The case's batch: what lies outside of the sequences is NaN, or has a scale of NaN."""
    sequences = [
        dense_sequence(queries, context, heads=case.heads, head_dim=case.head_dim, dtype=case.dtype, seed=seed)
        for seed, (queries, context) in enumerate(lengths_of(case))
    ]
    if case.is_spiked:
        sequences = [_spiked(sequence, case.block_size) for sequence in sequences]
    batch = paged_batch(sequences, block_size=case.block_size)
    if case.stored is not None:
        batch = batch.quantised(case.stored)
    slopes = torch.logspace(-1, -3, case.heads[0], base=2.0) if case.has_alibi else None
    return replace(batch, soft_cap=case.soft_cap, alibi_slopes=slopes)


def _spiked(sequence: DenseSequence, block_size: int) -> DenseSequence:
    keys, values = sequence.keys.clone(), sequence.values.clone()
    for border in range(0, sequence.context_len + 1, block_size):
        for position in (border - 1, border):
            if 0 <= position < sequence.context_len:
                keys[position] *= 3
                values[position] *= 1 + position % 7
    return DenseSequence(sequence.query, keys, values)


def device_batch(batch: PagedBatch) -> DeviceBatch:
    """The batch's tables and lengths, on the device of its cache."""
    device = batch.key_cache.device
    tables, starts, lens = (
        torch.from_numpy(array).to(device) for array in (batch.block_tables, batch.query_starts, batch.context_lens)
    )
    return DeviceBatch(tables, starts, lens, int(np.diff(batch.query_starts).max()), int(batch.context_lens.max()))


def attend_in_triton(
    batch: PagedBatch,
    sliding_window: int | None = None,
    *,
    is_split: bool = False,
    has_bits: bool | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of all queries by the kernel."""
    out = torch.full_like(batch.query, float("nan")) if out is None else out
    triton_paged_attention(
        batch.query,
        batch.key_cache,
        batch.value_cache,
        device_batch(batch),
        scale=batch.scale,
        sliding_window=sliding_window,
        soft_cap=batch.soft_cap,
        alibi_slopes=batch.alibi_slopes,
        key_scales=batch.key_scales,
        value_scales=batch.value_scales,
        out=out,
        is_split=is_split,
        has_bits=has_bits,
    )
    return out


def attend_by_reference(batch: PagedBatch, sliding_window: int | None = None) -> Tensor:
    """The reference's result before it is rounded to the query's dtype: f32[num_tokens, num_heads, head_dim]."""
    out = torch.empty(batch.query.shape, dtype=torch.float32, device=batch.query.device)
    reference_paged_attention(
        batch.query,
        batch.key_cache,
        batch.value_cache,
        block_tables=batch.block_tables,
        query_starts=batch.query_starts,
        context_lens=batch.context_lens,
        scale=batch.scale,
        sliding_window=sliding_window,
        soft_cap=batch.soft_cap,
        alibi_slopes=batch.alibi_slopes,
        key_scales=batch.key_scales,
        value_scales=batch.value_scales,
        out=out,
    )
    return out


def relative_error(out: Tensor, truth: Tensor) -> float:
    """Largest error relative to the largest output; NaN where anything is NaN."""
    return ((out.float() - truth).abs().max() / truth.abs().max()).item()
