"""An engine on its thread, with a model that computes only while its gate is open."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from builders import NullModel, make_settings

from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.request import FinishReason, SequenceOutput
from kvwatch_engine.contracts.step import StepInput, StepResult
from kvwatch_engine.engine import Engine


class GatedModel(NullModel):
    """A null model that computes a step only while its gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def execute(self, step: StepInput) -> StepResult:
        assert self.gate.wait(20)
        return super().execute(step)


class Collected:
    """Collects outputs, as a server does."""

    def __init__(self) -> None:
        self.outputs: list[SequenceOutput] = []

    def __call__(self, outputs: Sequence[SequenceOutput]) -> None:
        self.outputs += outputs

    def reasons(self) -> dict[str, FinishReason]:
        return {o.request_id: o.finish_reason for o in list(self.outputs) if o.finish_reason is not None}


@contextmanager
def running_engine(**settings: object) -> Iterator[tuple[Engine, GatedModel, Collected, EventLog]]:
    model, collected, log = GatedModel(), Collected(), EventLog()
    config = make_settings(**settings)
    model.block_size = config.block_size
    engine = Engine(config, model, log, collected)
    engine.start()
    try:
        yield engine, model, collected, log
    finally:
        model.gate.set()
        engine.stop()


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not so in time"
        time.sleep(0.002)
