"""What is worth writing the flight recorder out for. Does not know the flight recorder."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from kvwatch.telemetry import events as ev
from kvwatch.telemetry.schema import Event

BURST_SECONDS = 10.0
PREEMPTION_BURST = 8
"""Preemptions within `BURST_SECONDS` that make a burst."""
ALLOCATION_FAILURE_BURST = 8
"""Running requests that found no block, within `BURST_SECONDS`. A request that waits to be admitted is no failure."""
SLOW_STEP_SECONDS = 5.0
"""A step that takes longer is slow, unless the setting says otherwise."""

NS_PER_SECOND = 1_000_000_000


class Triggers:
    """Looks at events. One thread at a time.

    Args:
        slow_step_seconds: A longer step is slow.
        burst: Number of preemptions, and of allocation failures, within `BURST_SECONDS` that make a burst.
    """

    def __init__(self, slow_step_seconds: float = SLOW_STEP_SECONDS, burst: int | None = None) -> None:
        self._slow_ns = round(slow_step_seconds * NS_PER_SECOND)
        self._preemptions: deque[int] = deque(maxlen=burst or PREEMPTION_BURST)
        self._failures: deque[int] = deque(maxlen=burst or ALLOCATION_FAILURE_BURST)
        self._checks: dict[type[Event], Callable[[Any], str | None]] = {
            ev.RequestPreempted: lambda event: _burst(self._preemptions, event, "preemption-burst"),
            ev.AllocationFailed: self._allocation_failed,
            ev.StepCompleted: self._step_completed,
            ev.EngineStalled: lambda _: "stalled-step",
            ev.StepFailed: lambda _: "failed-step",
            ev.EngineEnded: lambda event: "failed-engine" if event.reason == "failed" else None,
        }

    def look(self, events: Sequence[Event]) -> str | None:
        """Return why these events are worth keeping, the first reason; None when they are ordinary."""
        checks, reason = self._checks, None
        for event in events:
            check = checks.get(type(event))
            if check is not None:
                found = check(event)
                reason = reason or found
        return reason

    def _allocation_failed(self, event: ev.AllocationFailed) -> str | None:
        return _burst(self._failures, event, "allocation-failure-burst") if event.reason == "growth" else None

    def _step_completed(self, event: ev.StepCompleted) -> str | None:
        taken_ns = event.schedule_ns + (event.build_ns or 0) + event.forward_ns + event.sample_ns + event.apply_ns
        return "slow-step" if taken_ns > self._slow_ns else None


def _burst(times: "deque[int]", event: Event, reason: str) -> str | None:
    times.append(event.time_ns)
    if len(times) == times.maxlen and times[-1] - times[0] <= BURST_SECONDS * NS_PER_SECOND:
        times.clear()
        return reason
    return None
