"""The n-th operation fails, for every n there is, once and from then on: nothing is lost but what it was for."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from fault_injection import POINTS, TIER_POINTS, FaultPlan, FaultRun, Injection, Outcome, expected_tokens

from kvwatch.telemetry.events import (
    BlocksCopied,
    BlocksEvicted,
    BlocksRelocated,
    BlocksReused,
    Offloaded,
    PoolRebuilt,
    RequestPreempted,
    Restored,
    SwappedIn,
    SwappedOut,
)
from kvwatch_engine.contracts.request import FinishReason

NEVER = 1_000_000
HOW_LONG = pytest.mark.parametrize("is_lasting", [False, True], ids=["once", "from then on"])


@pytest.fixture(autouse=True)
def quiet_logs() -> Iterator[None]:
    """Failed steps are logged with their traces, hundreds of them."""
    with structlog.testing.capture_logs():
        yield


def run_with(inject: Injection, plan: FaultPlan, folder: Path | None) -> Outcome:
    """Run the load; with a folder, in which a new one is made for each run, there are tiers."""
    return FaultRun(inject, plan, None if folder is None else Path(tempfile.mkdtemp(dir=folder))).run()


def check_operations(inject: Injection, folder: Path | None, *, is_lasting: bool, stride: int = 1) -> int:
    """Let the first operation fail, then the second (or the one `stride` behind); return how many were looked at."""
    truth = expected_tokens()
    num_checked = 0
    while True:
        number = 1 + num_checked * stride
        plan = FaultPlan(number, is_lasting)
        outcome = run_with(inject, plan, folder)

        assert outcome.reasons.keys() == truth.keys(), "every sequence ends"
        for key, reason in outcome.reasons.items():
            tokens = outcome.tokens.get(key, [])
            complete = reason is FinishReason.LENGTH
            assert tokens == (truth[key] if complete else truth[key][: len(tokens)]), (number, key)
        if not is_lasting:
            assert outcome.failed_requests() <= outcome.in_failed_steps(), number
        if plan.num_failed == 0:
            assert outcome.failed_requests() == set()
            return num_checked
        num_checked += 1


def test_the_load_without_a_fault_uses_everything_that_could_fail() -> None:
    """Else the tests below would show little."""
    outcome = run_with(POINTS["step"], FaultPlan(NEVER, is_lasting=False), None)

    kinds = {type(event) for event in outcome.events}
    assert {BlocksCopied, BlocksReused, BlocksEvicted, BlocksRelocated, PoolRebuilt, RequestPreempted} <= kinds
    assert set(outcome.reasons.values()) == {FinishReason.LENGTH}
    assert outcome.tokens == expected_tokens()


def test_the_load_with_tiers_uses_both_of_them_in_both_directions(tmp_path: Path) -> None:
    outcome = run_with(TIER_POINTS["step"], FaultPlan(NEVER, is_lasting=False), tmp_path)

    kinds = {type(event) for event in outcome.events}
    assert {SwappedOut, SwappedIn, Offloaded, Restored, BlocksRelocated} <= kinds
    assert {event.to_tier for event in outcome.events if isinstance(event, Offloaded)} == {"host", "disk"}
    assert {event.from_tier for event in outcome.events if isinstance(event, Restored)} == {"host", "disk"}
    assert outcome.tokens == expected_tokens()


@HOW_LONG
@pytest.mark.parametrize("point", POINTS)
def test_whichever_operation_fails_the_others_are_as_if_nothing_had_happened(point: str, *, is_lasting: bool) -> None:
    num_checked = check_operations(POINTS[point], None, is_lasting=is_lasting)

    print(f"{num_checked} operations failed, one in each run")
    assert num_checked >= 2, "there was hardly anything that could fail"


@HOW_LONG
@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize("point", TIER_POINTS)
def test_whichever_operation_fails_between_tiers_no_text_changes(
    tmp_path: Path, point: str, stride: int, *, is_lasting: bool
) -> None:
    num_checked = check_operations(TIER_POINTS[point], tmp_path, is_lasting=is_lasting, stride=stride)

    print(f"{num_checked} operations failed, one in each run")
    assert num_checked >= 1, "there was nothing that could fail"
