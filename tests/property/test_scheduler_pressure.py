"""The scheduler's machine driven hard: small pools, long queues, many sequences, transfers that fail and take time.

Hypothesis finds short counterexamples; these long runs get into states that need many steps to come about.
"""

from random import Random
from typing import Any

import pytest
from scheduler_machine import WINDOWS, SchedulerMachine

TURNS = 120


def drive(seed: int) -> None:
    random = Random(seed)
    machine = SchedulerMachine()
    block_size = random.choice([1, 2, 4, 8])
    max_num_seqs = random.randint(3, 8)
    machine.start(
        num_blocks=random.randint(12, 24 if block_size > 2 else 50),
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        extra_budget=random.choice([0, 4, 24]),
        max_chunk=random.choice([None, None, 2, 5]),
        watermark=random.choice([0, 0, 2]),
        enable_cache=random.random() < 0.6,
        log_capacity=random.choice([16, 100_000, 100_000]),
        closely=random.random() < 0.5,
        policies=(
            random.choice(["recompute", "swap", "swap", "auto"]),
            random.choice(["newest", "least-computed", "lowest-priority"]),
            random.random() < 0.5,
            random.choice([0.0, 0.5, 30.0]),
            random.randint(1, 4),
            random.choice([(0.0, 0.0), (0.03, 0.05), (0.0, 0.02)]),
        ),
        tiers=random.choice([None, random_tiers(random), random_real_tiers(random), random_real_tiers(random)]),
        tiers_seed=seed,
        windows=random.choice(WINDOWS),
        speculation=random.choice([None, (random.randint(1, 6), random.randint(1, 3), random.randint(2, 6))]),
    )
    for _ in range(TURNS):
        turn(machine, random)
        machine.ledger_equals_the_engine_after_every_rule()
        machine.everything_is_sound()
        machine.nobody_is_admitted_before_an_earlier_one_of_the_same_priority()
        machine.filled_slots_are_computed_tokens()
    machine.teardown()


def random_tiers(random: Random) -> dict[str, Any]:
    return {
        "max_polls": random.choice([0, 2, 6]),
        "failure_rate": random.choice([0.0, 0.2, 1.0]),
        "host_blocks": random.choice([8, 80]),
        "num_prefixes": random.choice([0, 30]),
        "seconds_per_block": random.choice([None, 0.0, 1.0]),
    }


def random_real_tiers(random: Random) -> dict[str, Any]:
    return {
        "copy_failures": random.choice([0.0, 0.1, 1.0]),
        "host_blocks": random.choice([8, 80]),
        "seconds": random.choice([0.3, 100.0]),
    }


def turn(machine: SchedulerMachine, random: Random) -> None:
    kind = random.random()
    if kind < 0.45 and len(machine.core.live_request_ids()) < 20:
        machine.submit(
            prompt=[random.randint(0, 1) for _ in range(random.randint(1, 30))],
            n=random.choice([1, 1, 2, 3]),
            max_tokens=random.randint(1, 20),
            min_tokens=random.randint(0, 3),
            ignore_eos=random.random() < 0.7,
            seed=random.randint(0, 1000),
            priority=random.choice([0, 0, 1, 3]),
            deadline=random.choice([None, None, None, 0.3, 5.0]),
            width=random.choice([0, 0, 0, 1, 2, 3, 5]),
        )
    elif kind < 0.85:
        machine.step(random.choice([1, 1, 2, 4]), random.choice([0.0, 0.0, 0.01, 0.4]))
    elif kind < 0.88:
        machine.resize(random.randint(12, 50))
    elif kind < 0.9:
        machine.rebuild(random.choice([1, 2, 3, 4, 8]), random.random() < 0.7)
    else:
        kinds = ["abort", "abort", "stop", "stop", "stop", "fail a step", "run out of memory", "reset", "pause"]
        machine.disturb(random.choice(kinds), random.randint(0, 10_000), random.randint(0, 2))


@pytest.mark.parametrize("seed", range(60))
def test_it_never_gets_into_a_wrong_state(seed: int) -> None:
    drive(seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_it_never_gets_into_a_wrong_state_for_minutes() -> None:
    for seed in range(1_000, 6_000):
        drive(seed)
