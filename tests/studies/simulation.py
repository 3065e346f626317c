"""The real scheduler and the real block tables on a clock that only a cost model moves: hours of serving in seconds.

The cost of a step is a constant and a price a token. Absolute times are the cost model's; what is compared is what the
scheduler makes of them. Counts (blocks, preemptions, tokens) are exact, and the same on every machine.
"""

from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from load import MAX_MODEL_LEN, VOCABULARY, Load
from outcome import Outcome, drive

from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.contracts.step import StepInput, StepResult
from kvwatch_engine.core import EngineCore


@dataclass(frozen=True)
class Prices:
    """What a step takes."""

    step_seconds: float
    token_seconds: float


GPU = Prices(0.010, 0.00005)
"""About an 8-billion-parameter model on one large GPU: 256 more tokens in a step make it twice as long."""
CPU = Prices(0.020, 0.0004)
"""About the embedded model on two CPU cores: 50 tokens do, so that to compute again is dear."""


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


class PricedModel:
    """A model without a text, whose steps take their time."""

    def __init__(self, clock: VirtualClock, prices: Prices) -> None:
        self._clock = clock
        self._prices = prices

    def execute(self, step: StepInput) -> StepResult:
        """Let the step's time pass."""
        seconds = self._prices.step_seconds + self._prices.token_seconds * step.num_tokens
        duration_ns = round(seconds * 1e9)
        self._clock.now_ns += duration_ns
        rows = len(step.sample_rows)
        return StepResult(token_ids=[1] * rows, logprobs=[None] * rows, forward_ns=duration_ns, sample_ns=0)


@dataclass(frozen=True)
class Case:
    """One load on one engine."""

    load: Load
    settings: dict[str, Any]
    """Fields of `EngineSettings` that differ from those of all studies."""
    prices: Prices = GPU


def serve(case: Case) -> Outcome:
    """Serve a load; return what it was like."""
    clock = VirtualClock()
    values = {"num_blocks": 401, "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 64, "max_batch_tokens": 1024,
              "preemption_mode": "recompute", "eos_token_ids": (), "vocab_size": VOCABULARY,
              **case.settings}  # fmt: skip
    core = EngineCore(EngineSettings(**values), PricedModel(clock, case.prices), EventLog(1 << 16, clock))
    return drive(core, case.load, clock.monotonic_ns)


def serve_all(cases: Iterable[Case]) -> list[Outcome]:
    """Serve each case in a process of its own kind, as many at a time as there are cores; their clocks do not care."""
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as processes:
        return list(processes.map(serve, cases))
