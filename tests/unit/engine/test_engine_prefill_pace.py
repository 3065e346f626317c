"""Steps stay as short as those who decode were promised."""

from dataclasses import replace

from builders import NullModel, make_core, make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwatch_engine.contracts.step import StepInput, StepResult
from kvwatch_engine.scheduling.prefill_pace import LEAST_PREFILL_TOKENS, MOST_SLOWDOWN, PrefillPace

BASE, EACH = 0.006, 0.0004
"""Seconds of a step, and of each of its tokens."""


class TimedModel(NullModel):
    """A model whose steps take what they should take, by its own account."""

    def __init__(self, base: float = BASE, each: float = EACH) -> None:
        super().__init__()
        self.base, self.each = base, each
        self.steps: list[tuple[int, int]] = []
        """Sequences and tokens of each step."""

    def execute(self, step: StepInput) -> StepResult:
        result = super().execute(step)
        self.steps.append((len(step.context_lens), step.num_tokens))
        return replace(result, forward_ns=int(self.seconds(step.num_tokens) * 1e9))

    def seconds(self, num_tokens: int) -> float:
        return self.base + self.each * num_tokens


def learnt(*steps: int, base: float = BASE, each: float = EACH) -> PrefillPace:
    pace = PrefillPace()
    for num_tokens in steps:
        pace.note_step(num_tokens, base + each * num_tokens)
    return pace


def test_nothing_is_known_before_the_first_step() -> None:
    assert PrefillPace().most_tokens(3, 0.05) is None


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

    most = pace.most_tokens(num_decoding, target)

    assert most is not None
    assert most >= num_decoding + LEAST_PREFILL_TOKENS
    allowed = max(target, MOST_SLOWDOWN * (BASE + EACH * num_decoding))
    if most > num_decoding + LEAST_PREFILL_TOKENS:
        assert BASE + EACH * most <= allowed * 1.001
    assert BASE + EACH * (most + 1) > allowed * 0.999


@given(st.lists(st.tuples(st.integers(-2, 3000), st.floats(-1, 100, allow_nan=False)), max_size=60))
def test_whatever_was_measured_there_is_room_for_some(steps: list[tuple[int, float]]) -> None:
    pace = PrefillPace()
    for num_tokens, seconds in steps:
        pace.note_step(num_tokens, seconds)

    most = pace.most_tokens(5, 0.03)

    assert most is None or most >= 5 + LEAST_PREFILL_TOKENS


def test_a_time_without_end_lets_everything_into_a_step() -> None:
    most = learnt(4, 400).most_tokens(3, 1.7e308)

    assert most is not None
    assert most > 10**9


def test_steps_of_one_size_tell_no_base() -> None:
    pace = learnt(100, 100, 100)

    assert abs(pace.expected_seconds(100) - (BASE + EACH * 100)) < 1e-9
    assert pace.most_tokens(10, BASE + EACH * 100) in (99, 100)


def test_one_step_that_the_machine_delayed_does_not_count_for_all() -> None:
    pace = learnt(*[20, 200] * 30)
    before = pace.most_tokens(10, 0.05)
    pace.note_step(200, 30.0)

    after = pace.most_tokens(10, 0.05)

    assert before is not None
    assert after is not None
    assert after > before / 3


def mixed_steps(model: TimedModel) -> list[tuple[int, int]]:
    """Steps with more tokens than sequences, which are not alone: somebody's prompt beside somebody's decoding."""
    return [(num_seqs, num_tokens) for num_seqs, num_tokens in model.steps if num_tokens > num_seqs > 1]


def run(target: float, model: TimedModel) -> None:
    core = make_core(
        model, num_blocks=2000, max_num_seqs=8, max_batch_tokens=512, target_itl_seconds=target, max_model_len=4096
    )
    for index in range(4):
        core.add(make_request(f"d{index}", [index + 1] * 9, max_tokens=60, ignore_eos=True), 0)
    for _ in range(6):
        core.step()
    for index in range(3):
        core.add(make_request(f"p{index}", [index + 9] * 700, max_tokens=3, ignore_eos=True), 0)
    while core.has_work:
        core.step()


def test_prompts_are_cut_so_that_those_who_decode_get_their_tokens_in_time() -> None:
    bound, free = TimedModel(), TimedModel()
    run(0.05, bound)
    run(0.0, free)

    # The first prompts teach how long a token takes; from then on it is known.
    assert max(free.seconds(num_tokens) for _, num_tokens in mixed_steps(free)) > 0.2
    times = [bound.seconds(num_tokens) for _, num_tokens in mixed_steps(bound)]
    assert sorted(times)[-3] <= 0.051
    assert sum(num_tokens for _, num_tokens in bound.steps) == sum(num_tokens for _, num_tokens in free.steps)


def test_prompts_that_nobody_waits_beside_are_computed_in_full_steps() -> None:
    model = TimedModel()
    core = make_core(
        model, num_blocks=2000, max_num_seqs=8, max_batch_tokens=512, target_itl_seconds=0.05, max_model_len=4096
    )
    core.add(make_request("p", [3] * 1500, max_tokens=1, ignore_eos=True), 0)
    while core.has_work:
        core.step()

    assert [num_tokens for _, num_tokens in model.steps] == [512, 512, 476]
