"""An engine with a gRPC stream on a free loopback port, for tests: real sockets, the real observatory."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from naive_engine import NaiveEngine

from kvwatch.exporters.identity import EngineIdentity
from kvwatch.ledger.ledger import Ledger
from kvwatch.observatory import Observatory
from kvwatch.stream.access import StreamOptions
from kvwatch.stream.client import EventBatch, Item, Stream, TelemetryClient
from kvwatch.stream.contract import Gap
from kvwatch.stream.server import StreamServer
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.metrics import TELEMETRY_LAG
from kvwatch.telemetry.snapshot import EngineSnapshot

Kind = TypeVar("Kind")
LOOPBACK = StreamOptions(listen="127.0.0.1:0")


class StreamStage:
    """A naive engine under observation, with a stream."""

    def __init__(self, capacity: int = 4096, options: StreamOptions = LOOPBACK, num_blocks: int = 13) -> None:
        self.log = EventLog(capacity)
        self.engine = NaiveEngine(self.log, num_blocks)
        self.server = StreamServer(self.log, self.engine, options, {"engine": "test"})
        self.observatory = Observatory(self.log, self.engine, EngineIdentity("test"), parts=[self.server])
        self.random = random.Random(5)

    @property
    def address(self) -> str:
        assert self.server.address is not None
        return "{}:{}".format(*self.server.address)

    @property
    def lag(self) -> int:
        """How far the slowest subscriber is behind."""
        return int(next(sample.value for sample in self.server.samples() if sample.metric is TELEMETRY_LAG))

    def step(self, number: int = 1) -> None:
        """Let the engine do random things."""
        for _ in range(number):
            self.engine.step([(self.random.randrange(12), self.random.randrange(30)) for _ in range(5)])


@contextmanager
def stream_stage(
    capacity: int = 4096, options: StreamOptions = LOOPBACK, num_blocks: int = 13
) -> Iterator[StreamStage]:
    """Run an observatory with a stream for as long as the block lasts."""
    stage = StreamStage(capacity, options, num_blocks)
    stage.observatory.start()
    assert stage.server.is_serving.wait(10)
    try:
        yield stage
    finally:
        stage.observatory.stop()


@contextmanager
def connected(stage: StreamStage) -> Iterator[TelemetryClient]:
    """Connect to it."""
    with TelemetryClient(stage.address) as client:
        yield client


def wait_for(items: Iterator[Item], kind: type[Kind], seconds: float = 60) -> Kind:
    """Return the next item of this class; the stream is cancelled if none comes in time."""
    return next(item for item in bounded(items, seconds) if isinstance(item, kind))


def bounded(items: Iterator[Item], seconds: float = 60) -> Iterator[Item]:
    """Yield items, but fail when they do not come in time."""
    assert isinstance(items, Stream)
    is_late = threading.Event()

    def give_up() -> None:
        is_late.set()
        items.cancel()

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield from items
    finally:
        timer.cancel()
    assert not is_late.is_set(), f"nothing came within {seconds} s"


class LedgerMirror:
    """A follower that keeps nothing but a ledger, and notes how it was healed."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.gaps: list[Gap] = []
        self.num_snapshots = 0

    def take(self, item: Item) -> None:
        """Apply one item."""
        if isinstance(item, EngineSnapshot):
            self.ledger.load(item)
            self.num_snapshots += 1
        elif isinstance(item, Gap):
            self.gaps.append(item)
        elif isinstance(item, EventBatch):
            for event in item.events:
                assert event.seq == self.ledger.next_seq, "an event is missing or came twice"
                self.ledger.apply(event)

    def catch_up(self, items: Iterator[Item], is_there: Callable[[], bool], seconds: float = 60) -> None:
        """Apply items until the condition holds."""
        for item in bounded(items, seconds):
            self.take(item)
            if is_there():
                return
