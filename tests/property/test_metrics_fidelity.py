"""Under random load every metric equals what the engine's own structures say, after every step."""

import pytest
from random_load import RandomLoad

GROUPS = [(None, 6), (7,), (None, 1, 9), (None, None)]
"""Windows of the KV groups: full attention and sliding, sliding alone, two of each kind."""


def follow(seed: int, num_steps: int, windows: tuple[int | None, ...] = (None,)) -> RandomLoad:
    """Let an engine do so many steps at random, idle turns not counted, and compare after each of them."""
    load = RandomLoad(seed, windows)
    while load.core.num_steps < num_steps:
        load.turn()
        assert load.differences() == [], f"seed {seed}, step {load.core.num_steps}"
        assert load.mirror.num_violations == 0
    assert load.mirror.ledger.differences(load.core.snapshot()) == []
    return load


@pytest.mark.parametrize("seed", range(4))
def test_every_metric_equals_the_engines_own_structures_after_every_step(seed: int) -> None:
    """vllm#15538, #25780, #27073, sglang#22726 (O01, O22, O59, O62): numbers that only almost followed the engine."""
    follow(seed, 80)


@pytest.mark.parametrize("seed", range(4, 6))
@pytest.mark.parametrize("windows", GROUPS)
def test_every_metric_of_every_kv_group_equals_the_engines_own_structures(
    windows: tuple[int | None, ...], seed: int
) -> None:
    """Blocks that left a window are counted no more, and each group counts its own."""
    follow(seed, 80, windows)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(200, 206))
@pytest.mark.parametrize("windows", GROUPS)
def test_every_metric_of_every_kv_group_equals_the_engines_own_structures_over_thousands_of_steps(
    windows: tuple[int | None, ...], seed: int
) -> None:
    follow(seed, 500, windows)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(100, 120))
def test_every_metric_equals_the_engines_own_structures_over_ten_thousand_steps(seed: int) -> None:
    follow(seed, 500)


MOVED_ELSEWHERE = {
    "swap_blocks", "swap_bytes", "swap_seconds", "transfer_failures", "config_changes", "prefix_cache_mismatches",
}  # fmt: skip
"""What needs tiers behind the device (see test_transfer_metrics.py), a live change of settings, or a defect."""


def test_random_load_moves_every_counter_and_histogram_of_the_engine() -> None:
    """LMCache#2574 (O08): a counter that no test moved stayed at 0 for months."""
    moved: set[str] = set()
    for seed in range(8):
        view = follow(seed, 50).mirror.view
        moved |= {sample.metric.name for sample in view.counters if sample.value}
        moved |= {histogram.metric.name for histogram in view.histograms if histogram.count}

    declared = {sample.metric.name for sample in view.counters} | {sample.metric.name for sample in view.histograms}
    assert declared - moved == {"ledger_violations"} | MOVED_ELSEWHERE
