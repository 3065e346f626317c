import pytest

from kvwatch.bench.server_side import ServerSide, server_side
from kvwatch.bench.signals import Reading


def side(before: Reading, *during: Reading, after: Reading) -> ServerSide:
    found = server_side(before, during, after, 0)
    assert found is not None
    return found


def test_counters_count_from_the_beginning_of_the_run() -> None:
    before = Reading(num_preemptions=5, recomputed_tokens=100, queried_tokens=1000, hit_tokens=900)
    after = Reading(seconds=9, num_preemptions=8, recomputed_tokens=160, queried_tokens=1400, hit_tokens=1000)
    found = side(before, after=after)
    assert (found.preemptions, found.num_recomputed_tokens, found.hit_ratio) == (3, 60, 0.25)


def test_a_server_that_was_started_anew_is_not_known() -> None:
    found = side(Reading(num_preemptions=5), after=Reading(num_preemptions=2))
    assert found.preemptions is None


def test_a_counter_that_did_not_exist_before_began_at_zero() -> None:
    assert side(Reading(), after=Reading(num_preemptions=2)).preemptions == 2
    assert side(Reading(num_preemptions=2), after=Reading()).preemptions is None


def test_waste_is_that_of_all_slots_held_at_all_readings() -> None:
    looks = [
        Reading(held_slots=0, filled_slots=0),
        Reading(held_slots=100, filled_slots=50),
        Reading(held_slots=300, filled_slots=290),
    ]
    found = side(Reading(), *looks, after=Reading())
    assert found.waste_ratio == pytest.approx(1 - 340 / 400)
    assert found.waste_ratio_max == 0.5
    assert side(Reading(), looks[0], after=Reading()).waste_ratio is None


def window(seconds: float, free: float, lowest: float | None) -> Reading:
    return Reading(seconds=seconds, free_blocks=free, window_free_blocks=lowest, window_seconds=60)


def test_a_window_lower_than_before_the_run_is_the_runs_own_minimum() -> None:
    found = side(window(0, 40, 40), window(5, 30, 12), after=window(10, 40, 12))
    assert (found.min_free_blocks, found.is_min_free_exact) == (12, True)


def test_a_window_that_may_tell_of_what_was_before_is_not_believed() -> None:
    found = side(window(0, 40, 3), window(5, 30, 3), after=window(10, 40, 3))
    assert (found.min_free_blocks, found.is_min_free_exact) == (30, False)


def test_windows_that_follow_each_other_cover_a_long_run() -> None:
    looks = [window(each, 30, 3 if each < 60 else 9) for each in (20, 40, 60, 100, 150)]
    found = side(window(0, 40, 3), *looks, after=window(200, 40, 11))
    assert (found.min_free_blocks, found.is_min_free_exact) == (9, True)
    gap = [look for look in looks if look.seconds < 100]
    found = side(window(0, 40, 3), *gap, after=window(200, 40, 11))
    assert (found.min_free_blocks, found.is_min_free_exact) == (9, False)


def test_without_a_window_the_least_reading_counts() -> None:
    found = side(Reading(free_blocks=9), Reading(free_blocks=4), Reading(free_blocks=6), after=Reading(used_blocks=0))
    assert (found.min_free_blocks, found.is_min_free_exact, found.used_blocks_after) == (4, False, 0)


def test_without_metrics_there_is_nothing_to_say() -> None:
    assert server_side(None, [], None, 0) is None
