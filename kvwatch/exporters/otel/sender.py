"""A bounded queue and a thread that empties it into a collector.

Owns what happens when the collector is dead, slow, refusing or half open: whoever puts something in never waits, what
finds no room or is not taken is dropped and counted, memory is bounded, and the end is bounded in time. Knows neither
spans nor metrics.

The batch processors of OpenTelemetry's SDK do the same job, but honour no export timeout, may flush for ever, and
drop the oldest records singly and uncounted, which tears traces apart.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

import structlog

from kvwatch.ledger.view import Sample
from kvwatch.telemetry import metrics as m

LOG_SECONDS = 60.0
"""At most one line about a collector that does not take things in this time; everything is counted."""

CLOSE_SECONDS = 0.5
"""What a thread gets to notice that its exporter was closed under it."""

T = TypeVar("T")

logger = structlog.get_logger(__name__)


class Sender(Generic[T]):
    """Sends items in batches.

    Args:
        name: Value of the label `subscriber` in its metrics.
        export: Sends a batch, within a bounded time; returns whether it was taken. Called on the sender's thread.
        close_export: Makes a call of `export` that is under way return soon. Called once, on the thread of `stop`.
        weigh: Size of an item; `max_queued` and `max_batch` are sums of these.
        max_queued: Most that waits. A heavier item is taken only by an empty queue.
        max_batch: Most in one batch; a heavier item makes a batch of its own.
        delay_seconds: How long an item waits for others to fill its batch.
        on_sent: Is shown every batch that was taken, on the sender's thread.
        why: Returns what is known of the last failure.
    """

    def __init__(  # noqa: PLR0913 - by keyword
        self,
        name: str,
        export: Callable[[Sequence[T]], bool],
        close_export: Callable[[], None],
        *,
        weigh: Callable[[T], int] = lambda _: 1,
        max_queued: int,
        max_batch: int = 512,
        delay_seconds: float = 1.0,
        on_sent: Callable[[Sequence[T]], None] = lambda _: None,
        why: Callable[[], str] = lambda: "",
    ) -> None:
        self.name = name
        self._export = export
        self._close_export = close_export
        self._weigh = weigh
        self._max_queued = max_queued
        self._max_batch = max_batch
        self._delay_seconds = delay_seconds
        self._on_sent = on_sent
        self._why = why
        self._queue: deque[tuple[int, T]] = deque()
        self._changed = threading.Condition()  # guards everything below
        self._num_queued = 0
        self._num_dropped = 0
        self._num_failures = 0
        self._num_sent = 0
        self._is_stopping = False
        self._cpu_seconds = 0.0
        self._logged: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"kvwatch-{name}", daemon=True)

    # ------------------------------------------------------------ any thread

    @property
    def num_queued(self) -> int:
        """Weight of what waits."""
        return self._num_queued

    @property
    def num_dropped(self) -> int:
        """Weight of what found no room or was not taken."""
        return self._num_dropped

    @property
    def num_failures(self) -> int:
        """Batches that were not taken."""
        return self._num_failures

    @property
    def num_sent(self) -> int:
        """Weight of what was taken."""
        return self._num_sent

    def put(self, item: T) -> bool:
        """Queue an item; return False when there is no room and it was dropped. Never waits for the collector."""
        weight = self._weigh(item)
        with self._changed:
            is_full = bool(self._queue) and self._num_queued + weight > self._max_queued
            if is_full or self._is_stopping:
                self._num_dropped += weight
                return False
            self._queue.append((weight, item))
            self._num_queued += weight
            if len(self._queue) == 1 or self._num_queued >= self._max_batch:
                self._changed.notify()
        return True

    def samples(self) -> Iterable[Sample]:
        """Return its own metrics."""
        labels = (self.name,)
        yield Sample(m.TELEMETRY_DROPPED, labels, self._num_dropped)
        yield Sample(m.TELEMETRY_LAG, labels, self._num_queued)
        yield Sample(m.TELEMETRY_ERRORS, labels, self._num_failures)
        yield Sample(m.TELEMETRY_CPU, labels, self._cpu_seconds)

    def start(self) -> None:
        """Begin to send. Once."""
        self._thread.start()

    def begin_stop(self) -> None:
        """Refuse what comes from now on and hurry with what is there. Returns at once."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()

    def stop(self, timeout_seconds: float) -> None:
        """Send what is there, waiting at most `timeout_seconds` and a moment; the rest is dropped and counted."""
        self.begin_stop()
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)
        with self._changed:
            self._num_dropped += self._num_queued
            self._num_queued = 0
            self._queue.clear()
        self._close_export()
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)

    # ------------------------------------------------------------ the sender's thread

    def _run(self) -> None:
        while (batch := self._next_batch()) is not None:
            weight = sum(self._weigh(item) for item in batch)
            try:
                is_taken = self._export(batch)
                reason = "" if is_taken else self._why()
                if is_taken:
                    self._on_sent(batch)
            except Exception as error:  # whatever the collector or the encoder makes of it, the next batch may do
                is_taken, reason = False, repr(error)
            if is_taken:
                self._num_sent += weight
            else:
                self._note_failure(weight, reason)
            self._cpu_seconds = time.thread_time()

    def _next_batch(self) -> list[T] | None:
        """Wait for a batch; None when it is time to end."""
        with self._changed:
            while not self._queue:
                if self._is_stopping:
                    return None
                self._changed.wait()
            full_at = time.monotonic() + self._delay_seconds
            while self._num_queued < self._max_batch and not self._is_stopping:
                remaining = full_at - time.monotonic()
                if remaining <= 0:
                    break
                self._changed.wait(remaining)
            return self._take() or None  # `stop` may have thrown everything away

    def _take(self) -> list[T]:
        batch: list[T] = []
        total = 0
        while self._queue and (not batch or total + self._queue[0][0] <= self._max_batch):
            weight, item = self._queue.popleft()
            batch.append(item)
            total += weight
        self._num_queued -= total
        return batch

    def _note_failure(self, weight: int, reason: str) -> None:
        with self._changed:
            self._num_dropped += weight
            self._num_failures += 1
        now = time.monotonic()
        if self._logged is None or now - self._logged >= LOG_SECONDS:
            self._logged = now
            logger.warning(
                "the collector does not take telemetry; serving is not affected",
                subscriber=self.name,
                reason=reason,
                num_dropped=self._num_dropped,
                remedy="check --otlp-endpoint and the collector",
            )
