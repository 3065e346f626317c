from types import SimpleNamespace

import pytest

from kvwatch_ray.scaling import STALLED, TARGETS, USAGE, WAITING, desired_replicas, kv_pressure


@pytest.mark.parametrize(
    ("current", "signals", "wanted"),
    [
        (2, {USAGE: [0.8, 0.8]}, 2),  # at its target
        (2, {USAGE: [0.85, 0.85]}, 2),  # near it
        (4, {USAGE: [0.2, 0.2, 0.2, 0.2]}, 1),
        (2, {USAGE: [0.4, 0.4], WAITING: [16, 16]}, 4),  # the queue wants more than the pool does
        (2, {USAGE: [0.4, 0.4], WAITING: [0, 0], STALLED: [0.3, 0.1]}, 4),
        (3, {USAGE: [0.0, 0.0, 0.0], WAITING: [0, 0, 0]}, 0),  # Ray keeps to the minimum
        (3, {}, 3),  # nobody tells anything
        (3, {"another": [9.0]}, 3),
        (0, {USAGE: [1.0]}, 0),
        (3, {USAGE: [0.96]}, 4),  # two are new and have told nothing yet
    ],
)
def test_the_signal_farthest_above_its_target_decides(
    current: int, signals: dict[str, list[float]], wanted: int
) -> None:
    assert desired_replicas(current, signals) == wanted


def test_rays_context_is_read() -> None:
    metrics = {
        USAGE: {"replica-1": 0.8, "replica-2": 0.8},
        WAITING: {"replica-1": 2 * TARGETS[WAITING] * 2, "replica-2": 0},
    }

    assert kv_pressure(SimpleNamespace(aggregated_metrics=metrics, current_num_replicas=2)) == (4, {})
    assert kv_pressure(SimpleNamespace(aggregated_metrics=None, current_num_replicas=2)) == (2, {})
