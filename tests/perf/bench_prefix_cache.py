"""What the prefix cache is worth on the embedded model, and what it costs who never hits. Prints JSON.

    python tests/perf/bench_prefix_cache.py [--seconds 120]

Worth: time to the first token of a prompt of which nine tenths, 1,000 tokens, are shared, found in the cache or not.
Cost: the same load without any common prefix on two engines, with the cache and without; the pool is small, so that the
one with the cache evicts all the time. They take their steps in turn, now the one first, now the other: whatever slows
the machine down for longer than a step slows down both. Rounds of prompts are paired.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence

from embedded_engine import load_embedded, make_core, random_prompts, run, submit
from paired import estimate, ratio

from kvwatch.telemetry.log import EventLog
from kvwatch_engine.core import EngineCore
from kvwatch_engine.model.loader import LoadedModel

NUM_SHARED = 1000
NUM_OWN = 111
BUDGET_SPEEDUP = 5.0
BUDGET_LOSS = 0.01
BATCH = 8
NUM_PROMPT_TOKENS = 96
NUM_OUTPUT_TOKENS = 16
SMALL_POOL = 1 + 2 * BATCH * (NUM_PROMPT_TOKENS + NUM_OUTPUT_TOKENS) // 16
"""Blocks of the pool in which cost is measured: two rounds fill it."""


def first_token_seconds(core: EngineCore, prompt: tuple[int, ...], name: str) -> float:
    """Return the time from a request's arrival at an idle engine to its first token."""
    started = time.perf_counter()
    submit(core, [prompt], 1, name)
    run(core)
    return time.perf_counter() - started


def measure_worth(model: LoadedModel, seconds: float) -> dict[str, object]:
    """Alternate prompts whose beginning is known with prompts that are all new."""
    core = make_core(model, EventLog(), num_blocks=4096)
    (shared,) = random_prompts(1, NUM_SHARED, 1)
    first_token_seconds(core, shared, "shared")
    cold: list[float] = []
    warm: list[float] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline or len(cold) < 8:
        seed = 10 + len(cold)
        (fresh,) = random_prompts(1, NUM_SHARED + NUM_OWN, seed)
        cold.append(first_token_seconds(core, fresh, f"cold{seed}"))
        warm.append(first_token_seconds(core, shared + fresh[:NUM_OWN], f"warm{seed}"))
    speedup = ratio(cold, warm)
    return {
        "pairs": len(cold),
        "shared_tokens": NUM_SHARED,
        "own_tokens": NUM_OWN,
        "cold_first_token_ms": estimate([1e3 * each for each in cold]).rounded(1),
        "warm_first_token_ms": estimate([1e3 * each for each in warm]).rounded(1),
        "speedup": speedup.rounded(2),
        "budget_speedup_lower95": BUDGET_SPEEDUP,
        "is_missed": speedup.low < BUDGET_SPEEDUP,
    }


def tokens_per_second(cores: Sequence[EngineCore], seed: int) -> list[float]:
    """Run one round of prompts that nobody has sent before on engines that step in turn.

    Returns:
        Tokens/s of each engine in the time that it had, those of the prompts included.
    """
    prompts = random_prompts(BATCH, NUM_PROMPT_TOKENS, seed)
    seconds = [0.0] * len(cores)
    num_tokens = BATCH * NUM_PROMPT_TOKENS
    in_order = list(range(len(cores)))
    for index in in_order:
        started = time.perf_counter()
        submit(cores[index], prompts, NUM_OUTPUT_TOKENS, f"round{seed}")
        seconds[index] += time.perf_counter() - started
    while cores[0].has_work:
        for index in in_order:
            started = time.perf_counter()
            outputs = cores[index].step()
            seconds[index] += time.perf_counter() - started
            num_tokens += sum(len(output.token_ids) for output in outputs) if index == 0 else 0
        in_order.reverse()
    assert not any(core.has_work for core in cores), "all take the same steps"
    return [num_tokens / each for each in seconds]


def measure_cost(model: LoadedModel, seconds: float) -> dict[str, object]:
    """Let an engine with the cache and one without compute the same."""
    cores = [
        make_core(model, EventLog(), num_blocks=SMALL_POOL, enable_prefix_cache=enabled) for enabled in (True, False)
    ]
    for seed in range(3):
        tokens_per_second(cores, seed)
    on: list[float] = []
    off: list[float] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline or len(on) < 8:
        with_cache, without = tokens_per_second(cores, 1000 + len(on))
        on.append(with_cache)
        off.append(without)
    loss = estimate([1 - a / b for a, b in zip(on, off, strict=True)])
    return {
        "pairs": len(on),
        "on_tokens_per_second": estimate(on).rounded(1),
        "off_tokens_per_second": estimate(off).rounded(1),
        "loss": loss.rounded(4),
        "budget_loss_upper95": BUDGET_LOSS,
        "is_missed": loss.high > BUDGET_LOSS,
    }


def main() -> None:
    """Print the result as JSON; exit 1 when an end of an interval misses its budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120)
    seconds = parser.parse_args().seconds
    model = load_embedded()
    worth = measure_worth(model, seconds / 4)
    cost = measure_cost(model, seconds * 3 / 4)
    print(json.dumps({"first_token_at_90_percent_shared": worth, "throughput_at_0_percent_hit": cost}))
    sys.exit(bool(worth["is_missed"] or cost["is_missed"]))


if __name__ == "__main__":
    main()
