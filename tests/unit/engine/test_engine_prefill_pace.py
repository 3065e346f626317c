"""The time of a step is fitted to steps that were done."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvwatch_engine.scheduling.prefill_pace import (
    FIRST_PREFILL_TOKENS,
    LEAST_PREFILL_TOKENS,
    MOST_SLOWDOWN,
    PrefillPace,
)

BASE, EACH = 0.006, 0.0004
"""Seconds of a step, and of each of its tokens."""


def learnt(*steps: int, base: float = BASE, each: float = EACH) -> PrefillPace:
    pace = PrefillPace()
    for num_tokens in steps:
        pace.note_step(num_tokens, base + each * num_tokens, has_prefill=num_tokens > 16)
    return pace


def test_while_nothing_is_known_a_step_takes_a_little_of_the_prompts() -> None:
    assert PrefillPace().most_prefill_tokens(3, 0.05) == FIRST_PREFILL_TOKENS


@given(
    steps=st.lists(st.integers(1, 2000), min_size=2, max_size=80),
    num_decoding=st.integers(1, 64),
    target=st.floats(0.01, 0.5),
)
@settings(deadline=None)
def test_a_step_of_the_size_that_is_given_takes_the_time_that_is_wanted(
    steps: list[int], num_decoding: int, target: float
) -> None:
    pace = learnt(4, 400, *steps, 4, 400)

    most = pace.most_prefill_tokens(num_decoding, target)

    allowed = max(target, MOST_SLOWDOWN * (BASE + EACH * num_decoding))
    if most > LEAST_PREFILL_TOKENS:
        assert BASE + EACH * (num_decoding + most) <= allowed * 1.001
    assert BASE + EACH * (num_decoding + most + 1) > allowed * 0.999


@given(
    st.lists(st.tuples(st.integers(-2, 3000), st.floats(-1, 100, allow_nan=False), st.booleans()), max_size=60),
    st.integers(0, 64),
)
def test_whatever_was_measured_there_is_room_for_some(steps: list[tuple[int, float, bool]], num_decoding: int) -> None:
    pace = PrefillPace()
    for num_tokens, seconds, has_prefill in steps:
        pace.note_step(num_tokens, seconds, has_prefill=has_prefill)

    assert pace.most_prefill_tokens(num_decoding, 0.03) >= LEAST_PREFILL_TOKENS


def test_what_a_prompt_costs_is_known_after_a_long_time_without_one() -> None:
    pace = learnt(*[8, 300, 900] * 20, *[8] * 3000)

    most = pace.most_prefill_tokens(8, 0.1)

    assert abs(8 + most - (0.1 - BASE) / EACH) <= 2


def test_a_time_without_end_lets_everything_into_a_step() -> None:
    assert learnt(4, 400).most_prefill_tokens(3, 1.7e308) > 10**9


def test_steps_of_one_size_tell_no_base() -> None:
    pace = learnt(100, 100, 100)

    assert abs(pace.expected_seconds(100) - (BASE + EACH * 100)) < 1e-9
    assert pace.most_prefill_tokens(10, BASE + EACH * 100) in (89, 90)


def test_one_step_that_the_machine_delayed_does_not_count_for_all() -> None:
    pace = learnt(*[20, 200] * 30)
    before = pace.most_prefill_tokens(10, 0.05)
    pace.note_step(200, 30.0, has_prefill=True)

    assert pace.most_prefill_tokens(10, 0.05) > before / 3
