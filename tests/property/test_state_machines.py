"""Pool, tables and scheduler against naive models, at random; the machines lie beside `builders.py`."""

import pytest
from block_pool_machine import BlockPoolMachine
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test
from scheduler_machine import SchedulerMachine

MACHINES = [BlockPoolMachine, SchedulerMachine]
SHORT = settings(max_examples=250, stateful_step_count=40, deadline=None)
LONG = settings(
    max_examples=3000, stateful_step_count=100, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("machine", MACHINES)
def test_it_never_gets_into_a_wrong_state(machine: type[RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(machine, settings=SHORT)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("machine", MACHINES)
def test_it_never_gets_into_a_wrong_state_for_minutes(machine: type[RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(machine, settings=LONG)
