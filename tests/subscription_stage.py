"""A subscription that runs on a loop of its own, so that tests can publish to it and look at its mirror."""

import asyncio
import threading
import time
from collections.abc import Callable
from types import TracebackType

import zmq.asyncio

from kvwatch.sources.complaints import Complaints
from kvwatch.sources.endpoints import Target
from kvwatch.sources.mirror import LOG_CAPACITY, Mirror
from kvwatch.sources.stream_reader import StreamReader
from kvwatch.sources.subscription import Subscription
from kvwatch.telemetry.clock import SystemClock
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.schema import Event
from kvwatch.wire.decoder import Decoder
from kvwatch.wire.foreign import hash_bytes


class SubscriptionStage:
    """One rank that is watched. A context manager."""

    def __init__(self, target: Target) -> None:
        clock = SystemClock()
        self.log = EventLog(LOG_CAPACITY, clock)
        self._cursor = self.log.subscribe("test")
        self.mirror = Mirror(self.log, clock)
        self.complaints = Complaints(engine="test")
        self.reader = StreamReader(self.mirror, Decoder(), self.complaints, clock, can_replay=target.replay is not None)
        self._target = target
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: BaseException | None = None
        self.subscription: Subscription | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "SubscriptionStage":
        self._thread.start()
        wait_until(lambda: self.subscription is not None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive()
        if self._error is not None and kind is None:
            raise self._error

    @property
    def events(self) -> list[Event]:
        """Events since this was last asked for."""
        return self._cursor.read(100_000)

    def is_connected(self) -> bool:
        """Whether the publisher is there and the first replay is over."""
        return self.subscription is not None and self.subscription.is_connected and not self.reader.wants_healing

    def hashes(self, tier: str = "device") -> set[bytes]:
        """Return what is resident in a tier, as a snapshot says it."""
        return {each for state in self.mirror.snapshot().indexed if state.tier == tier for each in state.hashes}

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self._error = error

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        context = zmq.asyncio.Context()
        try:
            self.subscription = Subscription(self._target, self.reader, self.complaints, context)
            await self.subscription.run(self._stop)
        finally:
            context.destroy(0)


def keys(*hashes: int | bytes) -> set[bytes]:
    """Return hashes as the mirror keeps them."""
    return {hash_bytes(each) for each in hashes}


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so after {seconds} s"
        time.sleep(0.005)
