"""Runs with a sender that takes a known time."""

import asyncio
import statistics
from collections.abc import Callable, Sequence

import pytest

from kvwatch.bench.outcome import RequestOutcome
from kvwatch.bench.runner import Run
from kvwatch.bench.scenarios import RequestSpec


class Sleeper:
    """Takes a fixed time for each request; notes how many were under way."""

    def __init__(self, seconds: float, failing: int | None = None) -> None:
        self._seconds = seconds
        self._failing = failing
        self.num_running = 0
        self.peak = 0

    async def send(self, spec: RequestSpec, intended_seconds: float, now: Callable[[], float]) -> RequestOutcome:
        outcome = RequestOutcome(
            index=spec.index, scenario="x", fingerprint="", temperature=0, intended_seconds=intended_seconds,
            sent_seconds=now(), status="ok",
        )  # fmt: skip
        self.num_running += 1
        self.peak = max(self.peak, self.num_running)
        if spec.index == self._failing:
            raise ZeroDivisionError
        try:
            await asyncio.sleep(self._seconds)
        except asyncio.CancelledError:
            outcome.status = "interrupted"
        self.num_running -= 1
        outcome.end_seconds = now()
        return outcome


def specs(count: int, due: Sequence[float] | None = None) -> list[RequestSpec]:
    return [
        RequestSpec(scenario="x", prompt="", max_tokens=1, index=index, due_seconds=due[index] if due else None)
        for index in range(count)
    ]


def test_a_closed_loop_keeps_every_client_busy_and_sends_in_order() -> None:
    sleeper = Sleeper(0.2)
    run = Run(sleeper, specs(20), 4)
    asyncio.run(run.run())
    assert sleeper.peak == 4
    assert sorted(outcome.index for outcome in run.outcomes) == list(range(20))
    begun = sorted(run.outcomes, key=lambda outcome: outcome.sent_seconds)
    assert [outcome.index for outcome in begun] == list(range(20))
    assert statistics.median(outcome.sent_seconds - outcome.intended_seconds for outcome in run.outcomes) < 0.1


def test_an_open_loop_sends_when_it_is_due_whatever_is_still_running() -> None:
    sleeper = Sleeper(0.3)
    run = Run(sleeper, specs(5, [0.0, 0.02, 0.04, 0.06, 0.08]), None)
    asyncio.run(run.run())
    assert sleeper.peak == 5
    for outcome, due in zip(
        sorted(run.outcomes, key=lambda each: each.index), (0, 0.02, 0.04, 0.06, 0.08), strict=True
    ):
        assert outcome.intended_seconds == due
        assert outcome.sent_seconds >= due


def test_an_interrupt_ends_an_open_loop_that_is_still_waiting_for_its_time() -> None:
    run = Run(Sleeper(100), specs(3, [0.0, 0.0, 1000.0]), 1)

    async def interrupted() -> None:
        asyncio.get_running_loop().call_later(0.1, run.interrupt)
        async with asyncio.timeout(20):
            await run.run()

    asyncio.run(interrupted())
    assert [(outcome.index, outcome.status) for outcome in run.outcomes] == [(0, "interrupted")]


@pytest.mark.parametrize("due", [None, [0.0, 0.0, 0.0, 0.05]])
def test_a_defect_of_ours_is_raised_and_never_hidden(due: list[float] | None) -> None:
    run = Run(Sleeper(0.02, failing=3), specs(4, due), 2)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(run.run())


def test_a_defect_of_what_runs_beside_is_raised_too() -> None:
    async def broken(_now: Callable[[], float]) -> None:
        raise ZeroDivisionError

    run = Run(Sleeper(0.02), specs(2), 2)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(run.run([broken]))
    assert len(run.outcomes) == 2


def test_nothing_to_send_is_over_at_once() -> None:
    run = Run(Sleeper(1), [], 4)
    asyncio.run(run.run())
    assert run.outcomes == []
