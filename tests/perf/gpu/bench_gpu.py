"""`make bench-gpu`: paged attention on a device beside torch's SDPA over contiguous keys and values.

FlashInfer and flash-attn are measured too where they are installed. Prints JSON: microseconds, achieved bandwidth,
ratios. Every measured call takes the next of several caches, together larger than the device's cache, so that keys and
values come from memory. Contenders take turns, and the median of many turns counts. There is no budget here: no GPU was
at hand when this was written, so the figures are for the reader.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kvwatch_kernels.quant import is_quantised, quantise
from kvwatch_kernels.triton.attention import DeviceBatch, triton_paged_attention

DEVICE = "cuda"
ROTATING_BYTES = 512 * 2**20
"""Several times the cache of any device."""
TURNS, WARM_UP = 50, 5

Call = Callable[[int], object]
"""Runs a contender on the cache of this number."""


@dataclass(frozen=True)
class Shape:
    """What is measured: the queries are the last positions of each sequence, which fills whole blocks."""

    name: str
    num_seqs: int
    num_queries: int
    context_len: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16


SHAPES = (
    Shape("decode, 1 sequence of 8,192", 1, 1, 8192),
    Shape("decode, 8 sequences of 1,024", 8, 1, 1024),
    Shape("decode, 64 sequences of 2,048", 64, 1, 2048),
    Shape("decode, 8 sequences of 32,768", 8, 1, 32768),
    Shape("prefill of 512 over 2,048", 1, 512, 2560),
    Shape("prefill of 4,096", 1, 4096, 4096),
)


@dataclass(frozen=True)
class Inputs:
    """Queries, and rotating caches: dense, and the same content in blocks in random order."""

    query: Tensor
    """T[num_seqs, num_queries, num_heads, head_dim]"""
    dense: list[tuple[Tensor, Tensor]]
    """Keys and values T[num_seqs, num_kv_heads, context_len, head_dim]"""
    paged: list[Tensor]
    """T[num_blocks, 2, num_kv_heads, block_size, head_dim]"""
    tables: Tensor
    """i32[num_seqs, blocks of a sequence]"""

    @property
    def num_caches(self) -> int:
        return len(self.dense)


def make_inputs(shape: Shape, dtype: torch.dtype) -> Inputs:
    per_sequence = -(-shape.context_len // shape.block_size)
    num_blocks = 1 + shape.num_seqs * per_sequence
    order = 1 + torch.randperm(num_blocks - 1, device=DEVICE)
    tables = order.view(shape.num_seqs, per_sequence)
    dims = (shape.num_seqs, shape.num_kv_heads, shape.context_len, shape.head_dim)
    cache_bytes = 2 * shape.num_seqs * shape.num_kv_heads * shape.context_len * shape.head_dim * dtype.itemsize
    dense, paged = [], []
    for _ in range(max(2, -(-ROTATING_BYTES // cache_bytes))):
        keys, values = (torch.randn(dims, device=DEVICE, dtype=dtype) for _ in range(2))
        blocks = torch.zeros(
            (num_blocks, 2, shape.num_kv_heads, shape.block_size, shape.head_dim), device=DEVICE, dtype=dtype
        )
        for side, rows in enumerate((keys, values)):
            cut = rows.view(*dims[:2], per_sequence, shape.block_size, shape.head_dim).transpose(1, 2)
            blocks[tables.flatten(), side] = cut.flatten(0, 1)
        dense.append((keys, values))
        paged.append(blocks)
    query = torch.randn(
        (shape.num_seqs, shape.num_queries, shape.num_heads, shape.head_dim), device=DEVICE, dtype=dtype
    )
    return Inputs(query, dense, paged, tables.int())


def ours(shape: Shape, inputs: Inputs, stored: torch.dtype | None) -> Call:
    """The paged kernel over caches as they are, or quantised."""
    lens = torch.full((shape.num_seqs,), shape.context_len, dtype=torch.int32, device=DEVICE)
    starts = torch.arange(shape.num_seqs + 1, dtype=torch.int32, device=DEVICE) * shape.num_queries
    batch = DeviceBatch(inputs.tables, starts, lens, shape.num_queries, shape.context_len)
    query = inputs.query.flatten(0, 1)
    out = torch.empty_like(query)
    caches = [(blocks, None) if stored is None else quantise(blocks, stored) for blocks in inputs.paged]

    def call(index: int) -> Tensor:
        blocks, scales = caches[index]
        triton_paged_attention(
            query,
            blocks[:, 0],
            blocks[:, 1],
            batch,
            scale=shape.head_dim**-0.5,
            key_scales=None if scales is None else scales[:, 0],
            value_scales=None if scales is None else scales[:, 1],
            out=out,
        )
        return out

    return call


def sdpa(shape: Shape, inputs: Inputs) -> Call:
    """torch's attention over contiguous keys and values."""
    query = inputs.query.transpose(1, 2)
    mask = None
    if shape.num_queries > 1 and shape.num_queries < shape.context_len:
        places = torch.arange(shape.context_len, device=DEVICE)
        mask = places <= places[shape.context_len - shape.num_queries :, None]
    is_causal = shape.num_queries == shape.context_len

    def call(index: int) -> Tensor:
        keys, values = inputs.dense[index]
        return functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=is_causal, enable_gqa=True
        )

    return call


def flash_attn(_: Shape, inputs: Inputs) -> Call:
    """flash-attn's own paged path needs blocks of 256 tokens, so it gets contiguous keys and values."""
    from flash_attn import flash_attn_func

    caches = [tuple(side.transpose(1, 2).contiguous() for side in pair) for pair in inputs.dense]
    return lambda index: flash_attn_func(inputs.query, *caches[index], causal=True)


def flashinfer(shape: Shape, inputs: Inputs) -> Call:
    """FlashInfer's paged kernels, planned once: like our tables, its plan serves every layer of a step."""
    import flashinfer as library

    per_sequence = inputs.tables.shape[1]
    workspace = torch.empty(256 * 2**20, dtype=torch.uint8, device=DEVICE)
    places = torch.arange(shape.num_seqs + 1, dtype=torch.int32, device=DEVICE)
    last = torch.full(
        (shape.num_seqs,), (shape.context_len - 1) % shape.block_size + 1, dtype=torch.int32, device=DEVICE
    )
    pages = (places * per_sequence, inputs.tables.flatten(), last)
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size)
    query = inputs.query.flatten(0, 1)
    if shape.num_queries == 1:
        wrapper: Any = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        wrapper.plan(*pages, *heads, q_data_type=query.dtype, kv_data_type=query.dtype)
    else:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(places * shape.num_queries, *pages, *heads, causal=True, q_data_type=query.dtype)
    return lambda index: wrapper.run(query, inputs.paged[index])


def median_microseconds(calls: dict[str, Call], num_caches: int) -> dict[str, float]:
    """Let the contenders take turns; return each one's median."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(WARM_UP + TURNS):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            call(turn % num_caches)
            end.record()
            end.synchronize()
            if turn >= WARM_UP:
                times[name].append(begin.elapsed_time(end) * 1000)
    return {name: statistics.median(each) for name, each in times.items()}


def kv_bytes(shape: Shape, stored: torch.dtype) -> int:
    """Bytes of keys, values and scales that a call has to read."""
    heads = 2 * shape.num_seqs * shape.num_kv_heads * shape.context_len
    return heads * (shape.head_dim * stored.itemsize + (4 if is_quantised(stored) else 0))


def measure(shape: Shape, dtype: torch.dtype) -> dict[str, object]:
    inputs = make_inputs(shape, dtype)
    quantised = {"paged int8": torch.int8, "paged e4m3": torch.float8_e4m3fn}
    calls: dict[str, Call] = {"sdpa contiguous": sdpa(shape, inputs), "paged": ours(shape, inputs, None)}
    calls |= {name: ours(shape, inputs, stored) for name, stored in quantised.items()}
    skipped = {}
    for name, module, make in (
        ("flash-attn contiguous", "flash_attn", flash_attn),
        ("flashinfer", "flashinfer", flashinfer),
    ):
        if find_spec(module) is None:
            skipped[name] = f"{module} is not installed"
            continue
        try:
            calls[name] = make(shape, inputs)
            calls[name](0)
        except Exception as error:  # another version's interface, or a shape that it does not take
            calls.pop(name, None)
            skipped[name] = f"{type(error).__name__}: {error}"[:200]
    expected, found = calls["sdpa contiguous"](0), calls["paged"](0)
    assert isinstance(expected, Tensor)
    assert isinstance(found, Tensor)
    difference = (expected.transpose(1, 2).flatten(0, 1).float() - found.float()).abs().max().item()
    medians = median_microseconds(calls, inputs.num_caches)
    return {
        "shape": shape.name,
        "dtype": str(dtype).removeprefix("torch."),
        "largest_difference_from_sdpa": difference,
        "skipped": skipped,
        "results": {
            name: {
                "microseconds": round(time, 1),
                "kv_gigabytes_per_second": round(kv_bytes(shape, quantised.get(name, dtype)) / time / 1000, 1),
                "times_sdpa": round(time / medians["sdpa contiguous"], 3),
            }
            for name, time in medians.items()
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make bench-gpu", description="Paged attention on a device.")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--match", default="", metavar="TEXT", help="only shapes whose name contains TEXT")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(f"nothing to measure: torch {torch.__version__} finds no GPU", file=sys.stderr)
        return 1
    found = []
    for shape in SHAPES:
        if options.match in shape.name:
            found.append(measure(shape, getattr(torch, options.dtype)))
            torch.cuda.empty_cache()
    print(
        json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "attention": found}, indent=2)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
