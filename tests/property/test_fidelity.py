"""Fidelity: everything that tells of the engine says exactly what its own structures hold, with every feature on.

After every step each gauge, counter and histogram equals the oracle's value, and so do the state rebuilt from the log
and what KV events say is cached. States rebuilt from the recorder's files, from the flight recorder's ring, and from a
gRPC stream that was joined in the middle and not read for a while, equal the engine's at the same step.

    KVWATCH_FIDELITY_STEPS=2000 pytest tests/property/test_fidelity.py -m slow
"""

import logging
import os
from collections.abc import Iterator

import pytest
import structlog
from fidelity_stage import fidelity_stage

STEPS = int(os.environ.get("KVWATCH_FIDELITY_STEPS", "10000"))
"""Steps of the long test, over all kinds of engine together."""

STEPS_OF_A_RUN = 250
KINDS: dict[str, tuple[tuple[int | None, ...], str]] = {
    "one group": ((None,), ""),
    "full and sliding": ((None, 6), ""),
    "sliding alone": ((7,), ""),
    "three groups": ((None, 1, 9), ""),
    "two equal groups": ((None, None), ""),
    "host": ((None,), "host"),
    "disk": ((None,), "disk"),
    "host and disk": ((None,), "host disk"),
}
"""Windows of the KV groups, and what is behind the device."""


@pytest.fixture(autouse=True)
def quiet_logs() -> Iterator[None]:
    """Failed steps are logged with their traces, hundreds of them."""
    before = structlog.get_config()["wrapper_class"]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.configure(wrapper_class=before)


def run(kind: str, seed: int, num_steps: int) -> int:
    """Run an engine of this kind; return how many steps it took."""
    windows, behind = KINDS[kind]
    with fidelity_stage(seed, windows, behind) as stage:
        try:
            stage.run(num_steps)
        except Exception as error:
            error.add_note(f"seed {seed}, step {stage.load.core.num_steps}")
            raise
        return stage.load.core.num_steps


@pytest.mark.parametrize("kind", KINDS)
def test_metrics_log_files_stream_and_kv_events_say_what_the_engine_holds(kind: str) -> None:
    """vllm#15538, #25780, Dynamo#7753 (O01, O34, O62): numbers that only almost followed the engine."""
    assert run(kind, 1, 120) >= 120


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", KINDS)
def test_metrics_log_files_stream_and_kv_events_say_what_the_engine_holds_over_ten_thousand_steps(kind: str) -> None:
    num_steps, seed = 0, 100
    while num_steps < STEPS / len(KINDS):
        num_steps += run(kind, seed, STEPS_OF_A_RUN)
        seed += 1
