"""Notices a step that takes too long while it still does, and says so in the event log.

The engine thread owns the log, and while it is stuck it can say nothing. So it lends the log where an engine gets
stuck: while the model computes, and while it waits for commands since nothing can run.

    engine thread   schedule ... │ execute (the log is lent) │ apply ...
    watch thread                 │   EngineStalled           │

Knows neither requests nor blocks.
"""

import threading
from collections.abc import Callable

import structlog

from kvwatch.telemetry.events import EngineStalled
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.step import StepExecutor, StepInput, StepResult

_LONGEST_PERIOD_SECONDS = 1.0
_LOOKS_PER_LIMIT = 8
"""How often it looks within the time that a step may take: a stall is noticed an eighth of that late at most."""

logger = structlog.get_logger(__name__)


class LogLease:
    """Says which thread may append to the log. The engine thread holds it but while the model computes, or it waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def take(self) -> None:
        """Wait until the log is free and take it."""
        self._lock.acquire()

    def give(self) -> None:
        """Let another thread append."""
        self._lock.release()

    def try_take(self) -> bool:
        """Take the log if nobody has it; return whether."""
        return self._lock.acquire(blocking=False)


class LendingExecutor:
    """Runs steps on another executor, and lends the log meanwhile. Engine thread only."""

    def __init__(self, inner: StepExecutor, lease: LogLease) -> None:
        self._inner = inner
        self._lease = lease

    def execute(self, step: StepInput) -> StepResult:
        """Compute a step; whatever the inner executor raises is raised."""
        self._lease.give()
        try:
            return self._inner.execute(step)
        finally:
            self._lease.take()


class StallWatch:
    """A thread that looks at the engine's progress now and then. `start` once; `stop` at any time.

    Args:
        log: Where a stall is reported.
        lease: Who may append to it.
        limit_seconds: Time without progress that counts as a stall.
        stuck_ns: Returns the ns since the engine last made progress; 0 while it has nothing to do.
        queues: Returns the numbers of running and of waiting requests.
    """

    def __init__(
        self,
        log: EventLog,
        lease: LogLease,
        limit_seconds: float,
        stuck_ns: Callable[[], int],
        queues: Callable[[], tuple[int, int]],
    ) -> None:
        self._log = log
        self._lease = lease
        self._limit_ns = round(limit_seconds * 1e9)
        self._period_seconds = min(_LONGEST_PERIOD_SECONDS, limit_seconds / _LOOKS_PER_LIMIT)
        self._stuck_ns = stuck_ns
        self._queues = queues
        self._is_stopping = threading.Event()
        self._is_reported = False
        self._is_logged = False
        self._thread = threading.Thread(target=self._run, name="kvwatch-stall-watch", daemon=True)

    @property
    def is_stalled(self) -> bool:
        """Whether the engine has made no progress for too long, as of the last look. Any thread."""
        return self._is_logged

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; it takes a moment, which nobody has to wait for."""
        self._is_stopping.set()

    def look(self) -> None:
        """Report the engine if it is stuck and was not reported yet; called by the thread."""
        stuck_ns = self._stuck_ns()
        if stuck_ns < self._limit_ns:
            self._is_reported = self._is_logged = False
            return
        num_running, num_waiting = self._queues()
        if not self._is_logged:
            self._is_logged = True
            logger.error(
                "the engine is stuck", seconds=stuck_ns // 1_000_000_000, running=num_running, waiting=num_waiting
            )
        # Stuck elsewhere, the engine keeps the log: then only the line above says so.
        if not self._is_reported and self._lease.try_take():
            try:
                self._is_reported = True
                if self._log.active:
                    self._log.begin(self._log.step)
                    self._log.append(EngineStalled(stuck_ns, num_running, num_waiting))
            finally:
                self._lease.give()

    def _run(self) -> None:
        while not self._is_stopping.wait(self._period_seconds):
            self.look()
