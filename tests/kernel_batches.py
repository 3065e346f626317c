"""Batches for kernel tests: dense keys and values laid out into a paged cache that is NaN everywhere else."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvwatch_kernels.dims import Int32Array
from kvwatch_kernels.paged_attention import paged_attention
from kvwatch_kernels.quant import dequantise, quantise
from kvwatch_kernels.reference import reference_paged_attention


@dataclass(frozen=True)
class DenseSequence:
    """Queries, keys and values of one sequence; the queries are its last positions."""

    query: Tensor
    """T[num_queries, num_heads, head_dim]"""
    keys: Tensor
    """T[context_len, num_kv_heads, head_dim]"""
    values: Tensor
    """T[context_len, num_kv_heads, head_dim]"""

    @property
    def context_len(self) -> int:
        return len(self.keys)

    def last_queries(self, first: int, end: int) -> "DenseSequence":
        """The sequence as it was when its queries `first` to `end - 1` were a prefill chunk."""
        seen = self.context_len - len(self.query) + end
        return DenseSequence(self.query[first:end], self.keys[:seen], self.values[:seen])

    def as_stored(self, dtype: torch.dtype) -> "DenseSequence":
        """The sequence with the keys and values that a quantised cache holds for these."""
        keys, values = (dequantise(*quantise(side, dtype)) for side in (self.keys, self.values))
        return DenseSequence(self.query, keys, values)


def dense_sequence(
    num_queries: int,
    context_len: int,
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> DenseSequence:
    """Return random queries, keys and values; `heads` is (num_heads, num_kv_heads)."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + context_len)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    num_heads, num_kv_heads = heads
    return DenseSequence(
        randn(num_queries, num_heads, head_dim),
        randn(context_len, num_kv_heads, head_dim),
        randn(context_len, num_kv_heads, head_dim),
    )


@dataclass(frozen=True)
class PagedBatch:
    """Sequences in a paged cache, ready to be attended to."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Int32Array
    query_starts: Int32Array
    context_lens: Int32Array
    scale: float
    soft_cap: float | None = None
    alibi_slopes: Tensor | None = None
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    def attend(self, sliding_window: int | None = None, out: Tensor | None = None) -> Tensor:
        """Return the attention of all queries, packed."""
        return paged_attention(
            self.query,
            self.key_cache,
            self.value_cache,
            block_tables=self.block_tables,
            query_starts=self.query_starts,
            context_lens=self.context_lens,
            scale=self.scale,
            sliding_window=sliding_window,
            soft_cap=self.soft_cap,
            alibi_slopes=self.alibi_slopes,
            key_scales=self.key_scales,
            value_scales=self.value_scales,
            out=out,
        )

    def attend_by_reference(self, sliding_window: int | None = None) -> Tensor:
        """The same by the reference in plain torch."""
        out = torch.empty_like(self.query)
        reference_paged_attention(
            self.query,
            self.key_cache,
            self.value_cache,
            block_tables=self.block_tables,
            query_starts=self.query_starts,
            context_lens=self.context_lens,
            scale=self.scale,
            sliding_window=sliding_window,
            soft_cap=self.soft_cap,
            alibi_slopes=self.alibi_slopes,
            key_scales=self.key_scales,
            value_scales=self.value_scales,
            out=out,
        )
        return out

    def quantised(self, dtype: torch.dtype) -> "PagedBatch":
        """The batch with a quantised cache. Scales of slots outside of the sequences are NaN if those hold NaN.

        The scales are views of one layer of a whole cache's, as the engine's are.
        """
        (keys, key_scales), (values, value_scales) = (quantise(c, dtype) for c in (self.key_cache, self.value_cache))
        scales = torch.stack((key_scales, value_scales), dim=1).unsqueeze(1).repeat(1, 3, 1, 1, 1)
        return replace(
            self, key_cache=keys, value_cache=values, key_scales=scales[:, 1, 0], value_scales=scales[:, 1, 1]
        )


def paged_batch(
    sequences: Sequence[DenseSequence], *, block_size: int = 16, fill: float = float("nan"), seed: int = 0
) -> PagedBatch:
    """Lay sequences out in blocks in random order; all other slots, the null block included, hold `fill`.

    The caches are views of one layer of a whole cache, as the engine's are.
    """
    dtype, (_, num_kv_heads, head_dim) = sequences[0].keys.dtype, sequences[0].keys.shape
    needed = [-(-sequence.context_len // block_size) for sequence in sequences]
    cache = torch.full((sum(needed) + 3, 3, 2, num_kv_heads, block_size, head_dim), fill, dtype=dtype)
    key_cache, value_cache = cache[:, 1, 0], cache[:, 1, 1]
    free = (np.random.default_rng(seed).permutation(sum(needed) + 2) + 1).tolist()
    tables = np.zeros((len(sequences), max(needed)), dtype=np.int32)
    for table, count, sequence in zip(tables, needed, sequences, strict=True):
        table[:count] = [free.pop() for _ in range(count)]
        positions = torch.arange(sequence.context_len)
        blocks, offsets = torch.from_numpy(table).long()[positions // block_size], positions % block_size
        key_cache[blocks, :, offsets] = sequence.keys
        value_cache[blocks, :, offsets] = sequence.values
    starts = np.cumsum([0] + [len(sequence.query) for sequence in sequences]).astype(np.int32)
    lens = np.array([sequence.context_len for sequence in sequences], dtype=np.int32)
    query = torch.cat([sequence.query for sequence in sequences])
    return PagedBatch(query, key_cache, value_cache, tables, starts, lens, head_dim**-0.5)


def naive_attention(
    sequences: Sequence[DenseSequence],
    sliding_window: int | None = None,
    *,
    soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Attention head by head in float64 NumPy, from the dense keys and values: f64[num_tokens, num_heads, head_dim]."""
    outputs = []
    for sequence in sequences:
        query, keys, values = (part.double().numpy() for part in (sequence.query, sequence.keys, sequence.values))
        num_queries, num_heads, head_dim = query.shape
        group = num_heads // keys.shape[1]
        places = np.arange(sequence.context_len)
        positions = places[len(places) - num_queries :, None]
        is_hidden = (places > positions) | (places <= positions - (sliding_window or len(places)))
        heads = np.empty_like(query)
        for head in range(num_heads):
            scores = np.einsum("qd,kd->qk", query[:, head], keys[:, head // group]) * head_dim**-0.5
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
            if alibi_slopes is not None:
                scores += alibi_slopes[head].item() * (places - positions)
            scores[is_hidden] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True, initial=-1e300))
            weights /= weights.sum(axis=1, keepdims=True)
            heads[:, head] = np.einsum("qk,kd->qd", weights, values[:, head // group])
        outputs.append(heads)
    return torch.from_numpy(np.concatenate(outputs))
