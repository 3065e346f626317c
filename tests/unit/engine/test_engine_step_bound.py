"""Steps stay as short as those who decode were promised, but for gaps that the error budget has."""

from dataclasses import dataclass, replace

from builders import NullModel, make_core, make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwatch_engine.contracts.step import StepInput, StepResult
from kvwatch_engine.core import EngineCore
from kvwatch_engine.scheduling.prefill_pace import FIRST_PREFILL_TOKENS, LEAST_PREFILL_TOKENS
from kvwatch_engine.scheduling.step_bound import LONG_GAP_SHARE, MOST_LONG_GAPS, QUEUE_STEPS

BASE, EACH = 0.006, 0.0004
"""Seconds of a step, and of each of its tokens."""
TARGET, LONGEST = 0.05, 0.3
IN_TARGET = 110
"""Tokens of a step that takes as long as the target."""
AT_MOST = 735
"""The same for the bound of all steps."""
JUST = 1.001
"""Arithmetic in seconds is not exact: a step may have one token less than fits."""


class TimedModel(NullModel):
    """A model whose steps take what they should take, by its own account."""

    def __init__(self, base: float = BASE, each: float = EACH) -> None:
        super().__init__()
        self.base, self.each = base, each
        self.num_tokens: list[int] = []
        """Of each step."""

    def execute(self, step: StepInput) -> StepResult:
        result = super().execute(step)
        self.num_tokens.append(step.num_tokens)
        return replace(result, forward_ns=round(self.seconds(step.num_tokens) * 1e9))

    def seconds(self, num_tokens: int) -> float:
        return self.base + self.each * num_tokens


@dataclass
class Step:
    """What a step was to those who use the engine."""

    seconds: float
    num_gaps: int
    """Sequences that had a token before and got another one."""
    num_tokens: int


class Stage:
    """An engine on a timed model that has learnt its pace; nobody decodes."""

    def __init__(self, *, target: float = TARGET, longest: float = LONGEST, base: float = BASE) -> None:
        self.model = TimedModel(base)
        self.core: EngineCore = make_core(
            self.model, num_blocks=6000, max_num_seqs=32, max_batch_tokens=2048, max_model_len=4096,
            target_itl_seconds=target, max_step_seconds=longest,
        )  # fmt: skip
        self._has_token: set[str] = set()
        self._count = 0
        self.add(1, 900, max_tokens=8)
        self.run()
        self.model.num_tokens.clear()

    def add(self, count: int, num_tokens: int, max_tokens: int = 60) -> None:
        """Queue requests none of which shares a block with another."""
        for _ in range(count):
            self._count += 1
            prompt = [1 + self._count % 40, 1 + self._count // 40] * (num_tokens // 2)
            self.core.add(make_request(f"r{self._count}", prompt, max_tokens=max_tokens, ignore_eos=True), 0)

    def decoding(self, count: int) -> None:
        """Have so many requests decode that do not end soon."""
        self.add(count, 2, max_tokens=2000)
        for _ in range(3):
            self.step()

    def step(self) -> Step:
        got = {output.request_id for output in self.core.step() if output.token_ids}
        num_gaps = len(got & self._has_token)
        self._has_token |= got
        num_tokens = self.model.num_tokens[-1]
        return Step(self.model.seconds(num_tokens), num_gaps, num_tokens)

    def run(self) -> list[Step]:
        steps = []
        while self.core.has_work:
            steps.append(self.step())
        return steps


def test_a_few_prompts_are_cut_so_that_those_who_decode_get_their_tokens_in_time() -> None:
    stage = Stage()
    stage.decoding(6)
    stage.add(1, 300)

    first, second, third, fourth = (stage.step().num_tokens for _ in range(4))

    assert {first, second} <= {IN_TARGET - 1, IN_TARGET}
    assert third == 3 * 6 + 300 - first - second
    assert fourth == 7


def test_a_queue_is_computed_at_once_while_the_error_budget_lasts() -> None:
    stage = Stage(longest=1.0)
    stage.decoding(6)
    stage.add(8, 100)

    assert stage.step().num_tokens == 806
    stage.add(5, 100)
    assert stage.step().num_tokens == 514  # 14 gaps were left, for the 14 that decode
    stage.add(5, 100)
    assert all(step.seconds <= TARGET * JUST for step in (stage.step() for _ in range(20)))


def test_what_is_done_in_three_short_steps_is_no_queue() -> None:
    least, stage = QUEUE_STEPS * (IN_TARGET - 6), Stage()
    stage.decoding(6)
    stage.add(1, least - 6)
    assert stage.step().num_tokens <= IN_TARGET

    stage = Stage()
    stage.decoding(6)
    stage.add(1, least + 2)
    assert stage.step().num_tokens == least + 2 + 6


def test_no_step_is_longer_than_any_may_be() -> None:
    stage = Stage()
    stage.decoding(3)
    stage.add(9, 600)

    steps = [stage.step() for _ in range(3)]

    assert {step.num_tokens for step in steps} <= {AT_MOST - 1, AT_MOST}


def test_prompts_beside_which_nobody_decodes_are_bound_only_by_what_any_step_may_take() -> None:
    bound, free = Stage(), Stage(longest=0.0)
    for stage in (bound, free):
        stage.add(1, 3000, max_tokens=1)

    *full, last = bound.run()
    assert {step.num_tokens for step in full} <= {AT_MOST - 1, AT_MOST}
    assert len(full) == 4
    assert last.num_tokens == 3000 - sum(step.num_tokens for step in full)
    assert [step.num_tokens for step in free.run()] == [2048, 952]


def test_without_a_bound_of_all_steps_queues_have_the_whole_step() -> None:
    stage = Stage(longest=0.0)
    stage.decoding(3)
    stage.add(9, 600)

    assert stage.step().num_tokens == 2048


def test_without_a_target_only_the_bound_of_all_steps_holds() -> None:
    stage = Stage(target=0.0)
    stage.decoding(30)
    stage.add(2, 600)

    assert stage.step().num_tokens in (AT_MOST - 1, AT_MOST)


def test_a_bound_of_all_steps_below_the_target_stands_above_it() -> None:
    stage = Stage(target=TARGET, longest=TARGET / 2)
    stage.decoding(4)
    stage.add(9, 600)

    steps = [stage.step() for _ in range(9)]

    assert max(step.seconds for step in steps) <= TARGET / 2 * JUST
    assert min(step.num_tokens for step in steps) > 40


def test_who_cannot_start_is_no_queue() -> None:
    """Long steps are of no use to those whom the number of sequences keeps out, and must not last while they wait."""
    stage = Stage()
    stage.decoding(10)
    stage.add(22, 2, max_tokens=1000)
    stage.step()
    stage.add(40, 600)

    assert [step.num_tokens for step in (stage.step(), stage.step())] == [32, 32]
    assert stage.core.scheduler.admission.num_startable_tokens == 0


def test_the_first_step_of_all_takes_a_little() -> None:
    model = TimedModel()
    core = make_core(model, num_blocks=900, max_batch_tokens=2048, max_model_len=4096, max_step_seconds=1.0)
    core.add(make_request("p", [3] * 900, max_tokens=1, ignore_eos=True), 0)
    while core.has_work:
        core.step()

    assert model.num_tokens == [FIRST_PREFILL_TOKENS, 900 - FIRST_PREFILL_TOKENS]


def test_nobody_waits_for_ever_whatever_the_bounds() -> None:
    stage = Stage(target=0.001, longest=0.001)
    stage.decoding(3)
    stage.add(2, 600, max_tokens=1)

    steps = [stage.step() for _ in range(40)]

    assert sum(step.num_tokens - step.num_gaps for step in steps) >= 40 * LEAST_PREFILL_TOKENS


arrivals = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 12), st.integers(1, 450), st.integers(1, 60)), min_size=1, max_size=12
)
"""(steps until they come, requests, half of the tokens of each prompt, tokens of each answer)"""


@given(arrivals)
@settings(deadline=None, max_examples=30)
def test_no_gap_is_longer_than_promised_but_those_that_the_error_budget_has(arrivals: list[tuple[int, ...]]) -> None:
    """The budget kept by hand, from what users see: gaps between their tokens."""
    stage, left, steps = Stage(), MOST_LONG_GAPS, list[Step]()
    for pause, count, half, max_tokens in [*arrivals, (0, 0, 0, 0)]:
        for _ in range(pause):
            if stage.core.has_work:
                steps.append(stage.step())
        stage.add(count, 2 * half, max_tokens)
    steps += stage.run()

    for step in steps:
        assert step.seconds <= LONGEST * JUST
        is_long = step.seconds > TARGET * JUST
        assert not is_long or step.num_gaps <= left
        left = min(MOST_LONG_GAPS, left + LONG_GAP_SHARE * step.num_gaps) - step.num_gaps * is_long
    num_gaps = sum(step.num_gaps for step in steps)
    num_long = sum(step.num_gaps for step in steps if step.seconds > TARGET * JUST)
    assert num_long <= MOST_LONG_GAPS + LONG_GAP_SHARE * num_gaps
