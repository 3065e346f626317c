"""How long requests wait for their turn, and whether that is fair, by an engine's events.

A wait is the time before the first admission and the times away after preemptions, not that in which the request is
computed. It is told in seconds and in steps that the engine did meanwhile. Seconds are what callers see; steps do not
depend on what else the machine does, and it may do a lot in the minutes that a load takes.
"""

from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from kvwatch.telemetry.events import RequestFinished, RequestQueued, RequestResumed, StepCompleted
from kvwatch.telemetry.schema import Event

FAIR_MEDIANS = 5
FAIR_SECONDS = 2.0
"""Nobody waits longer than so many medians of his class, or so long."""


@dataclass(slots=True)
class Wait:
    """Of one request."""

    seconds: float = 0.0
    steps: int = 0


def waits_of(events: Sequence[Event]) -> tuple[dict[str, Wait], float]:
    """Return the wait of each request that finished, and how many steps a second the engine did."""
    ends = [event.time_ns for event in events if isinstance(event, StepCompleted)]
    queued = {event.request: event.queued_ns for event in events if isinstance(event, RequestQueued)}
    waits: dict[str, Wait] = {}

    def add(request: str, since_ns: int, duration_ns: int) -> None:
        wait = waits.setdefault(request, Wait())
        wait.seconds += duration_ns / 1e9
        wait.steps += bisect(ends, since_ns + duration_ns) - bisect(ends, since_ns)

    for event in events:
        if isinstance(event, RequestFinished) and event.queue_ns is not None:
            add(event.request, queued[event.request], event.queue_ns)
        if isinstance(event, RequestResumed):
            add(event.request, event.time_ns - event.away_ns, event.away_ns)
    return waits, len(ends) / ((ends[-1] - ends[0]) / 1e9)


def check_fairness(classes: Iterable[tuple[str, str]], events: Sequence[Event], *, judges_seconds: bool = True) -> None:
    """Fail if somebody waited too long.

    Args:
        classes: (class, request) of those that must have run.
        events: all events of the run.
        judges_seconds: whether the seconds count, or only the steps: else the machine was busy with other things.
    """
    waits, steps_per_second = waits_of(events)
    by_class: dict[str, list[Wait]] = {}
    for kind, request in classes:
        by_class.setdefault(kind, []).append(waits[request])
    ratios: dict[str, Mapping[str, float]] = {}
    for kind, found in by_class.items():
        seconds, steps = [each.seconds for each in found], [each.steps for each in found]
        ratios[kind] = {
            "steps": max(steps) / max(FAIR_MEDIANS * median(steps), FAIR_SECONDS * steps_per_second),
            "seconds": max(seconds) / max(FAIR_MEDIANS * median(seconds), FAIR_SECONDS),
        }
        print(
            f"{kind}: {len(found)} waited {median(seconds):.2f} s ({median(steps):.0f} steps) in the middle, "
            f"{max(seconds):.2f} s ({max(steps)} steps) at most"
        )
    in_seconds, in_steps = (max(each[unit] for each in ratios.values()) for unit in ("seconds", "steps"))
    print(
        f"the longest wait is {in_seconds:.2f} of a fair one, {in_steps:.2f} in steps; {steps_per_second:.0f} steps/s"
    )
    assert in_steps <= 1.0, ratios
    assert in_seconds <= 1.0 or not judges_seconds, ratios
