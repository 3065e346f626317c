"""What the ledger costs for each step of an engine with 256 running sequences. Prints JSON.

    python tests/perf/bench_ledger.py

A decode step of 256 sequences with blocks of 16 tokens: one token each, so that 16 sequences need a new block and 16
fill one, each with events of its own, between the step's two events. The budget is 50 us a step (design.md section 9)
for ledger, counters and views together; the time is the median over rounds, since the machine has other things to do.
"""

import json
import statistics
import sys
import time

from kvwatch.ledger.mirror import Mirror
from kvwatch.telemetry.clock import SystemClock
from kvwatch.telemetry.events import (
    BlocksAllocated,
    BlocksStored,
    RequestAdmitted,
    RequestQueued,
    StepCompleted,
    StepScheduled,
)
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.schema import Event
from kvwatch.telemetry.snapshot import EngineSnapshot, TierState

NUM_SEQUENCES = 256
BLOCK_SIZE = 16
NUM_STEPS = 480
NUM_BLOCKS = 1 + NUM_SEQUENCES * (NUM_STEPS // BLOCK_SIZE + 2)
BUDGET_US = 50.0


def make_snapshot() -> EngineSnapshot:
    """An engine with an empty pool."""
    tier = TierState("device", NUM_BLOCKS, [0] * NUM_BLOCKS, [None] * NUM_BLOCKS, [0] * NUM_BLOCKS)
    return EngineSnapshot(0, 0, 0, BLOCK_SIZE, 1 << 20, 0, 1024, 1 << 20, [tier], [], [])


class DecodingEngine:
    """Emits what an engine emits while all sequences decode in lockstep, block boundaries spread evenly."""

    def __init__(self, log: EventLog) -> None:
        self.log = log
        self.names = [f"chatcmpl-{i:08x}" for i in range(NUM_SEQUENCES)]
        self.lengths = [i % BLOCK_SIZE for i in range(NUM_SEQUENCES)]
        self.current = [0] * NUM_SEQUENCES
        self.next_block = 1
        self.num_used = self.num_hashes = 0

    def start(self) -> None:
        """Admit every request with its first block."""
        for i, name in enumerate(self.names):
            self.log.append(RequestQueued(request=name, prompt_tokens=8, num_sequences=1, queued_ns=1))
            self.allocate(i, "prefill")
            self.log.append(
                RequestAdmitted(
                    request=name,
                    prompt_tokens=8,
                    queried_tokens=8,
                    hit_tokens=0,
                    granularity_lost_tokens=8,
                    queue_ns=1000,
                )
            )

    def allocate(self, i: int, reason: str) -> None:
        """Give sequence i a new block."""
        self.current[i] = self.next_block
        self.log.append(
            BlocksAllocated(request=self.names[i], sequence=0, block_ids=[self.next_block], reason=reason)  # type: ignore[arg-type]
        )
        self.next_block += 1
        self.num_used += 1

    def step(self, number: int) -> None:
        """One token for every sequence."""
        self.log.begin(number)
        for i in range(NUM_SEQUENCES):
            if self.lengths[i] == BLOCK_SIZE:
                self.allocate(i, "decode")
                self.lengths[i] = 0
            self.lengths[i] += 1
        self.log.append(
            StepScheduled(
                requests=self.names,
                num_tokens=[1] * NUM_SEQUENCES,
                total_tokens=NUM_SEQUENCES,
                num_sequences=NUM_SEQUENCES,
                written_block_ids=list(self.current),
                filled_slots=list(self.lengths),
            )
        )
        for i in range(NUM_SEQUENCES):
            if self.lengths[i] == BLOCK_SIZE:
                self.num_hashes += 1
                block_hash = self.num_hashes.to_bytes(32, "big")
                self.log.append(BlocksStored(hashes=[block_hash], block_ids=[self.current[i]], parent=None))
        self.log.begin(number)
        self.log.append(
            StepCompleted(
                schedule_ns=100_000,
                forward_ns=9_000_000,
                sample_ns=400_000,
                apply_ns=90_000,
                generated_tokens=NUM_SEQUENCES,
                recomputed_tokens=0,
                inter_token_ns=[9_600_000, 9_700_000],
                inter_token_counts=[200, 56],
                num_used_blocks=self.num_used,
                num_cached_blocks=0,
                num_empty_blocks=NUM_BLOCKS - 1 - self.num_used,
                num_table_entries=self.num_used,
                num_running=NUM_SEQUENCES,
                num_waiting=0,
                waiting_for={},
                build_ns=200_000,
                linear_ns=4_000_000,
                attention_ns=2_000_000,
                rotary_ns=500_000,
                norm_ns=500_000,
                activation_ns=600_000,
                logits_ns=1_200_000,
            )
        )


def one_round() -> dict[str, float]:
    """Time the two halves of telemetry over all steps, in us a step."""
    log = EventLog()
    cursor = log.subscribe("bench")
    mirror = Mirror(SystemClock())
    mirror.load(make_snapshot())
    engine = DecodingEngine(log)
    engine.start()
    num_events, apply_ns = 0, 0
    for number in range(NUM_STEPS):
        engine.step(number)
        started = time.perf_counter_ns()
        events: list[Event] = cursor.read()
        while events:
            mirror.apply(events)
            num_events += len(events)
            events = cursor.read()
        apply_ns += time.perf_counter_ns() - started
    if mirror.num_violations:
        sys.exit(f"{mirror.num_violations} violations: the benchmark's engine or the ledger is wrong")
    return {"us_per_step": apply_ns / NUM_STEPS / 1000, "events_per_step": num_events / NUM_STEPS}


def main() -> None:
    """Print the result as JSON; exit 1 when the budget is missed."""
    rounds = [one_round() for _ in range(7)]
    us = [each["us_per_step"] for each in rounds]
    result = {
        "num_sequences": NUM_SEQUENCES,
        "events_per_step": round(rounds[0]["events_per_step"], 1),
        "us_per_step_median": round(statistics.median(us), 1),
        "us_per_step_min": round(min(us), 1),
        "budget_us": BUDGET_US,
    }
    print(json.dumps(result))
    sys.exit(result["us_per_step_median"] > BUDGET_US)


if __name__ == "__main__":
    main()
