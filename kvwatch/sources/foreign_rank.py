"""One data-parallel rank of a foreign engine: its log, its mirror, the subscription that feeds them, its metrics."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import zmq.asyncio

from kvwatch.ledger.view import HistogramSample, Sample
from kvwatch.sources.complaints import Complaints
from kvwatch.sources.endpoints import Target
from kvwatch.sources.engines import EngineSpec
from kvwatch.sources.mirror import LOG_CAPACITY, Mirror
from kvwatch.sources.stream_reader import StreamReader
from kvwatch.sources.subscription import Subscription
from kvwatch.sources.transitions import TransitionObserver
from kvwatch.telemetry import metrics
from kvwatch.telemetry.clock import Clock
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.snapshot import EngineSnapshot
from kvwatch.wire.decoder import Decoder

NS = 1e-9


class RankObserver(TransitionObserver, Protocol):
    """What learns from a rank's transitions and has metrics of its own."""

    def on_lag(self, lag_ns: int) -> None:
        """A live batch came in order, `lag_ns` after the engine says that it was made."""
        ...

    def samples(self) -> Iterable[Sample | HistogramSample]:
        """Return its metrics. Any thread."""
        ...


class MirrorControl:
    """Answers for a rank from its mirror alone: nothing goes out to the engine. Any thread."""

    def __init__(self, mirror: Mirror, is_up: Callable[[], bool]) -> None:
        self._mirror = mirror
        self._is_up = is_up

    def snapshot(self, timeout_seconds: float = 5.0) -> EngineSnapshot:  # noqa: ARG002 - part of the protocol
        """Return what is resident. At once."""
        return self._mirror.snapshot()

    def is_alive(self) -> bool:
        """Whether the engine is reached."""
        return self._is_up()

    def is_ready(self) -> bool:
        """Whether the engine is reached."""
        return self._is_up()


class ForeignRank:
    """One rank. Event loop only, but for `samples`, `is_up` and `control`.

    Args:
        dp_rank: Its number.
        spec: The engine, as configured.
        clock: For all times.
        observer: Learns from transitions.
        is_reached: Whether the engine answers otherwise; counts while there is nothing to subscribe to.
    """

    def __init__(
        self,
        dp_rank: int,
        *,
        spec: EngineSpec,
        clock: Clock,
        observer: RankObserver | None,
        is_reached: Callable[[], bool],
    ) -> None:
        self.dp_rank = dp_rank
        self.log = EventLog(LOG_CAPACITY, clock)
        self.mirror = Mirror(self.log, clock, max_blocks=spec.max_blocks, observer=observer)
        self.control = MirrorControl(self.mirror, self.is_up)
        self._complaints = Complaints(engine=spec.name, dp_rank=dp_rank)
        self._reader = StreamReader(
            self.mirror,
            Decoder(in_full=spec.token_ids),
            self._complaints,
            clock,
            can_replay=False,
            on_lag=None if observer is None else observer.on_lag,
        )
        self._observer = observer
        self._is_reached = is_reached
        self._subscription: Subscription | None = None
        self._task: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    def is_up(self) -> bool:
        """Whether its publisher is connected."""
        subscription = self._subscription
        return self._is_reached() if subscription is None else subscription.is_connected

    def samples(self) -> Iterator[Sample | HistogramSample]:
        """Yield the health of its stream, and what its observer knows. Any thread."""
        counts, mirror = self._reader.counts, self.mirror
        yield Sample(metrics.SOURCE_UP, (), float(self.is_up()))
        yield Sample(metrics.SOURCE_COMPLETE, (), float(mirror.is_whole))
        drift = mirror.drift_blocks
        if drift is not None:
            yield Sample(metrics.SOURCE_DRIFT, (), drift)
        yield Sample(metrics.SOURCE_GAPS, (), counts.gaps)
        yield Sample(metrics.SOURCE_RESETS, (), counts.resets)
        for outcome, number in counts.replays.items():
            yield Sample(metrics.SOURCE_REPLAYS, (outcome,), number)
        for kind, number in self._complaints.counts.items():
            yield Sample(metrics.SOURCE_DECODE_ERRORS, (kind,), number)
        if mirror.block_size:
            yield Sample(metrics.KV_BLOCK_SIZE_TOKENS, (), mirror.block_size)
        if counts.last_batch_ns is not None:
            yield Sample(metrics.SOURCE_LAST_EVENT_TIMESTAMP, (), counts.last_batch_ns * NS)
        if self._observer is not None:
            yield from self._observer.samples()

    async def follow(self, target: Target, context: zmq.asyncio.Context) -> None:
        """Subscribe to a target, in place of another one or of a subscription that has failed."""
        if self._subscription is not None and self._subscription.target == target and self._is_running():
            return
        await self.stop()
        self._stop = asyncio.Event()
        self._subscription = Subscription(target, self._reader, self._complaints, context)
        self._task = asyncio.create_task(self._run(self._subscription, self._stop))

    @property
    def target(self) -> Target | None:
        """What is followed now."""
        return self._subscription.target if self._subscription is not None and self._is_running() else None

    async def stop(self) -> None:
        """End the subscription. Safe twice."""
        self._stop.set()
        if self._task is not None:
            await self._task
            self._task = None

    def _is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    async def _run(self, subscription: Subscription, stop: asyncio.Event) -> None:
        try:
            await subscription.run(stop)
        except Exception as error:  # a defect or a wrong address: nothing here may end the sidecar
            self._complaints.warn("an engine's KV events cannot be followed; trying again", error=repr(error))
