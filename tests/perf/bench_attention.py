"""Paged attention beside torch's SDPA over contiguous keys and values. Prints JSON, exits 1 when a budget is missed.

python tests/perf/bench_attention.py            everything
python tests/perf/bench_attention.py decode     cases whose name contains the word

All walk over 16 caches in turn, so that none sits in the processor's cache. Ratios are of pairs of alternating runs.
Budgets: decode at most 1.2 times SDPA's time, prefill at most 1.3; one long context at least 1.7 times as fast on two
threads as on one. Quantised caches stand beside SDPA in float32, without a budget.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from paired import ratio
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvwatch_kernels.paged_attention import AttentionBatch
from kvwatch_kernels.quant import is_quantised, quantise

DECODE_BUDGET = 1.2
PREFILL_BUDGET = 1.3
THREADS_BUDGET = 1.7
NUM_CACHES = 16
BLOCK_SIZE = 16

Run = Callable[[int], object]
"""A run over cache number i, modulo their number."""


@dataclass(frozen=True)
class Case:
    """One shape: `num_seqs` sequences whose last `num_queries` tokens look back at `context_len` tokens."""

    name: str
    num_seqs: int
    num_queries: int
    context_len: int
    num_heads: int = 16
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.float32
    rounds: int = 96
    budget: float | None = None

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of the queries, and of SDPA's keys and values."""
        return torch.float32 if is_quantised(self.dtype) else self.dtype


def small_model(name: str, num_seqs: int, num_queries: int, context_len: int, *, rounds: int) -> Case:
    """A case with the heads of a model of 135 million weights."""
    return Case(name, num_seqs, num_queries, context_len, num_heads=9, num_kv_heads=3, head_dim=64, rounds=rounds)


CASES = (
    Case("decode_8x1024_float32", 8, 1, 1024, budget=DECODE_BUDGET),
    Case("decode_8x1024_bfloat16", 8, 1, 1024, dtype=torch.bfloat16, budget=DECODE_BUDGET),
    Case("decode_8x1024_int8", 8, 1, 1024, dtype=torch.int8),
    Case("decode_8x1024_fp8_e4m3", 8, 1, 1024, dtype=torch.float8_e4m3fn),
    Case("decode_8x1024_fp8_e5m2", 8, 1, 1024, dtype=torch.float8_e5m2),
    small_model("decode_16x256_small_model", 16, 1, 256, rounds=400),
    small_model("decode_1x4096_small_model", 1, 1, 4096, rounds=200),
    Case("prefill_512_of_2560_float32", 1, 512, 2560, rounds=16, budget=PREFILL_BUDGET),
    Case("prefill_512_of_2560_bfloat16", 1, 512, 2560, dtype=torch.bfloat16, rounds=16),
    Case("prefill_512_of_2560_int8", 1, 512, 2560, dtype=torch.int8, rounds=16),
    small_model("prefill_512_of_2560_small_model", 1, 512, 2560, rounds=24),
    small_model("prefill_512_of_512_small_model", 1, 512, 512, rounds=48),
)
LONG = Case("threads_1x8192", 1, 1, 8192, budget=THREADS_BUDGET)


@dataclass(frozen=True)
class Side:
    """Keys or values of a layer in a paged cache."""

    cache: Tensor
    scales: Tensor | None


def make_side(blocks: Tensor, dtype: torch.dtype) -> Side:
    """Keep blocks of keys or values, f32[num_blocks, num_kv_heads, BLOCK_SIZE, head_dim], in a dtype."""
    return Side(*quantise(blocks, dtype)) if is_quantised(dtype) else Side(blocks.to(dtype), None)


def paged(case: Case) -> Run:
    """Return a run of our attention."""
    blocks = -(-case.context_len // BLOCK_SIZE)
    shape = (case.num_seqs * blocks + 1, case.num_kv_heads, BLOCK_SIZE, case.head_dim)
    caches = [tuple(make_side(torch.randn(shape), case.dtype) for _ in range(2)) for _ in range(NUM_CACHES)]
    order = np.random.default_rng(0).permutation(case.num_seqs * blocks) + 1
    tables = order.reshape(case.num_seqs, blocks).astype(np.int32)
    starts = np.arange(case.num_seqs + 1, dtype=np.int32) * case.num_queries
    lens = np.full(case.num_seqs, case.context_len, dtype=np.int32)
    query = torch.randn(case.num_seqs * case.num_queries, case.num_heads, case.head_dim, dtype=case.compute_dtype)
    # As in a step of the engine, where the caches are those of its layers.
    keys, values = caches[0]
    batch = AttentionBatch(
        keys.cache,
        values.cache,
        block_tables=tables,
        query_starts=starts,
        context_lens=lens,
        key_scales=keys.scales,
        value_scales=values.scales,
    )

    def run(index: int) -> Tensor:
        keys, values = caches[index % NUM_CACHES]
        return batch.attend(
            query,
            keys.cache,
            values.cache,
            scale=case.head_dim**-0.5,
            key_scales=keys.scales,
            value_scales=values.scales,
        )

    return run


def contiguous(case: Case) -> Run:
    """Return a run of SDPA over contiguous keys and values."""
    dtype = case.compute_dtype
    shape = (case.num_seqs, case.num_kv_heads, case.context_len, case.head_dim)
    caches = [(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)) for _ in range(NUM_CACHES)]
    mask: Tensor | None = None
    if case.num_queries == 1:
        # The query heads of a KV head as queries of one head: SDPA then reads keys once for all of them, and is faster.
        query = torch.randn(case.num_seqs, case.num_kv_heads, case.num_heads // case.num_kv_heads, case.head_dim).to(
            dtype
        )
    else:
        query = torch.randn(case.num_seqs, case.num_heads, case.num_queries, case.head_dim).to(dtype)
        places = torch.arange(case.context_len)
        mask = places <= places[case.context_len - case.num_queries :, None]

    def run(index: int) -> Tensor:
        keys, values = caches[index % NUM_CACHES]
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)

    return run


def alternate(runs: Sequence[Run], rounds: int) -> list[list[float]]:
    """Time runs in turn, each over all caches, after one round over them that does not count; seconds of each run."""
    seconds: list[list[float]] = [[] for _ in runs]
    for index in range(rounds + NUM_CACHES):
        for run, times in zip(runs, seconds, strict=True):
            started = time.perf_counter()
            run(index)
            times.append(time.perf_counter() - started)
    return [times[NUM_CACHES:] for times in seconds]


def measure(case: Case) -> tuple[dict[str, object], bool]:
    """Compare with SDPA; return the figures and whether the budget is met."""
    ours, theirs = alternate((paged(case), contiguous(case)), case.rounds)
    result = ratio(ours, theirs)
    figures: dict[str, object] = {
        "paged_ms": round(median(ours) * 1e3, 3),
        "sdpa_ms": round(median(theirs) * 1e3, 3),
        "ratio": result.rounded(),
    }
    if case.budget is not None:
        figures["budget"] = case.budget
    return figures, case.budget is None or result.median <= case.budget


def measure_threads(case: Case) -> tuple[dict[str, object], bool]:
    """Compare one thread with two on one long context; return the figures and whether the budget is met."""
    num_threads = torch.get_num_threads()
    run = paged(case)

    def on(threads: int) -> Run:
        def on_threads(index: int) -> None:
            torch.set_num_threads(threads)
            run(index)

        return on_threads

    if num_threads < 2:
        return {"skipped": "torch has one thread only"}, True
    one, two = alternate((on(1), on(2)), case.rounds)
    torch.set_num_threads(num_threads)
    speed_up = ratio(one, two)
    figures: dict[str, object] = {
        "one_thread_ms": round(median(one) * 1e3, 3),
        "two_threads_ms": round(median(two) * 1e3, 3),
        "speed_up": speed_up.rounded(),
        "budget": case.budget,
    }
    return figures, case.budget is None or speed_up.median >= case.budget


def main() -> None:
    """Print the result as JSON; exit 1 when a budget is missed."""
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    with torch.inference_mode():
        results = {case.name: measure(case) for case in CASES if word in case.name}
        if word in LONG.name:
            results[LONG.name] = measure_threads(LONG)
    document: dict[str, object] = {"threads": torch.get_num_threads()}
    document.update({name: figures for name, (figures, _) in results.items()})
    print(json.dumps(document))
    sys.exit(not all(is_met for _, is_met in results.values()))


if __name__ == "__main__":
    main()
