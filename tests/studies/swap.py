"""Swap against recomputation on this machine: by block size, and by the bandwidth of the link. The embedded model.

python tests/studies/swap.py

Swap is measured on the path that the engine takes: batches through staging memory between the KV cache and the host's
memory, on the CPU two regions of one memory. A slower link is the time that its bandwidth asks for, as the engine's
limit (`--swap-bandwidth`) makes it.
"""

import time

import numpy as np
from embedded_engine import load_embedded, random_prompts, run, submit
from page import FOLDER, Row, put_table
from plot import write_plot

from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.core import EngineCore
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.memory.tiers.device import device_store
from kvwatch_engine.memory.tiers.stores import MemoryStore, plain_memory
from kvwatch_engine.memory.tiers.worker import Job, Mover
from kvwatch_engine.model.loader import LoadedModel
from kvwatch_engine.model.runner import ModelRunner

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
NUM_TOKENS = 512
ROUNDS = 5
"""The fastest counts: what else the machine does only ever adds."""
BANDWIDTHS = {"1 MB/s": 1e6, "10 MB/s": 1e7, "100 MB/s": 1e8, "1 GB/s": 1e9, "10 GB/s": 1e10}
LENGTHS = (32, 128, 512)
STAGING_BYTES = 32 * 2**20


def recompute_seconds(model: LoadedModel, block_size: int, num_tokens: int) -> float:
    """Return the time in which a prompt is computed."""
    num_blocks = 1 + 2 * num_tokens // block_size
    settings = EngineSettings(
        num_blocks=num_blocks, block_size=block_size, max_num_seqs=1, max_batch_tokens=256,
        vocab_size=model.info.vocab_size, enable_prefix_cache=False,
    )  # fmt: skip
    runner = ModelRunner(model, KVCache(model.cache_spec(block_size), num_blocks))
    core = EngineCore(settings, runner, EventLog())
    times = []
    for number in range(ROUNDS + 1):
        submit(core, random_prompts(1, num_tokens, number), 1, f"r{number}")
        begin = time.perf_counter()
        run(core)
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def swap_seconds(model: LoadedModel, block_size: int, num_tokens: int) -> tuple[float, int]:
    """Return the time out and in again of a sequence's blocks, and their bytes."""
    spec = model.cache_spec(block_size)
    count = -(-num_tokens // block_size)
    cache = KVCache(spec, 1 + 4 * count)
    cache.blocks.fill_(1)
    host = plain_memory(1 + count, spec.block_bytes)
    host[:] = 1
    num_staged = min(max(STAGING_BYTES // spec.block_bytes, 4), 256)
    mover = Mover(plain_memory(num_staged, spec.block_bytes))
    device, behind = device_store(lambda: cache), MemoryStore(lambda: host)
    blocks = (1 + np.random.default_rng(7).permutation(4 * count)[:count]).tolist()  # as scattered as in use
    places = list(range(1, count + 1))
    times = []
    for _ in range(ROUNDS + 1):
        out, back = Job(device, blocks, behind, places), Job(behind, places, device, blocks)
        for job in (out, back):
            mover.carry_out(job)
            assert job.num_done == count, job.error
        times.append((out.duration_ns + back.duration_ns) / 1e9)
    return min(times[1:]), count * spec.block_bytes


def main() -> None:
    """Run the study; write its tables and plots."""
    model = load_embedded()
    swaps, computed = [], []
    rows: list[Row] = []
    for size in BLOCK_SIZES:
        swap, num_bytes = swap_seconds(model, size, NUM_TOKENS)
        recompute = recompute_seconds(model, size, NUM_TOKENS)
        swaps.append(swap * 1e3)
        computed.append(recompute * 1e3)
        rows.append([size, num_bytes / 2**20, swap * 1e3, 2 * num_bytes / swap / 1e9, recompute * 1e3,
                     recompute / swap])  # fmt: skip
    head = ["block size", "MiB", "swap ms", "GB/s", "recompute ms", "recompute / swap"]
    put_table("swap", "by block size", head, rows)
    names = [str(size) for size in BLOCK_SIZES]
    write_plot(FOLDER / "swap-block-size.svg", f"Swap out and in, {NUM_TOKENS} tokens", ("block size, tokens", "ms"),
               names, {"swap": swaps})  # fmt: skip
    write_plot(FOLDER / "swap-recompute.svg", f"Recompute, {NUM_TOKENS} tokens", ("block size, tokens", "ms"),
               names, {"recompute": computed})  # fmt: skip
    rows = []
    lines: dict[str, list[float | None]] = {}
    for length in LENGTHS:
        measured, num_bytes = swap_seconds(model, 16, length)
        recompute = recompute_seconds(model, 16, length)
        times = [max(measured, 2 * num_bytes / bandwidth) for bandwidth in BANDWIDTHS.values()]
        lines[f"{length} tokens"] = [min(4.0, recompute / each) for each in times]
        rows.append([length, recompute * 1e3, *(each * 1e3 for each in times),
                     2 * num_bytes / recompute / 1e6])  # fmt: skip
    head = ["tokens", "recompute ms", *(f"swap at {name}, ms" for name in BANDWIDTHS), "break-even MB/s"]
    put_table("swap", "by bandwidth", head, rows)
    axes = ("bandwidth of the link", "recompute / swap (cut at 4)")
    write_plot(FOLDER / "swap-bandwidth.svg", "Above 1 swap is faster", axes, list(BANDWIDTHS), lines)


if __name__ == "__main__":
    main()
