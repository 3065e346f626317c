"""The tiers at random: no wrong block is ever seen, nothing leaks, and the ledger says what is true of every tier."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from tier_machine import TierMachine

SHORT = settings(max_examples=120, stateful_step_count=50, deadline=None)
LONG = settings(
    max_examples=3000, stateful_step_count=120, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


def test_it_never_gets_into_a_wrong_state() -> None:
    run_state_machine_as_test(TierMachine, settings=SHORT)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_it_never_gets_into_a_wrong_state_for_minutes() -> None:
    run_state_machine_as_test(TierMachine, settings=LONG)
