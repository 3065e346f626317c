"""No two requests that differ in any key ever share a block; two that agree in all of them do, while it is cached."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from isolation_machine import IsolationMachine

SHORT = settings(max_examples=250, stateful_step_count=30, deadline=None)
LONG = settings(
    max_examples=4000, stateful_step_count=80, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


def test_blocks_are_shared_exactly_between_those_who_agree_in_every_key() -> None:
    run_state_machine_as_test(IsolationMachine, settings=SHORT)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_blocks_are_shared_exactly_between_those_who_agree_in_every_key_for_minutes() -> None:
    run_state_machine_as_test(IsolationMachine, settings=LONG)
