"""What is known of a remote engine at the head of its log here, so that snapshots need not be asked of the engine."""

import threading
from collections.abc import Sequence

import msgspec

from kvwatch.errors import ControlError
from kvwatch.ledger.ledger import Ledger
from kvwatch.sources.remote_clock import RemoteClock
from kvwatch.sources.remote_insight import RemoteInsight
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.schema import Event
from kvwatch.telemetry.snapshot import EngineSnapshot


class RemoteState:
    """Log and state of one remote engine; its `EngineControl`. Changed on one thread, read on any.

    Numbers of events are this log's own: they go on when the engine restarts and begins at 0 again.
    """

    def __init__(self, wall_offset_ns: int) -> None:
        self._clock = RemoteClock()
        self._clock.synchronise(wall_offset_ns)
        self._ledger = Ledger()
        self.insight = RemoteInsight()
        """What its hashes tell."""
        self._lock = threading.Lock()  # a snapshot holds exactly what was appended before it
        self.log = EventLog(clock=self._clock)
        """The engine's events."""

    @property
    def is_loaded(self) -> bool:
        """Whether the state is known."""
        return self._ledger.is_loaded

    def restarted(self, wall_offset_ns: int) -> None:
        """Follow the clock of an engine that was started anew."""
        self._clock.synchronise(wall_offset_ns)

    def load(self, snapshot: EngineSnapshot, num_missed: int) -> None:
        """Begin anew from the engine's state. Unless it is the first, `num_missed` events are a gap in the log."""
        with self._lock:
            if self._ledger.is_loaded and num_missed > 0:
                self.log.skip(num_missed)
            self.log.step, self.log.now_ns = snapshot.step, snapshot.time_ns
            self._ledger.load(msgspec.structs.replace(snapshot, seq=self.log.head))
            self.insight.load(snapshot)

    def append(self, events: Sequence[Event]) -> None:
        """Let events happen here that have happened in the engine."""
        with self._lock:
            for event in events:
                self.log.forward(event)
                self._ledger.apply(event)
                self.insight.apply(event)
            if events:
                self.insight.note_lag(self._clock.monotonic_ns() - events[-1].time_ns)

    # ------------------------------------------------------------ EngineControl

    def snapshot(self, timeout_seconds: float = 5.0) -> EngineSnapshot:
        """Return the state at the head of the log.

        Raises:
            ControlError: nothing is known yet.
        """
        if not self._lock.acquire(timeout=timeout_seconds):
            raise ControlError("the remote engine's events come too fast for a snapshot; try again")
        try:
            if not self._ledger.is_loaded:
                raise ControlError("the remote engine's state is not known yet; wait until the sidecar has reached it")
            return self._ledger.to_snapshot()
        finally:
            self._lock.release()

    def is_alive(self) -> bool:
        """Whether the engine's state is known; its own health is for its own probes."""
        return self.is_loaded

    def is_ready(self) -> bool:
        """The same: a sidecar takes no requests."""
        return self.is_loaded
