"""The real scheduler and the real block tables on a clock that only a cost model moves: hours of serving in seconds.

The cost of a step is a constant and a price a token, about what an 8-billion-parameter model takes on one large GPU.
Absolute numbers are the cost model's; what is compared is what the scheduler makes of them.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from kvwatch.telemetry.events import RequestFinished, RequestPreempted, StepCompleted, StepScheduled
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.request import GenerationRequest, SequenceOutput
from kvwatch_engine.contracts.sampling import SamplingParams
from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.contracts.step import StepInput, StepResult
from kvwatch_engine.core import EngineCore

STEP_SECONDS = 0.010
TOKEN_SECONDS = 0.00005
VOCABULARY = 10_000
MAX_MODEL_LEN = 4096


class VirtualClock:
    """Time passes only while a step is computed."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000

    def monotonic_ns(self) -> int:
        """Return the time."""
        return self.now_ns

    def wall_ns(self) -> int:
        """Return the time."""
        return self.now_ns


class CostModel:
    """A model without a text, whose steps take their time."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock

    def execute(self, step: StepInput) -> StepResult:
        """Let the step's time pass."""
        duration_ns = round((STEP_SECONDS + TOKEN_SECONDS * step.num_tokens) * 1e9)
        self._clock.now_ns += duration_ns
        rows = len(step.sample_rows)
        return StepResult(token_ids=[1] * rows, logprobs=[None] * rows, forward_ns=duration_ns, sample_ns=0)


@dataclass(frozen=True)
class Load:
    """Requests of clients that each send one after the other."""

    num_requests: int = 600
    num_clients: int = 64
    prompt: tuple[float, float] = (5.3, 0.7)
    """Logarithm of a prompt's length: mean and standard deviation."""
    answer: tuple[float, float] = (5.0, 0.7)
    """The same of an answer's length, which the engine does not know in advance."""
    low_priority_share: float = 0.0
    """Part of the requests that have priority 1 instead of 0."""
    seed: int = 7

    def requests(self) -> list[GenerationRequest]:
        """Return the requests, no two of which share a prefix."""
        random, dice = Random(self.seed), Random(self.seed)
        made = []
        for number in range(self.num_requests):
            length, answer = (
                max(4, min(MAX_MODEL_LEN // 2, round(random.lognormvariate(*shape))))
                for shape in (self.prompt, self.answer)
            )
            prompt = tuple((number * 7919 + place) % VOCABULARY for place in range(length))
            sampling = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True, seed=0)
            priority = int(dice.random() < self.low_priority_share)
            made.append(
                GenerationRequest(request_id=str(number), prompt_token_ids=prompt, sampling=sampling, priority=priority)
            )
        return made


@dataclass
class Outcome:
    """What serving a load was like, in virtual time."""

    seconds: float = 0.0
    num_tokens: int = 0
    num_preemptions: int = 0
    most_preemptions: int = 0
    """Of one request."""
    num_computed: int = 0
    num_recomputed: int = 0
    wastes: list[float] = field(default_factory=list)
    """Part of the held slots that holds no token, after each step in which something ran."""
    gaps: list[float] = field(default_factory=list)
    """Seconds between successive tokens of each sequence."""
    first_token_seconds: list[float] = field(default_factory=list)
    end_to_end_seconds: list[float] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens a second."""
        return self.num_tokens / self.seconds

    @property
    def recomputed_share(self) -> float:
        """Part of all computed tokens that had been computed before."""
        return self.num_recomputed / self.num_computed


def percentile(values: Sequence[float], share: float) -> float:
    """Return the nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class _Watch:
    """Writes down what happens to one engine."""

    def __init__(self, core: EngineCore) -> None:
        self.outcome = Outcome()
        self._core = core
        self._cursor = core.log.subscribe("study")
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
                self._preempted[event.request] += 1
            elif isinstance(event, StepScheduled):
                outcome.num_computed += event.total_tokens
            elif isinstance(event, StepCompleted):
                outcome.num_recomputed += event.recomputed_tokens
            elif isinstance(event, RequestFinished):
                outcome.end_to_end_seconds.append((event.end_to_end_ns or 0) / 1e9)
                outcome.first_token_seconds.append(((event.queue_ns or 0) + (event.prefill_ns or 0)) / 1e9)
        outcome.num_preemptions = self._preempted.total()
        outcome.most_preemptions = max(self._preempted.values(), default=0)

    def note_waste(self) -> None:
        """Take note of held and filled slots; nothing is shared."""
        sequences = [each for request in self._core.scheduler.lifecycle.running for each in request.active_sequences()]
        held = self._core.manager.pool.num_used * self._core.settings.block_size
        if held and sequences:
            self.outcome.wastes.append(1 - sum(each.num_computed for each in sequences) / held)


def serve(load: Load, **settings: Any) -> Outcome:
    """Serve a load; return what it was like."""
    clock = VirtualClock()
    values = {"num_blocks": 401, "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 64, "max_batch_tokens": 1024,
              "preemption_mode": "recompute", "eos_token_ids": (), "vocab_size": VOCABULARY, **settings}  # fmt: skip
    core = EngineCore(EngineSettings(**values), CostModel(clock), EventLog(1 << 16, clock))
    watch = _Watch(core)
    todo = deque(load.requests())
    begin = clock.now_ns
    while todo or core.has_work:
        while todo and core.scheduler.lifecycle.num_live < load.num_clients:
            core.add(todo.popleft(), clock.now_ns)
        watch.note_outputs(core.step())
        watch.note_events()
        watch.note_waste()
    core.check_integrity()
    assert core.manager.pool.num_used == 0
    watch.outcome.seconds = (clock.now_ns - begin) / 1e9
    return watch.outcome
