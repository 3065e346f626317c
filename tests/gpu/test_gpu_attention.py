"""Attention on a device: the interpreter's grid with bfloat16 in it, isolation, and offsets past 32 bits."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from kernel_batches import PagedBatch
from torch import Tensor
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

from kvwatch_kernels.paged_attention import paged_attention
from kvwatch_kernels.triton.attention import DeviceBatch, triton_paged_attention

DEVICE = "cuda"
DEVICE_BARS = {**BARS, torch.bfloat16: 1.6e-2}
"""bfloat16 keeps 8 bits: weights and the result are each rounded by up to 1 part in 256."""
GRID = pairwise({**CHOICES, "dtype": tuple(DEVICE_BARS)})
FULLER = [
    Case(head_dim=head_dim, lengths=lengths, dtype=torch.bfloat16, stored=stored, is_split=is_split, is_spiked=True)
    for head_dim in (64, 80, 128, 256)
    for lengths in ("mixed", "long decode", "long chunk")
    for stored in (None, *QUANTISED)
    for is_split in (False, True)
]


def on_device(tensor: Tensor) -> Tensor:
    """The tensor with its strides and its place in its storage: a cache stays the slice of a larger one that it is."""
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return storage.to(DEVICE).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def moved(batch: PagedBatch) -> PagedBatch:
    key_scales, value_scales, slopes = (
        None if tensor is None else on_device(tensor)
        for tensor in (batch.key_scales, batch.value_scales, batch.alibi_slopes)
    )
    return replace(
        batch,
        query=on_device(batch.query),
        key_cache=on_device(batch.key_cache),
        value_cache=on_device(batch.value_cache),
        key_scales=key_scales,
        value_scales=value_scales,
        alibi_slopes=slopes,
    )


@pytest.mark.parametrize("case", [*GRID, *FULLER], ids=str)
def test_the_kernel_gives_what_the_reference_gives(case: Case) -> None:
    batch = batch_of(case)

    out = attend_in_triton(moved(batch), case.sliding_window, is_split=case.is_split)

    assert relative_error(out.cpu(), attend_by_reference(batch, case.sliding_window)) <= DEVICE_BARS[case.dtype]


@pytest.mark.parametrize("dtype", DEVICE_BARS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_e4m3_is_right_without_the_device_converting_it(dtype: torch.dtype, head_dim: int) -> None:
    batch = batch_of(Case(dtype=dtype, stored=torch.float8_e4m3fn, head_dim=head_dim))

    out = attend_in_triton(moved(batch), has_bits=True)

    assert relative_error(out.cpu(), attend_by_reference(batch)) <= DEVICE_BARS[dtype]


@pytest.mark.parametrize("stored", [None, *QUANTISED], ids=str)
def test_the_public_function_takes_the_kernel_for_tensors_on_a_device(stored: torch.dtype | None) -> None:
    batch = batch_of(Case(dtype=torch.bfloat16, stored=stored, lengths="mixed"))
    there = moved(batch)

    out = paged_attention(
        there.query,
        there.key_cache,
        there.value_cache,
        block_tables=batch.block_tables,
        query_starts=batch.query_starts,
        context_lens=batch.context_lens,
        scale=batch.scale,
        key_scales=there.key_scales,
        value_scales=there.value_scales,
    )

    assert out.device.type == DEVICE
    assert relative_error(out.cpu(), attend_by_reference(batch)) <= DEVICE_BARS[torch.bfloat16]


@pytest.mark.parametrize("is_split", [False, True])
def test_a_sequence_has_the_same_bits_whatever_it_is_batched_with(is_split: bool) -> None:
    batch = moved(batch_of(Case(dtype=torch.bfloat16, lengths="long decode")))
    last = len(batch.context_lens) - 1
    alone = replace(
        batch,
        query=batch.query[last:],
        block_tables=batch.block_tables[last:].copy(),
        query_starts=batch.query_starts[:2].copy(),
        context_lens=batch.context_lens[last:].copy(),
    )

    together = attend_in_triton(batch, is_split=is_split)[last:]

    assert torch.equal(together, attend_in_triton(alone, is_split=is_split))


def test_blocks_past_two_to_the_31_elements_are_read() -> None:
    """R28: an offset of 32 bits would read somewhere else, or fault."""
    num_kv_heads, block_size, head_dim = 8, 64, 128
    num_blocks = 2**31 // (num_kv_heads * block_size * head_dim) + 2
    free, _ = torch.cuda.mem_get_info()
    needed = 2 * num_blocks * num_kv_heads * block_size * head_dim
    if free < needed + 2**30:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of free memory, the device has {free / 2**30:.0f}")
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    cache = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
    cache[-1] = torch.randn(shape[1:], device=DEVICE)
    query = torch.randn(1, 2 * num_kv_heads, head_dim, dtype=torch.bfloat16, device=DEVICE)
    out = torch.empty_like(query)

    triton_paged_attention(
        query,
        cache,
        cache,
        DeviceBatch(
            torch.tensor([[num_blocks - 1]], dtype=torch.int32, device=DEVICE),
            torch.tensor([0, 1], dtype=torch.int32, device=DEVICE),
            torch.tensor([block_size], dtype=torch.int32, device=DEVICE),
            1,
            block_size,
        ),
        scale=head_dim**-0.5,
        out=out,
    )

    keys = cache[-1].float().repeat_interleave(2, dim=0)
    weights = (torch.einsum("hd,htd->ht", query[0].float(), keys) * head_dim**-0.5).softmax(-1)
    truth = torch.einsum("ht,htd->hd", weights, keys)
    assert relative_error(out[0], truth) <= DEVICE_BARS[torch.bfloat16]


def test_a_captured_decode_step_follows_the_lengths_and_tables_that_are_on_the_device() -> None:
    """What a graph is captured with may not be baked into it."""
    truth = batch_of(Case(dtype=torch.bfloat16, lengths="long decode"))
    there = moved(truth)
    num_seqs, width = truth.block_tables.shape
    assert np.array_equal(truth.query_starts, np.arange(num_seqs + 1)), "one query for each sequence"
    tables = torch.zeros((num_seqs, width), dtype=torch.int32, device=DEVICE)
    starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=DEVICE)
    lens = torch.ones(num_seqs, dtype=torch.int32, device=DEVICE)
    batch = DeviceBatch(tables, starts, lens, 1, width * truth.key_cache.shape[2])
    out = torch.empty_like(there.query)

    def attend() -> None:
        triton_paged_attention(there.query, there.key_cache, there.value_cache, batch, scale=truth.scale, out=out)

    attend()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()

    tables.copy_(torch.from_numpy(truth.block_tables))
    lens.copy_(torch.from_numpy(truth.context_lens))
    graph.replay()
    torch.cuda.synchronize()

    assert relative_error(out.cpu(), attend_by_reference(truth)) <= DEVICE_BARS[torch.bfloat16]
