"""What a change will take is assumed at first, and then known from those that were made."""

import pytest

from kvwatch_engine.live.pauses import MANY_BYTES, PauseEstimate


def test_nothing_to_copy_takes_what_every_change_takes() -> None:
    estimate = PauseEstimate(0.2, 1e9)

    assert estimate.seconds(0) == 0.2
    assert estimate.seconds(500_000_000) == pytest.approx(0.7)


@pytest.mark.parametrize("num_bytes", [0, MANY_BYTES - 1, MANY_BYTES, 10 * MANY_BYTES])
@pytest.mark.parametrize(("base", "speed"), [(0.05, 2e9), (1.5, 3e8), (0.0, 1e10)])
def test_after_some_changes_the_next_like_them_takes_what_is_said(num_bytes: int, base: float, speed: float) -> None:
    estimate = PauseEstimate(0.2, 1e9)
    for size in (0, 20 * MANY_BYTES, 0, 20 * MANY_BYTES, num_bytes, num_bytes):
        estimate.learn(size, base + size / speed)

    assert estimate.seconds(num_bytes) == pytest.approx(base + num_bytes / speed, rel=0.05, abs=1e-3)


def test_a_base_that_was_once_long_does_not_make_copying_infinitely_fast() -> None:
    estimate = PauseEstimate(0.0, 1e9)
    estimate.learn(0, 60.0)
    estimate.learn(MANY_BYTES, 1.0)

    assert estimate.seconds(MANY_BYTES) == pytest.approx(1.0)
    assert estimate.seconds(0) == 0.5
