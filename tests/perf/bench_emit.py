"""What an emit site costs: idle (nobody listens), and with a subscriber attached. Prints JSON.

python tests/perf/bench_emit.py

The cost of an empty loop is taken off. Budgets of design: 20 ns idle, 0.5 us with subscribers.
"""

import json
import sys
import time
from collections.abc import Callable

from paired import estimate

from kvwatch.telemetry.events import BlocksAllocated
from kvwatch.telemetry.log import EventLog

IDLE_BUDGET_NS = 20.0
EMIT_BUDGET_NS = 500.0
LOOPS = 100_000
ROUNDS = 15
BLOCK_IDS = [1, 2]


def emit(log: EventLog) -> None:
    """An emit site as the engine has them."""
    for _ in range(LOOPS):
        if log.active:
            log.append(BlocksAllocated("request", 0, BLOCK_IDS, "decode"))


def loop_only(_log: EventLog) -> None:
    """The loop without the emit site."""
    for _ in range(LOOPS):
        pass


def ns_per_loop(run: Callable[[EventLog], None], log: EventLog) -> float:
    """Time one round."""
    started = time.perf_counter_ns()
    run(log)
    return (time.perf_counter_ns() - started) / LOOPS


def main() -> None:
    """Print the result as JSON; exit 1 when a budget is missed."""
    idle_log, busy_log = EventLog(), EventLog()
    busy_log.subscribe("bench")
    idle = estimate([ns_per_loop(emit, idle_log) - ns_per_loop(loop_only, idle_log) for _ in range(ROUNDS)])
    busy = estimate([ns_per_loop(emit, busy_log) - ns_per_loop(loop_only, busy_log) for _ in range(ROUNDS)])
    print(
        json.dumps(
            {
                "idle_ns": idle.rounded(1),
                "idle_budget_ns": IDLE_BUDGET_NS,
                "emit_ns": busy.rounded(1),
                "emit_budget_ns": EMIT_BUDGET_NS,
            }
        )
    )
    sys.exit(idle.median > IDLE_BUDGET_NS or busy.median > EMIT_BUDGET_NS)


if __name__ == "__main__":
    main()
