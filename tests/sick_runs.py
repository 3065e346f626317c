"""Real engines driven into sickness, and into health, under a clock of their own: the same numbers on every machine.

Each run is a load on an `EngineCore` with the arithmetic model, whose steps take the time that they are said to take. A
mirror follows its events as in the observatory, and what it shows at two moments is what rules judge.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from builders import FakeClock, NullModel, make_core, make_request
from dict_tiers import DictTiers

from kvwatch.exporters.prometheus.process import subscriber_samples
from kvwatch.insight.diagnosis import Reading
from kvwatch.ledger.collector import Collector
from kvwatch.ledger.mirror import Mirror
from kvwatch.ledger.view import HistogramSample, Sample
from kvwatch.telemetry import events as ev
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.step import StepInput, StepResult
from kvwatch_engine.contracts.tiers import Tiers
from kvwatch_engine.core import EngineCore
from kvwatch_engine.memory.block_manager import BlockManager
from kvwatch_engine.memory.block_pool import Owner
from kvwatch_engine.memory.prefix import Prefix


class RunningClock(FakeClock):
    """A clock that also moves a little whenever somebody looks: what the engine does between two looks takes time."""

    def monotonic_ns(self) -> int:
        self.now_ns += 20_000
        return self.now_ns


class TimedModel(NullModel):
    """The arithmetic model, whose forward pass takes time by the step and by the token."""

    def __init__(self, clock: FakeClock, step_seconds: float, token_seconds: float) -> None:
        super().__init__(vocab_size=50)
        self._clock = clock
        self._step_seconds = step_seconds
        self._token_seconds = token_seconds
        self.fails = False

    def execute(self, step: StepInput) -> StepResult:
        if self.fails:
            raise RuntimeError("the device was lost")
        result = super().execute(step)
        seconds = self._step_seconds + self._token_seconds * step.num_tokens
        self._clock.advance(seconds)
        return replace(result, forward_ns=int(seconds * 1e9))


Prompts = Iterator[list[int]]
Looks = tuple[Reading, Reading]
"""An engine at two moments."""


@dataclass(kw_only=True)
class Load:
    """Clients in a closed loop: each sends its next request when its last one has ended."""

    clients: int = 4
    prompts: Callable[[], Prompts] = field(default=lambda: prompts(40, shared=24))
    max_tokens: int = 12
    spread: int = 0
    """Answers are up to so many tokens longer, so that they do not end together."""
    n: int = 1


class Patient:
    """An engine under load, and what is seen of it."""

    def __init__(
        self,
        load: Load,
        *,
        step_seconds: float = 0.005,
        token_seconds: float = 0.0001,
        log_capacity: int = 65_536,
        slow_tiers: dict[str, Any] | None = None,
        **settings: object,
    ) -> None:
        self.clock = RunningClock()
        self.log = EventLog(log_capacity, self.clock)
        self.model = TimedModel(self.clock, step_seconds, token_seconds)
        wanted: dict[str, Any] = {
            "num_blocks": 801,
            "max_model_len": 256,
            "max_num_seqs": 16,
            "max_batch_tokens": 256,
            **settings,
        }
        make_tiers = None if slow_tiers is None else self._tiers_maker(slow_tiers)
        self.core: EngineCore = make_core(self.model, self.log, make_tiers=make_tiers, **wanted)
        self.mirror = Mirror(self.clock, 0)
        self.collector = Collector(self.log, lambda _: self.core.snapshot(), self.mirror)
        assert self.collector.heal()
        self._load = load
        self._prompts = load.prompts()
        self._number = itertools.count()
        self.is_drained = True
        """Whether the collector takes its events after every step."""

    def _tiers_maker(self, options: dict[str, Any]) -> Callable[[BlockManager], Tiers]:
        return lambda manager: DictTiers(manager, self.log, self.model, Random(7), **options)

    def step(self) -> None:
        missing = self._load.clients - len(self.core.live_request_ids())
        for _ in range(missing):
            number, load = next(self._number), self._load
            max_tokens = load.max_tokens + number % (load.spread + 1)
            request = make_request(f"r{number}", next(self._prompts), max_tokens=max_tokens, ignore_eos=True, n=load.n)
            self.core.add(request, self.clock.monotonic_ns())
        num_steps = self.core.num_steps
        self.core.step()
        if self.core.num_steps == num_steps:
            self.clock.advance(0.005)  # nobody computes: time passes all the same
        if self.is_drained:
            self.drain()

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()

    def drain(self) -> None:
        while self.collector.needs_snapshot or self.collector.drain():
            if self.collector.needs_snapshot:
                self.collector.heal()
        self.mirror.publish()

    def look(self) -> Reading:
        view = self.mirror.view
        shown: list[Sample | HistogramSample] = [*view.gauges, *view.counters, *view.histograms]
        return Reading(self.clock.now_ns / 1e9, [*shown, *subscriber_samples([self.collector])])

    def observe(self, num_steps: int = 250, warm_up: int = 120) -> Looks:
        """Warm up, look, run, look."""
        self.run(warm_up)
        before = self.look()
        self.run(num_steps)
        return before, self.look()


def prompts(length: int, *, shared: int = 0, kinds: int = 0) -> Prompts:
    """Yield prompts of this length: the first `shared` tokens are common; `kinds` of them in turn, or all new."""
    for number in itertools.count():
        kind = number % kinds if kinds else number
        own = [4 + (kind * 7 + place * place + kind * place) % 46 for place in range(length - shared)]
        own[:3] = [4 + kind % 46, 4 + kind // 46 % 46, 4 + kind // 2116 % 46]
        yield [5 + place % 40 for place in range(shared)] + own


# ---------------------------------------------------------------- the runs


def healthy() -> Looks:
    return Patient(Load(), watermark_blocks=16).observe()


def busy() -> Looks:
    """Many run together, the pool is half full, the model takes all of the time, and nobody waits."""
    return Patient(Load(clients=40, max_tokens=60), max_num_seqs=64, watermark_blocks=48, num_blocks=1601).observe()


def without_prefix_cache() -> Looks:
    return Patient(Load(), watermark_blocks=16, enable_prefix_cache=False).observe()


def parallel_samples() -> Looks:
    return Patient(Load(n=4), watermark_blocks=16).observe()


def with_tiers() -> Looks:
    load = Load(prompts=lambda: prompts(49, kinds=20), max_tokens=24)
    return Patient(load, num_blocks=161, watermark_blocks=8, slow_tiers={"num_prefixes": 1000}).observe()


def idle() -> Looks:
    return Patient(Load(clients=0), watermark_blocks=16).observe()


def pool_too_small() -> Looks:
    load = Load(clients=8, prompts=lambda: prompts(32), max_tokens=60)
    return Patient(load, num_blocks=61, watermark_blocks=8).observe()


def watermark_too_low() -> Looks:
    load = Load(clients=60, prompts=lambda: prompts(32), max_tokens=60)
    return Patient(load, num_blocks=401, max_num_seqs=64, watermark_blocks=0).observe()


def kv_bound() -> Looks:
    load = Load(clients=16, prompts=lambda: prompts(64), max_tokens=4)
    return Patient(load, num_blocks=81, watermark_blocks=8).observe()


def compute_bound() -> Looks:
    load = Load(clients=32, prompts=lambda: prompts(64), max_tokens=8)
    return Patient(load, max_batch_tokens=32, max_num_seqs=64, watermark_blocks=16).observe()


def waiting_for_sequences() -> Looks:
    return Patient(Load(clients=16), max_num_seqs=2, watermark_blocks=16).observe()


def waiting_for_tokens() -> Looks:
    load = Load(clients=32, prompts=lambda: prompts(64), max_tokens=8)
    patient = Patient(
        load, max_batch_tokens=32, max_num_seqs=64, watermark_blocks=16, step_seconds=0, token_seconds=1e-7
    )
    return patient.observe()


def waiting_for_transfers() -> Looks:
    load = Load(clients=4, prompts=lambda: prompts(49, kinds=20), max_tokens=2)
    tiers = {"max_polls": 400, "num_prefixes": 1000}
    return Patient(load, num_blocks=161, watermark_blocks=8, slow_tiers=tiers).observe()


def evicted_before_reuse() -> Looks:
    load = Load(clients=1, prompts=lambda: prompts(49, kinds=6), max_tokens=2)
    return Patient(load, num_blocks=61, watermark_blocks=4).observe()


def block_size_too_large() -> Looks:
    load = Load(prompts=lambda: prompts(14))
    return Patient(load, block_size=16, num_blocks=401, watermark_blocks=16).observe()


def half_empty_blocks() -> Looks:
    """Requests of some tokens in blocks of 16, with the prefix cache off: nothing is looked up, so no tail is lost."""
    load = Load(clients=12, prompts=lambda: prompts(3), max_tokens=4, spread=3)
    return Patient(load, block_size=16, num_blocks=41, watermark_blocks=12, enable_prefix_cache=False).observe()


def leak() -> Looks:
    patient = Patient(Load(), watermark_blocks=16)
    patient.run(20)
    # What a defect in the scheduler would do: blocks are taken for a request that it does not know.
    assert patient.core.manager.open(Owner("ghost", 0), Prefix(), 30)
    return patient.observe()


def admission_paused() -> Looks:
    patient = Patient(Load(), watermark_blocks=16)
    patient.run(20)
    patient.core.scheduler.admission.pause.begin(3600.0, "test", "")
    return patient.observe()


def engine_unwell() -> Looks:
    patient = Patient(Load(), watermark_blocks=16)
    patient.run(120)
    before = patient.look()
    patient.model.fails = True
    patient.run(3)
    patient.model.fails = False
    patient.run(250)
    return before, patient.look()


def numbers_untrue() -> Looks:
    patient = Patient(Load(), watermark_blocks=16)
    patient.run(120)
    before = patient.look()
    # What a defect in an emit site would do: something is told that has not happened.
    patient.log.append(ev.SwapAbandoned("nobody", "disk_read"))
    patient.run(250)
    return before, patient.look()


def telemetry_lagging() -> Looks:
    patient = Patient(Load(), watermark_blocks=16, log_capacity=512)
    patient.run(120)
    before = patient.look()
    patient.is_drained = False
    patient.run(250)
    patient.drain()
    patient.is_drained = True
    patient.run(20)
    return before, patient.look()


HEALTHY_RUNS: tuple[Callable[[], Looks], ...] = (
    healthy,
    busy,
    without_prefix_cache,
    parallel_samples,
    with_tiers,
    idle,
)

SICK_RUNS: dict[str, tuple[Callable[[], Looks], ...]] = {
    "engine_unwell": (engine_unwell,),
    "numbers_untrue": (numbers_untrue,),
    "leak": (leak,),
    "admission_paused": (admission_paused,),
    "pool_too_small": (pool_too_small,),
    "watermark_too_low": (watermark_too_low,),
    "kv_bound": (kv_bound,),
    "waiting_though_free": (waiting_for_sequences, waiting_for_tokens, waiting_for_transfers),
    "compute_bound": (compute_bound,),
    "evicted_before_reuse": (evicted_before_reuse,),
    "block_size_too_large": (block_size_too_large, half_empty_blocks),
    "telemetry_lagging": (telemetry_lagging,),
}
"""Rule -> runs on which it alone speaks."""
