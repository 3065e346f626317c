"""How many replicas there should be, by what their engines say: full pools, requests that wait, stalls for blocks."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

USAGE, WAITING, STALLED = "kv_usage_ratio", "waiting_requests", "stall_ratio"
"""Names under which replicas report their signals."""

TARGETS: dict[str, float] = {
    USAGE: 0.8,  # of the pool: a burst of a quarter of the load still fits
    WAITING: 8.0,  # requests: at a second for each that is still a tolerable first token
    STALLED: 0.1,  # of the time with requests waiting for blocks: alerts page at one half
}
"""What each replica should have on average."""

TOLERANCE = 0.1
"""Relative distance from the target that changes nothing."""


def desired_replicas(current: int, signals: Mapping[str, Sequence[float]]) -> int:
    """Return the number at which every signal would be at its target: the largest wish wins.

    Args:
        current: Replicas that run.
        signals: For each signal the values of those replicas that tell it.
    """
    ratios = [
        sum(values) / len(values) / TARGETS[name] for name, values in signals.items() if values and name in TARGETS
    ]
    if not ratios or current == 0:
        return current
    ratio = max(ratios)
    return current if abs(ratio - 1) <= TOLERANCE else math.ceil(current * ratio)


def kv_pressure(context: Any) -> tuple[int, dict[str, Any]]:
    """Decide for Ray Serve, which bounds and delays the decision.

    Args:
        context: Ray's `AutoscalingContext`.
    """
    aggregated = context.aggregated_metrics or {}
    signals = {name: [float(value) for value in by_replica.values()] for name, by_replica in aggregated.items()}
    return desired_replicas(context.current_num_replicas, signals), {}
