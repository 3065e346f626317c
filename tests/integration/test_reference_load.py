"""A scripted load through the real engine thread: every metric has exactly the value that an oracle computes.

The oracle reads pool, tables and requests, never an event. Latencies are measured by the client as well.
"""

import threading
import time
from collections.abc import Callable, Sequence

import pytest
from builders import NullModel, make_request, make_settings
from metrics_oracle import Oracle

from kvwatch.exporters.identity import EngineIdentity
from kvwatch.ledger.view import View
from kvwatch.observatory import Observatory
from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.schema import Metric
from kvwatch_engine.contracts.errors import RequestRejected
from kvwatch_engine.contracts.request import SequenceOutput
from kvwatch_engine.contracts.step import StepInput, StepResult
from kvwatch_engine.engine import Engine

OWN = {m.TELEMETRY_CPU.name, m.BUILD_INFO.name}


class Model(NullModel):
    """Takes a moment for each step, waits at a gate, and fails when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.errors: list[Exception] = []

    def execute(self, step: StepInput) -> StepResult:
        assert self.gate.wait(20)
        time.sleep(0.0005)
        if self.errors:
            raise self.errors.pop()
        return super().execute(step)


class Client:
    """Submits requests and measures from outside when their tokens come."""

    def __init__(self) -> None:
        self.sent: dict[str, float] = {}
        self.first: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.ended: set[tuple[str, int]] = set()

    def __call__(self, outputs: Sequence[SequenceOutput]) -> None:
        now = time.monotonic()
        for output in outputs:
            if output.token_ids:
                self.first.setdefault(output.request_id, now)
                self.last[output.request_id] = now
            if output.finish_reason is not None:
                self.ended.add((output.request_id, output.sequence))


class Bench:
    """Engine thread, observatory thread, oracle and client together."""

    def __init__(self) -> None:
        # So few blocks that the load must preempt and evict.
        config = make_settings(num_blocks=19, max_num_seqs=4, max_queued_requests=40, max_prefill_chunk=8)
        self.model, self.log, self.client = Model(), EventLog(), Client()
        self.model.block_size = config.block_size
        self.engine = Engine(config, self.model, self.log, self.client, block_bytes=64)
        self.oracle = Oracle(self.engine._core)
        identity = EngineIdentity("reference")
        self.observatory = Observatory(self.log, self.engine, identity, view_interval_seconds=0)

    def __enter__(self) -> "Bench":
        self.engine.start()
        self.observatory.start()
        wait_for(lambda: self.view.value(m.KV_BLOCK_CAPACITY, "device") is not None)
        return self

    def __exit__(self, *_: object) -> None:
        self.model.gate.set()
        self.engine.stop()
        self.observatory.stop()

    @property
    def view(self) -> View:
        return self.observatory.view

    def send(self, name: str, prompt: list[int], **sampling: object) -> None:
        self.client.sent[name] = time.monotonic()
        self.engine.submit(make_request(name, prompt, **sampling))

    def settle(self) -> None:
        """Wait until the engine is idle and its last event is in the view."""
        wait_for(lambda: self.engine.num_live_requests == 0)
        self.engine.snapshot()  # all commands before it are carried out
        wait_for(lambda: self.view.seq == self.log.head - 1)

    def play(self) -> None:
        """The load: shared prefixes, parallel samples, pressure, aborts, refusals, failures."""
        shared = list(range(10, 22))
        self.model.gate.clear()
        for number in range(16):
            self.send(f"r{number}", [*shared, number, 5], n=1 + number % 3 // 2, max_tokens=14, ignore_eos=True)
        self.engine.abort("r9")
        self.engine.abort("nobody")
        self.model.gate.set()
        wait_for(lambda: ("r0", 0) in self.client.ended)
        self.engine.stop_sequence("r13", 0)
        self.settle()
        for error in (RuntimeError("made to fail"), MemoryError("made to fail")):
            self.model.errors.append(error)
            self.send(type(error).__name__, [1, 2, 3], max_tokens=4)
            self.settle()
        for name, prompt, sampling in (("too long", [1] * 60, {"max_tokens": 60}), ("empty", [], {})):
            with pytest.raises(RequestRejected):
                self.send(name, prompt, **sampling)
        self.send("again", [*shared, 0, 5], max_tokens=1)
        self.settle()


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not so in time"
        time.sleep(0.002)


def test_every_metric_has_exactly_the_oracles_value_and_stands_still_when_idle() -> None:
    """LMCache#2574 (O08), sglang#4244 (O20), vllm#29928 (O16): values that never move, and values that never stop."""
    with Bench() as bench:
        bench.play()

        assert bench.oracle.differences(bench.view, 0, is_clock_real=True) == []
        for metric in (m.STEP_ERRORS, m.OUT_OF_MEMORY, m.PREEMPTIONS, m.REQUESTS_REJECTED, m.KV_BLOCK_EVICTIONS):
            assert total(bench.view, metric) > 0, f"the load does not move {metric.name}"
        assert bench.view.value(m.LEDGER_VIOLATIONS) == 0
        # kekzl/imp#1120 (O23): the cache is no leak. vllm#27073 (O59): refused requests leave nothing behind.
        assert bench.view.value(m.KV_BLOCKS, "device", "0", "used") == 0
        assert bench.view.value(m.KV_BLOCKS, "device", "0", "cached")
        latest = bench.view.value(m.LAST_STEP_TIMESTAMP)
        assert latest is not None
        assert abs(latest - time.time()) < 20
        scrapes = []
        for _ in range(3):
            scrapes.append([s for s in bench.observatory.samples() if s.metric.name not in OWN])
            time.sleep(0.2)
        assert scrapes[0] == scrapes[1] == scrapes[2]


def test_latencies_are_what_the_client_measures() -> None:
    with Bench() as bench:
        bench.play()
        client = bench.client
        measured = {
            m.TIME_TO_FIRST_TOKEN: [client.first[name] - client.sent[name] for name in client.first],
            m.END_TO_END: [client.last[name] - client.sent[name] for name in client.last],
        }

        for metric, seconds in measured.items():
            histogram = bench.view.histogram(metric)
            assert histogram is not None
            assert histogram.count == len(seconds)
            # The client's clock starts before and stops after the engine's: both see the same interval.
            assert 0 <= sum(seconds) - histogram.sum < 0.1 * len(seconds)


def total(view: View, metric: Metric) -> float:
    return sum(sample.value for sample in view.counters if sample.metric is metric)
