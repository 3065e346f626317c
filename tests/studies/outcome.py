"""Drives an engine through a load in a closed loop, and writes down what that was like. Knows no model and no clock."""

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from load import Load

from kvwatch.telemetry.events import RequestFinished, RequestPreempted, StepCompleted, StepScheduled
from kvwatch.telemetry.log import Cursor
from kvwatch_engine.contracts.request import SequenceOutput
from kvwatch_engine.core import EngineCore

_TRANSFER_POLL_SECONDS = 0.005


@dataclass
class Outcome:
    """What serving a load was like, in the time of the engine's clock."""

    seconds: float = 0.0
    num_tokens: int = 0
    """Generated."""
    num_preemptions: int = 0
    num_swapped: int = 0
    """Preemptions by swap."""
    most_preemptions: int = 0
    """Of one request."""
    num_computed: int = 0
    num_recomputed: int = 0
    num_steps: int = 0
    engine_seconds: float = 0.0
    """Processor time that this thread needed for all steps, whatever the engine's clock says."""
    wastes: list[float] = field(default_factory=list)
    """Part of the held slots that holds no token, after each step in which something ran."""
    gaps: list[float] = field(default_factory=list)
    """Seconds between successive tokens of each sequence."""
    first_token_seconds: list[float] = field(default_factory=list)
    end_to_end_seconds: list[float] = field(default_factory=list)
    recompute_estimates: list[float] = field(default_factory=list)
    """Seconds that the engine expected recomputation to take, for each preemption for which it knew."""
    swap_estimates: list[float] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens a second."""
        return self.num_tokens / self.seconds

    @property
    def recomputed_share(self) -> float:
        """Part of all computed tokens that had been computed before."""
        return self.num_recomputed / self.num_computed

    @property
    def gap_p99(self) -> float:
        """Inter-token latency in seconds that one token in a hundred exceeds."""
        return percentile(self.gaps, 0.99)

    @property
    def first_token_p50(self) -> float:
        """Median time to the first token in seconds."""
        return median(self.first_token_seconds)

    @property
    def end_to_end_p99(self) -> float:
        """Seconds that one request in a hundred exceeds."""
        return percentile(self.end_to_end_seconds, 0.99)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class _Watch:
    """Writes down what happens to one engine."""

    def __init__(self, core: EngineCore) -> None:
        self.outcome = Outcome()
        self._core = core
        self._cursor: Cursor = core.log.subscribe("study")
        self._preempted: Counter[str] = Counter()
        self._last_ns: dict[str, int] = {}

    def note_outputs(self, outputs: Sequence[SequenceOutput]) -> None:
        """Take note of generated tokens; each request has one sequence."""
        now = self._core.log.clock.monotonic_ns()
        for output in outputs:
            assert not output.error, output.error
            if not output.token_ids:
                continue
            if output.request_id in self._last_ns:
                self.outcome.gaps.append((now - self._last_ns[output.request_id]) / 1e9)
            self._last_ns[output.request_id] = now
            self.outcome.num_tokens += len(output.token_ids)

    def note_events(self) -> None:
        """Take note of what the engine has told since the last time."""
        outcome = self.outcome
        for event in self._cursor.read(1 << 16):
            if isinstance(event, RequestPreempted):
                self._note_preemption(event)
            elif isinstance(event, StepScheduled):
                outcome.num_computed += event.total_tokens
            elif isinstance(event, StepCompleted):
                outcome.num_recomputed += event.recomputed_tokens
            elif isinstance(event, RequestFinished):
                outcome.end_to_end_seconds.append((event.end_to_end_ns or 0) / 1e9)
                outcome.first_token_seconds.append(((event.queue_ns or 0) + (event.prefill_ns or 0)) / 1e9)

    def note_waste(self) -> None:
        """Take note of held and filled slots; nothing is shared."""
        sequences = [each for request in self._core.scheduler.lifecycle.running for each in request.active_sequences()]
        held = self._core.manager.pool.num_used * self._core.settings.block_size
        if held and sequences:
            self.outcome.wastes.append(1 - sum(each.num_computed for each in sequences) / held)

    def _note_preemption(self, event: RequestPreempted) -> None:
        outcome = self.outcome
        self._preempted[event.request] += 1
        outcome.num_preemptions += 1
        outcome.num_swapped += event.mode == "swap"
        outcome.most_preemptions = max(outcome.most_preemptions, self._preempted[event.request])
        if event.recompute_estimate_ns is not None and event.swap_estimate_ns is not None:
            outcome.recompute_estimates.append(event.recompute_estimate_ns / 1e9)
            outcome.swap_estimates.append(event.swap_estimate_ns / 1e9)


def drive(core: EngineCore, load: Load, now_ns: Callable[[], int]) -> Outcome:
    """Serve a load; return what it was like until the last request ended. Offloads may still be under way then."""
    watch = _Watch(core)
    todo = deque(load.requests())
    begin = now_ns()
    lifecycle = core.scheduler.lifecycle
    while todo or lifecycle.num_live:
        while todo and lifecycle.num_live < load.num_clients:
            core.add(todo.popleft(), now_ns())
        num_steps, started = core.num_steps, time.thread_time()
        outputs = core.step()
        watch.outcome.engine_seconds += time.thread_time() - started
        watch.note_outputs(outputs)
        watch.note_events()
        watch.note_waste()
        if core.num_steps == num_steps and core.tiers is not None:
            core.tiers.wait(_TRANSFER_POLL_SECONDS)  # nothing can be computed before a transfer has ended
    watch.outcome.seconds = (now_ns() - begin) / 1e9
    watch.outcome.num_steps = core.num_steps
    core.check_integrity()
    assert core.manager.pool.num_used == 0
    return watch.outcome
