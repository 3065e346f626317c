"""The two ways back to a preempted request's K/V, each alone: moved out and in again, or computed again."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from embedded_engine import random_prompts, run, submit

from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.core import EngineCore
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.memory.tiers.device import device_store
from kvwatch_engine.memory.tiers.stores import BlockStore, MemoryStore, plain_memory
from kvwatch_engine.memory.tiers.worker import Job, Mover
from kvwatch_engine.model.loader import LoadedModel
from kvwatch_engine.model.runner import ModelRunner

MAX_BATCH_TOKENS = 256
_STAGING_BYTES = 32 * 2**20
_STAGING_BLOCKS = (4, 256)
"""As in `memory/tiers/tiers.py`."""


@dataclass(frozen=True)
class _Sequence:
    blocks: list[int]
    """On the device, as scattered as in use."""
    places: list[int]
    """On the host."""


class SwapPath:
    """Moves sequences between a KV cache and host memory, in batches through staging memory, as the engine does.

    All go out before the first comes back, so that the processor's cache does not hold what is read.
    """

    def __init__(self, model: LoadedModel, block_size: int, num_tokens: int, num_sequences: int) -> None:
        """Claim memory for sequences of so many tokens, and touch all of it."""
        spec = model.cache_spec(block_size)
        count = -(-num_tokens // block_size)
        total = num_sequences * count
        cache = KVCache(spec, 1 + total)
        cache.blocks.fill_(1)
        host = plain_memory(1 + total, spec.block_bytes)
        host[:] = 1
        num_staged = min(max(_STAGING_BYTES // spec.block_bytes, _STAGING_BLOCKS[0]), _STAGING_BLOCKS[1])
        self._staging = plain_memory(num_staged, spec.block_bytes)
        self._device: BlockStore[int] = device_store(lambda: cache)
        self._host: BlockStore[int] = MemoryStore(lambda: host)
        scattered = np.random.default_rng(7).permutation(np.arange(1, 1 + total)).tolist()
        self._sequences = [
            _Sequence(scattered[first : first + count], list(range(1 + first, 1 + first + count)))
            for first in range(0, total, count)
        ]
        self.sequence_bytes = count * spec.block_bytes
        """Bytes of one sequence, in one direction."""

    def seconds(self, bytes_per_second: float | None = None) -> float:
        """Return the time out and in again of one sequence; a link may be slower than the machine's memory."""
        mover = Mover(self._staging, bytes_per_second)
        out = [Job(self._device, each.blocks, self._host, each.places) for each in self._sequences]
        back = [Job(self._host, each.places, self._device, each.blocks) for each in self._sequences]
        for job in (*out, *back):
            mover.carry_out(job)
            assert job.num_done == len(job.source_keys), job.error
        return sum(job.duration_ns for job in (*out, *back)) / 1e9 / len(self._sequences)


class RecomputePath:
    """Computes prompts of one length, one after the other."""

    def __init__(self, model: LoadedModel, block_size: int, num_tokens: int) -> None:
        """Make an engine whose pool has room for one of them."""
        num_blocks = 3 + num_tokens // block_size
        settings = EngineSettings(
            num_blocks=num_blocks, block_size=block_size, max_num_seqs=1, max_batch_tokens=MAX_BATCH_TOKENS,
            vocab_size=model.info.vocab_size, enable_prefix_cache=False,
        )  # fmt: skip
        runner = ModelRunner(model, KVCache(model.cache_spec(block_size), num_blocks))
        runner.warm_up(MAX_BATCH_TOKENS)
        self._core = EngineCore(settings, runner, EventLog())
        self._num_tokens = num_tokens
        self._num_done = 0

    def seconds(self) -> float:
        """Return the time in which a prompt is computed."""
        self._num_done += 1
        submit(self._core, random_prompts(1, self._num_tokens, self._num_done), 1, str(self._num_done))
        return timed(lambda: run(self._core))


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that something takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
