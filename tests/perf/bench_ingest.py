"""How fast a sidecar takes in KV events, and how much memory a large cache costs it. Prints JSON, exits 1 when missed.

    python tests/perf/bench_ingest.py

Messages as a vLLM publishes them (16 blocks of 16 tokens in each batch, every block with an event of its own, as while
sequences decode) go through decoder, mirror, observer and event log, with a reader of the log that keeps up. An event
is one block stored or removed; every form is timed with 100,000 blocks resident, as many removed as stored. Budgets:
200,000 block events in a second of one core, in the form of vLLM 0.26 and later, with all that a sidecar does; 400 MB
resident at a million blocks. Other forms, and what is faster without an observer, are printed beside.
"""

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from kvwatch.sources.insight import make_observer
from kvwatch.sources.mirror import LOG_CAPACITY, Mirror
from kvwatch.telemetry.clock import SystemClock
from kvwatch.telemetry.log import EventLog
from kvwatch.wire.decoder import Decoder

NUM_LIVE = 1_000_000
BLOCKS_PER_BATCH = 16
BLOCK_SIZE = 16
BUDGET_PER_SECOND = 200_000
BUDGET_MEGABYTES = 400.0
TIMED_BLOCKS = 160_000

Payloads = Iterator[tuple[bytes, int]]
Store = Callable[[list[int], int, list[int]], Any]


def map_store(hashes: list[int], parent: int, tokens: list[int]) -> Any:
    """A store as vLLM writes it from 0.24 on."""
    return {
        "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens,
        "block_size": BLOCK_SIZE, "lora_id": None, "medium": "GPU", "lora_name": None, "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }  # fmt: skip


def array_store(hashes: list[int], parent: int, tokens: list[int]) -> Any:
    """A store as vLLM writes it before that."""
    return ["BlockStored", hashes, parent, tokens, BLOCK_SIZE, None, "GPU", None, None, 0, "full_attention", None]


def churn(rnd: random.Random, live: list[int], store: Store, *, grows: bool, per_event: int = 1) -> Payloads:
    """Yield messages for ever: stores, and while it does not grow as many removals. With the blocks of each."""
    number = 0
    while True:
        events: list[Any] = []
        for _ in range(BLOCKS_PER_BATCH // per_event):
            hashes = [rnd.getrandbits(64) for _ in range(per_event)]
            tokens = [rnd.randrange(100, 150_000) for _ in range(BLOCK_SIZE * per_event)]
            parent = live[rnd.randrange(len(live))] if live else 0
            if not grows:
                gone = []
                for fresh, place in zip(hashes, rnd.sample(range(len(live)), per_event), strict=True):
                    gone.append(live[place])
                    live[place] = fresh
                events.append({"type": "BlockRemoved", "block_hashes": gone, "medium": "GPU", "group_idx": 0})
            else:
                live.extend(hashes)
            events.append(store(hashes, parent, tokens))
        if store is array_store:
            events = [e if isinstance(e, list) else ["BlockRemoved", e["block_hashes"], "GPU", 0] for e in events]
        number += 1
        yield msgspec.msgpack.encode([time.time(), events, 0]), BLOCKS_PER_BATCH * (1 if grows else 2)


class Sidecar:
    """What a sidecar does with a message."""

    def __init__(self, *, in_full: bool = False, has_observer: bool = True) -> None:
        clock = SystemClock()
        self.log = EventLog(LOG_CAPACITY, clock)
        self.cursor = self.log.subscribe("bench")
        self.observer = make_observer(2_000_000) if has_observer else None
        self.mirror = Mirror(self.log, clock, observer=self.observer)
        self.mirror.confirm()
        self.decoder = Decoder(in_full=in_full)

    def take(self, payload: bytes) -> None:
        """Take in one message, and let the reader of the log follow."""
        self.mirror.apply(self.decoder.decode(payload))
        self.cursor.read(1024)


def rate(sidecar: Sidecar, messages: Payloads) -> float:
    """Return block events in a second of one core; the median over pieces, since the machine has other things to do."""
    rates = []
    for _ in range(8):
        piece = [next(messages) for _ in range(TIMED_BLOCKS // 8 // BLOCKS_PER_BATCH)]
        began = time.process_time()
        for payload, _ in piece:
            sidecar.take(payload)
        rates.append(sum(blocks for _, blocks in piece) / (time.process_time() - began))
    return statistics.median(rates)


def resident_megabytes(line: str = "VmRSS") -> float:
    """Return this process's resident memory, or with `VmHWM` the most that it ever was."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{line}:")[1].split()[0]) * 1024 / 1e6


def measure_memory() -> dict[str, float]:
    """Fill a mirror in a process that keeps nothing of its own of it, and have its metrics read."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        before = resident_megabytes()
        sidecar, rnd, sink = Sidecar(), random.Random(2), _Forgetful()
        messages = churn(rnd, sink, map_store, grows=True)
        while sidecar.mirror.num_blocks < NUM_LIVE:
            sidecar.take(next(messages)[0])
        assert sidecar.observer is not None
        for _ in range(3):
            list(sidecar.observer.samples())
        sidecar.mirror.snapshot()
        os.write(writer, json.dumps([before, resident_megabytes(), resident_megabytes("VmHWM")]).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        before, after, most = json.loads(pipe.read())
    os.waitpid(pid, 0)
    return {
        "megabytes_before": round(before, 1),
        "megabytes_at_1m_blocks": round(after, 1),
        "megabytes_at_most": round(most, 1),
    }


class _Forgetful(list[int]):
    """Keeps the last few only."""

    def extend(self, values: Any) -> None:
        super().extend(values)
        del self[:-64]


def main() -> None:
    """Print the result as JSON; exit 1 when a budget is missed."""
    result: dict[str, float] = measure_memory()
    rnd = random.Random(1)
    for name, store, options, per_event in (
        ("maps", map_store, {}, 1),
        ("maps_without_observer", map_store, {"has_observer": False}, 1),
        ("maps_16_blocks_an_event", map_store, {}, 16),
        ("arrays", array_store, {}, 1),
        ("maps_in_full", map_store, {"in_full": True}, 1),
    ):
        live: list[int] = []
        sidecar = Sidecar(**options)
        filling = churn(rnd, live, map_store, grows=True, per_event=16)
        while len(live) < 100_000:
            sidecar.take(next(filling)[0])
        messages = churn(rnd, live, store, grows=False, per_event=per_event)
        result[f"events_per_second_{name}"] = round(rate(sidecar, messages))
        if sidecar.mirror.drift_blocks:
            sys.exit("the benchmark's engine or the mirror is wrong")
    result |= {"budget_events_per_second": BUDGET_PER_SECOND, "budget_megabytes": BUDGET_MEGABYTES}
    print(json.dumps(result))
    is_missed = result["events_per_second_maps"] < BUDGET_PER_SECOND or result["megabytes_at_most"] > BUDGET_MEGABYTES
    sys.exit(is_missed)


if __name__ == "__main__":
    main()
