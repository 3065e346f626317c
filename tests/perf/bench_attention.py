"""Paged attention beside torch's SDPA over contiguous keys and values, alternating. Prints JSON.

python tests/perf/bench_attention.py

Decode walks over 16 caches in turn, so that none sits in the processor's cache. Budget of design: decode at most 1.2
times SDPA's time (prefill: 1.3); the ratio is that of pairs of runs next to each other.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from paired import ratio
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvwatch_kernels.paged_attention import AttentionBatch

DECODE_BUDGET = 1.2
PREFILL_BUDGET = 1.3


@dataclass(frozen=True)
class Case:
    """One shape: `num_seqs` sequences whose last `num_queries` tokens look back at `context_len` tokens."""

    name: str
    num_seqs: int
    num_queries: int
    context_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_caches: int
    rounds: int
    budget: float | None = None
    block_size: int = 16


CASES = (
    Case("decode_8x1024_16_8_128", 8, 1, 1024, 16, 8, 128, num_caches=16, rounds=96, budget=DECODE_BUDGET),
    Case("decode_16x256_9_3_64", 16, 1, 256, 9, 3, 64, num_caches=16, rounds=400),
    Case("decode_1x4096_9_3_64", 1, 1, 4096, 9, 3, 64, num_caches=16, rounds=200),
    Case("prefill_512_of_2560_16_8_128", 1, 512, 2560, 16, 8, 128, num_caches=1, rounds=15, budget=PREFILL_BUDGET),
    Case("prefill_512_of_2560_9_3_64", 1, 512, 2560, 9, 3, 64, num_caches=1, rounds=25),
    Case("prefill_512_of_512_9_3_64", 1, 512, 512, 9, 3, 64, num_caches=1, rounds=50),
)


def paged(case: Case) -> Callable[[int], Tensor]:
    """Return a run of our attention over cache number i."""
    blocks = -(-case.context_len // case.block_size)
    shape = (case.num_seqs * blocks + 1, 2, case.num_kv_heads, case.block_size, case.head_dim)
    caches = [torch.randn(shape) for _ in range(case.num_caches)]
    sides = [(cache[:, 0], cache[:, 1]) for cache in caches]
    order = np.random.default_rng(0).permutation(case.num_seqs * blocks) + 1
    tables = order.reshape(case.num_seqs, blocks).astype(np.int32)
    starts = np.arange(case.num_seqs + 1, dtype=np.int32) * case.num_queries
    lens = np.full(case.num_seqs, case.context_len, dtype=np.int32)
    query = torch.randn(case.num_seqs * case.num_queries, case.num_heads, case.head_dim)
    # As in a step of the engine, where the caches are those of its layers.
    batch = AttentionBatch(*sides[0], block_tables=tables, query_starts=starts, context_lens=lens)

    def run(index: int) -> Tensor:
        return batch.attend(query, *sides[index % case.num_caches], scale=case.head_dim**-0.5)

    return run


def contiguous(case: Case) -> Callable[[int], Tensor]:
    """Return a run of SDPA over contiguous cache number i."""
    shape = (case.num_seqs, case.num_kv_heads, case.context_len, case.head_dim)
    caches = [(torch.randn(shape), torch.randn(shape)) for _ in range(case.num_caches)]
    query = torch.randn(case.num_seqs, case.num_heads, case.num_queries, case.head_dim)
    # The last query sees everything: only a prefill needs a mask, which is made outside of the measurement.
    places = torch.arange(case.context_len)
    mask = places <= places[case.context_len - case.num_queries :, None] if case.num_queries > 1 else None

    def run(index: int) -> Tensor:
        keys, values = caches[index % case.num_caches]
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)

    return run


def measure(case: Case) -> tuple[dict[str, object], bool]:
    """Alternate the two; return the figures and whether the budget is met."""
    runs = (paged(case), contiguous(case))
    seconds: tuple[list[float], list[float]] = ([], [])
    for index in range(case.rounds + case.num_caches):
        for run, times in zip(runs, seconds, strict=True):
            started = time.perf_counter()
            run(index)
            times.append(time.perf_counter() - started)
    ours, theirs = (times[case.num_caches :] for times in seconds)
    result = ratio(ours, theirs)
    figures: dict[str, object] = {
        "paged_ms": round(median(ours) * 1e3, 3),
        "sdpa_ms": round(median(theirs) * 1e3, 3),
        "ratio": result.rounded(),
    }
    if case.budget is not None:
        figures["budget"] = case.budget
    return figures, case.budget is None or result.median <= case.budget


def main() -> None:
    """Print the result as JSON; exit 1 when a budget is missed."""
    with torch.inference_mode():
        results = {case.name: measure(case) for case in CASES}
    document: dict[str, object] = {"threads": torch.get_num_threads()}
    document.update({name: figures for name, (figures, _) in results.items()})
    print(json.dumps(document))
    sys.exit(not all(is_met for _, is_met in results.values()))


if __name__ == "__main__":
    main()
