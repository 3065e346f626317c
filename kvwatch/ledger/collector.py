"""Brings a follower the events of one log, and heals it when events were lost.

A follower is whatever turns events into something else: the mirror behind the metrics, spans, files, a stream. Each has
a collector and so a cursor of its own: one that is slow or fails loses events alone.

Runs on the observatory's event loop. It takes at most `BATCH` events at a time and yields between batches, so that it
never holds the interpreter for long; nothing that goes wrong here reaches the engine. Both kinds of trouble, lost
events and an error in here, end in the same way: a snapshot of the engine, and on from its number.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from kvwatch.errors import ControlError
from kvwatch.ledger.pace import POLL_SECONDS, next_tick
from kvwatch.telemetry.log import EventLog, GapError
from kvwatch.telemetry.schema import Event
from kvwatch.telemetry.snapshot import EngineSnapshot

BATCH = 256
"""Events applied without yielding."""

RETRY_SECONDS = 1.0
"""Pause after a snapshot could not be had."""

SNAPSHOT_TIMEOUT_SECONDS = 2.0

LOG_SECONDS = 60.0
"""At most one failure is logged in this time; all are counted."""

logger = structlog.get_logger(__name__)


class Follower(Protocol):
    """What a collector feeds. All calls come from one thread, the observatory's, and must be short.

    What is raised is counted and logged; the follower is then given a snapshot and continues from there.
    """

    def load(self, snapshot: EngineSnapshot) -> None:
        """Begin anew from a snapshot: at first, and after events were lost."""
        ...

    def apply(self, events: Sequence[Event]) -> None:
        """Take up to `BATCH` events in order; they continue where the snapshot or the last ones ended. May be empty."""
        ...

    def settle(self) -> None:
        """Called again and again while there is nothing to apply."""
        ...

    def publish(self) -> None:
        """Make visible what was applied: nothing more will come."""
        ...


class Collector:
    """A follower's subscription. One thread at a time, except the counts, which any thread may read.

    Args:
        log: Where events come from; subscribed to at once.
        take_snapshot: Asks the engine for its state, with a timeout in seconds; raises `ControlError` if it is late.
        follower: What is kept up to date.
        name: Label of the collector's own metrics.
        period_seconds: How often it looks at the log.
    """

    def __init__(
        self,
        log: EventLog,
        take_snapshot: Callable[[float], EngineSnapshot],
        follower: Follower,
        name: str = "ledger",
        period_seconds: float = POLL_SECONDS,
    ) -> None:
        self._log = log
        self._take_snapshot = take_snapshot
        self._follower = follower
        self._cursor = log.subscribe(name)
        self._is_attached = False
        self._needs_snapshot = True
        self._logged_ns: int | None = None
        self._period_seconds = period_seconds
        self.name = name
        self.num_errors = 0
        """Errors in here or in the follower."""

    @property
    def lag(self) -> int:
        """Events appended and not yet applied."""
        return self._cursor.lag

    @property
    def num_gaps(self) -> int:
        """Times events were lost."""
        return self._cursor.num_gaps

    @property
    def num_dropped(self) -> int:
        """Events lost."""
        return self._cursor.num_lost

    def drain(self) -> int:
        """Apply one batch; return its size. Never raises: what goes wrong is counted and healed by the next `heal`."""
        if self._needs_snapshot:
            return 0
        try:
            events = self._cursor.read(BATCH)
            self._follower.apply(events)
            if len(events) < BATCH:
                self._follower.settle()
        except GapError:
            self._needs_snapshot = True
        except Exception as error:  # the observatory must survive its own defects
            self.num_errors += 1
            self._report("a follower of the log failed and begins anew from a snapshot", error)
            self._needs_snapshot = True
        else:
            return len(events)
        return 0

    @property
    def needs_snapshot(self) -> bool:
        """Whether `heal` must be called before anything else can be applied."""
        return self._needs_snapshot

    def heal(self) -> bool:
        """Fetch a snapshot and go on from it; return whether it could be had. Blocks until the engine answers."""
        try:
            self._adopt(self._take_snapshot(SNAPSHOT_TIMEOUT_SECONDS))
        except Exception as error:
            return self._not_healed(error)
        return True

    async def run(self, stop: asyncio.Event) -> None:
        """Collect until `stop` is set."""
        while not stop.is_set():
            if not self._needs_snapshot:
                await (asyncio.sleep(0) if self.drain() == BATCH else next_tick(self._period_seconds))
            elif not await self._heal_off_loop():
                await _sleep(RETRY_SECONDS, stop)

    def finish(self) -> None:
        """Apply what is there now, publish it and detach from the log. Safe to call twice."""
        end = self._cursor.position + self._cursor.lag
        while self._cursor.position < end and self.drain():
            pass
        if not self._needs_snapshot:
            self._follower.publish()
        self._cursor.close()

    async def _heal_off_loop(self) -> bool:
        # In a thread: the engine answers between two steps, and the listeners must not wait for that.
        try:
            self._adopt(await asyncio.to_thread(self._take_snapshot, SNAPSHOT_TIMEOUT_SECONDS))
        except Exception as error:
            return self._not_healed(error)
        return True

    def _not_healed(self, error: Exception) -> bool:
        if not isinstance(error, ControlError):  # an engine that does not answer is no defect of ours
            self.num_errors += 1
        self._report("no snapshot of the engine, trying again", error)
        return False

    def _adopt(self, snapshot: EngineSnapshot) -> None:
        self._follower.load(snapshot)
        if self._is_attached:
            self._cursor.resume_at(snapshot.seq)
        else:  # the events before the first snapshot are contained in it: nothing was lost
            self._cursor.position = snapshot.seq
            self._is_attached = True
        self._needs_snapshot = False

    def _report(self, message: str, error: Exception) -> None:
        now = self._log.clock.monotonic_ns()
        if self._logged_ns is None or now - self._logged_ns >= LOG_SECONDS * 1e9:
            self._logged_ns = now
            logger.warning(message, subscriber=self.name, error=repr(error), num_errors=self.num_errors)


async def _sleep(seconds: float, stop: asyncio.Event) -> None:
    """Sleep, but notice `stop` at the next tick."""
    until = asyncio.get_running_loop().time() + seconds
    while not stop.is_set() and asyncio.get_running_loop().time() < until:
        await next_tick()
