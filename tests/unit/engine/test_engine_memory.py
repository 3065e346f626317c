"""Memory that cannot be had: for a step's workspace, and from a pool that refuses what it counts as free."""

from builders import LedgerFollower, NullModel, Recorder, make_core, make_request, make_settings, run_until_idle

from kvwatch.telemetry.events import AllocationFailed, OutOfMemory, RequestFinished, RequestPreempted, StepFailed
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.request import FinishReason
from kvwatch_engine.contracts.step import StepInput, StepResult
from kvwatch_engine.scheduling.policy import STEPS_UNTIL_RECOVERY, StepSize


class TightModel(NullModel):
    """A null model that has memory for so many tokens in a step."""

    def __init__(self, max_tokens: int) -> None:
        super().__init__()
        self.max_tokens = max_tokens
        self.sizes: list[int] = []

    def execute(self, step: StepInput) -> StepResult:
        if step.num_tokens > self.max_tokens:
            raise MemoryError("made to fail")
        self.sizes.append(step.num_tokens)
        return super().execute(step)


def expected(prompt: list[int], count: int) -> list[int]:
    return [NullModel().next_token(prompt, 0, position) for position in range(count)]


def test_a_step_that_is_too_large_is_done_in_smaller_ones_and_nobody_notices() -> None:
    log = EventLog()
    recorder = Recorder(log)
    model = TightModel(max_tokens=10)
    core = make_core(model, log, num_blocks=41, max_batch_tokens=32)
    ledger = LedgerFollower(log, core.snapshot)
    prompts = {f"r{i}": [4 + i] * 13 for i in range(4)}
    for name, prompt in prompts.items():
        core.add(make_request(name, prompt, max_tokens=9, ignore_eos=True), 0)

    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    while core.has_work:
        for output in core.step():
            tokens[output.request_id] += output.token_ids
        ledger.catch_up()

    assert tokens == {name: expected(prompt, 9) for name, prompt in prompts.items()}
    events = recorder.drain()
    sizes = [event.num_tokens for event in events if isinstance(event, OutOfMemory)]
    assert sizes[:2] == [32, 16], "halved until it fits"
    assert max(model.sizes) <= 10
    assert len(sizes) == len([event for event in events if isinstance(event, StepFailed)])
    assert {event.reason for event in events if isinstance(event, RequestFinished)} == {"length"}
    assert not [event for event in events if isinstance(event, RequestPreempted)]


def test_a_request_with_copies_in_the_failed_step_is_computed_again() -> None:
    """Its copies may not have been carried out, and their sources may be gone by the time of the next step."""
    log = EventLog()
    recorder = Recorder(log)
    model = NullModel()
    core = make_core(model, log)
    ledger = LedgerFollower(log, core.snapshot)
    prompt = [4, 5, 6, 7, 8, 9]
    core.add(make_request("two", prompt, n=2, max_tokens=6, ignore_eos=True), 0)
    core.add(make_request("one", [6] * 5, max_tokens=9, ignore_eos=True), 0)
    tokens: dict[tuple[str, int], list[int]] = {}

    def fail(step: StepInput) -> None:
        if len(step.copy_sources) and not recorder_has_failed(recorder):
            raise MemoryError("made to fail")

    model.on_step = fail
    while core.has_work:
        for output in core.step():
            tokens.setdefault((output.request_id, output.sequence), []).extend(output.token_ids)
        ledger.catch_up()

    preempted = [event for event in recorder.drain() if isinstance(event, RequestPreempted)]
    assert [(e.request, e.mode, e.reason, e.beneficiary) for e in preempted] == [("two", "recompute", "memory", "")]
    assert tokens["one", 0] == expected([6] * 5, 9)
    assert tokens["two", 0] == expected(prompt, 6)
    assert len(tokens["two", 1]) == 6


def recorder_has_failed(recorder: Recorder) -> bool:
    return any(isinstance(event, OutOfMemory) for event in recorder.drain())


def test_the_size_of_steps_recovers_slowly() -> None:
    settings, size = make_settings(max_batch_tokens=32), StepSize()
    assert size.halve(32)
    sizes = [size.max_tokens]
    for _ in range(STEPS_UNTIL_RECOVERY * 7):
        size.succeed(settings)
        sizes.append(size.max_tokens)
    assert sizes[::STEPS_UNTIL_RECOVERY] == [16, 18, 20, 22, 24, 27, 30, None]
    assert len(set(sizes)) == 8, "nothing in between"
    assert not size.halve(1), "there is nothing smaller than one token"


def test_a_pool_that_refuses_for_ever_costs_those_who_need_it_and_nobody_else() -> None:
    log = EventLog()
    recorder = Recorder(log)
    core = make_core(log=log, enable_prefix_cache=False)
    core.add(make_request("grows", [4] * 3, max_tokens=20, ignore_eos=True), 0)
    core.add(make_request("fits", [5] * 5, max_tokens=3, ignore_eos=True), 0)
    outputs = [*core.step()]
    core.manager.pool.allocate = lambda *_: None  # type: ignore[method-assign]
    core.add(make_request("comes", [6] * 3, max_tokens=2, ignore_eos=True), 0)

    for _ in range(12):
        outputs += core.step()

    ends = {output.request_id: output.finish_reason for output in outputs if output.finish_reason}
    assert ends == {"grows": FinishReason.ERROR, "fits": FinishReason.LENGTH, "comes": FinishReason.ERROR}
    failed = [event for event in recorder.drain() if isinstance(event, AllocationFailed)]
    assert [(e.request, e.reason) for e in failed].count(("grows", "growth")) == 3
    assert [(e.request, e.reason) for e in failed].count(("comes", "admission")) == 3
    assert all(event.needed <= event.available for event in failed)
    assert core.manager.pool.num_used == 0
    core.check_integrity()
    assert run_until_idle(core) == {}
