"""What block tables cost: blocks a second on one trace, against the size of the pool, and with events. Prints JSON.

    python tests/perf/bench_block_manager.py
    VLLM_PYTHON=.venv-vllm/bin/python python tests/perf/bench_block_manager.py      with vLLM's beside it

The trace: 2,000 requests of 64 to 1,536 prompt tokens, 32 decode steps each, block 16, 64 of them live at a time. Each
is hashed, looked up, admitted, entered into the prefix index, decoded token by token and released. The pools are full
of cached blocks before, so that every allocation evicts, in a small one as in a large one: the dearest case for events,
which tell each block's age. What events cost where nothing is evicted, and where prompts share 80 %, is printed beside
it.

The log is full too, as it is after a minute: each event takes the place of an old one of the same trace. Where
somebody listens, each admission asks what it would have found, had nothing been evicted, as the engine's does. All
times are this thread's on the processor, so that little depends on what else the machine does.
"""

import gc
import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from block_trace import BLOCK_SIZE, NUM_DECODE_STEPS, NUM_LIVE, NUM_REQUESTS, SHARED_PREFIX, SMALL, prompts
from paired import Estimate, ratio

from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.block import BlockHash
from kvwatch_engine.memory.block_hash import HashChain, root_hash
from kvwatch_engine.memory.block_manager import BlockManager
from kvwatch_engine.memory.block_pool import BlockPool, Owner, StoredRun

SIZE_BUDGET = 1.3
EVENTS_BUDGET = 1.05
PEER_BUDGET = 2.0
PEER = "VLLM_PYTHON"
"""Environment variable that names an interpreter with vLLM."""
LARGE = 1_000_001
"""Blocks of the larger pool, the null block included."""
ROUNDS = 30
REQUESTS_PER_ROUND = 60
ROOT = root_hash([])


class TraceSequence:
    """One request of the trace on its way through the block manager."""

    def __init__(self, number: int, prompt: Sequence[int]) -> None:
        self.owner = Owner(str(number), 0)
        self.token_ids = [*prompt, *range(NUM_DECODE_STEPS)]
        self.num_prompt_tokens = len(prompt)
        self.chain = HashChain(ROOT, BLOCK_SIZE)

    def tokens(self, start: int, end: int) -> Sequence[int]:
        """Return the token ids from one position to another."""
        return self.token_ids[start:end]

    def run(self, manager: BlockManager, *, is_observed: bool) -> None:
        """Admit the request, compute its prompt, and decode; its blocks stay."""
        num_prompt, owner = self.num_prompt_tokens, self.owner
        can_hit = (num_prompt - 1) // BLOCK_SIZE
        hashes = self.chain.upto(can_hit, self.tokens)[:can_hit]
        prefix = manager.find_prefix(hashes)
        if is_observed:
            manager.num_blocks_regretted(hashes, len(prefix))
        if not manager.open(owner, prefix, num_prompt):
            raise RuntimeError("the pool is too small for the trace")
        manager.record_written(owner, len(prefix) * BLOCK_SIZE, num_prompt)
        manager.store_full(owner, self.chain, num_prompt, self.tokens)
        for end in range(num_prompt + 1, num_prompt + NUM_DECODE_STEPS + 1):
            manager.prepare_write(owner, end - 1, end, "decode")
            manager.record_written(owner, end - 1, end)
            manager.store_full(owner, self.chain, end, self.tokens)


def empty_manager(num_blocks: int, log: EventLog) -> BlockManager:
    """Return a manager whose pool has never been used."""
    return BlockManager(BlockPool(num_blocks, log), BLOCK_SIZE, log)


def full_manager(num_blocks: int, log: EventLog) -> BlockManager:
    """Return a manager whose pool is full of cached blocks that no trace asks for."""
    manager = empty_manager(num_blocks, log)
    owner = Owner("before", 0)
    blocks = manager.pool.allocate(num_blocks - 1, owner, "prefill")
    assert blocks is not None
    names = [BlockHash(block.to_bytes(32, "big")) for block in blocks]
    manager.pool.store(blocks, names, None, StoredRun(owner, 0))
    manager.pool.release(blocks, owner, "finished")
    return manager


class Trace:
    """Plays requests on one manager, `NUM_LIVE` at a time; they go on from round to round."""

    def __init__(self, manager: BlockManager, requests: Sequence[Sequence[int]], log: EventLog) -> None:
        self.manager = manager
        self._log = log
        self._requests = requests
        self._live: deque[TraceSequence] = deque()
        self._next = 0

    def play(self, count: int) -> float:
        """Play some requests; return seconds a block."""
        batch = [self._take() for _ in range(count)]
        total = sum(self.manager.blocks_for(len(sequence.token_ids)) for sequence in batch)
        gc.collect()
        started = time.thread_time()
        for sequence in batch:
            if len(self._live) == NUM_LIVE:
                self.manager.release(self._live.popleft().owner, "finished")
            sequence.run(self.manager, is_observed=self._log.active)
            self._live.append(sequence)
        return (time.thread_time() - started) / total

    def _take(self) -> TraceSequence:
        number = self._next
        self._next += 1
        return TraceSequence(number, self._requests[number % len(self._requests)])


def busy_log(requests: Sequence[Sequence[int]]) -> EventLog:
    """Return a log with a subscriber that never reads, whose every place holds an event of the trace already."""
    log = EventLog()
    log.subscribe("bench")
    before = Trace(full_manager(SMALL, log), requests, log)
    while log.head < log.capacity:
        before.play(len(requests) // 2)
    return log


def blocks_per_second(*, shared: float) -> int:
    """Play the whole trace once."""
    log = EventLog()
    trace = Trace(full_manager(SMALL, log), prompts(NUM_REQUESTS, shared=shared), log)
    return round(1 / trace.play(NUM_REQUESTS))


def alternate(first: Trace, second: Trace) -> tuple[list[float], list[float]]:
    """Play rounds in turns, so that a change of the machine's speed meets both; the first round warms up."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(ROUNDS + 1):
        pair = (first, second) if number % 2 else (second, first)
        taken = {id(trace): trace.play(REQUESTS_PER_ROUND) for trace in pair}
        if number:
            times[0].append(taken[id(first)])
            times[1].append(taken[id(second)])
    return times


def events_ratio(
    make: Callable[[int, EventLog], BlockManager], num_blocks: int, requests: Sequence[Sequence[int]]
) -> Estimate:
    """Return how much longer a trace takes with a subscriber than without."""
    quiet, busy = (Trace(make(num_blocks, log), requests, log) for log in (EventLog(), busy_log(requests)))
    quiet_times, busy_times = alternate(quiet, busy)
    return ratio(busy_times, quiet_times)


def peer_blocks_per_second() -> dict[str, float] | None:
    """Have vLLM's block manager play the trace now; None where there is no vLLM."""
    if not os.environ.get(PEER):
        return None
    folder = Path(__file__).parent
    script = folder / "vllm_block_manager.py"
    environment = {**os.environ, "PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run([os.environ[PEER], str(script)], stdout=subprocess.PIPE, env=environment, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def speeds() -> tuple[dict[str, object], bool]:
    """Return blocks a second, ours and vLLM's; and whether ours are as many times more as they should be."""
    ours = {"plain": blocks_per_second(shared=0.0), "shared": blocks_per_second(shared=SHARED_PREFIX)}
    found: dict[str, object] = {"blocks_per_second": ours["plain"], "blocks_per_second_shared": ours["shared"]}
    peer = peer_blocks_per_second()
    if peer is None:
        return found, True
    times = {
        "plain": round(ours["plain"] / peer["blocks_per_second"], 2),
        "shared": round(ours["shared"] / peer["blocks_per_second_shared"], 2),
    }
    return found | {"vllm": peer, "times_vllm": times, "times_vllm_budget": PEER_BUDGET}, min(
        times.values()
    ) >= PEER_BUDGET


def main() -> None:
    """Print the result as JSON; exit 1 when a budget is missed."""
    # Never the same prompt twice within a pair of rounds that both traces play: no hits, so that all blocks are new.
    requests = prompts((ROUNDS + 1) * REQUESTS_PER_ROUND)
    small, large = (
        Trace(full_manager(size, log), requests, log) for size, log in ((SMALL, EventLog()), (LARGE, EventLog()))
    )
    small_times, large_times = alternate(small, large)
    by_size = ratio(large_times, small_times)
    del small, large
    with_events = events_ratio(full_manager, SMALL, requests)
    without_evictions = events_ratio(empty_manager, LARGE, requests)
    shared = prompts((ROUNDS + 1) * REQUESTS_PER_ROUND, shared=SHARED_PREFIX)
    with_shared = events_ratio(full_manager, SMALL, shared)
    found, is_fast = speeds()
    found |= {
        "large_pool_ratio": by_size.rounded(),
        "large_pool_budget": SIZE_BUDGET,
        "events_ratio": with_events.rounded(),
        "events_ratio_without_evictions": without_evictions.rounded(),
        "events_ratio_shared": with_shared.rounded(),
        "events_budget": EVENTS_BUDGET,
    }
    print(json.dumps(found))
    sys.exit(by_size.median > SIZE_BUDGET or with_events.median > EVENTS_BUDGET or not is_fast)


if __name__ == "__main__":
    main()
