"""The thread that moves blocks: one job after the other, in batches through contiguous staging memory.

Knows stores and keys, not blocks' owners. The engine thread submits jobs and collects the ended ones; it never waits.
A job whose batch takes long cannot be interrupted, but no further batch is begun once it was cancelled.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import structlog

from kvwatch_engine.memory.tiers.stores import BlockStore, Bytes, TransferError

_STOP_SECONDS: Final = 5.0
"""How long `stop` waits for a batch that is being moved."""

logger = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class Job:
    """Blocks `source_keys` of one store to be copied over blocks `target_keys` of another.

    Written by the worker until `ended_ns` is set, read by the engine thread afterwards; only `is_cancelled` is set by
    the engine thread meanwhile.
    """

    source: BlockStore[Any]
    source_keys: Sequence[Any]
    target: BlockStore[Any]
    target_keys: Sequence[Any]
    is_limited: bool = True
    """Whether it goes over the link to the device, whose bandwidth may be limited."""
    prepare: Callable[[], None] | None = None
    """Done before the first block is moved, whether or not the job was cancelled."""
    is_cancelled: bool = False
    num_done: int = 0
    """Leading blocks that arrived."""
    reason: str = ""
    """Why the rest did not; empty if all arrived."""
    error: str = ""
    """Class of the exception behind it."""
    started_ns: int = 0
    ended_ns: int = 0

    @property
    def duration_ns(self) -> int:
        """Time that moving took."""
        return self.ended_ns - self.started_ns


@dataclass(slots=True)
class Link:
    """The way to the device, which may be made as slow as another one would be."""

    bytes_per_second: float | None = None
    stopping: threading.Event = field(default_factory=threading.Event)

    def delay(self, num_bytes: int, seconds: float) -> None:
        """Wait until moving so many bytes has taken as long as it must; `seconds` it took already."""
        if self.bytes_per_second is not None:
            missing = num_bytes / self.bytes_per_second - seconds
            if missing > 0:
                self.stopping.wait(missing)


class Mover:
    """Carries out one job after the other, on whatever thread calls it."""

    def __init__(self, staging: Bytes, bytes_per_second: float | None = None) -> None:
        """Move through `staging`, uint8[blocks in a batch, block_bytes], which nobody else uses.

        Args:
            staging: memory that batches go through.
            bytes_per_second: limit of the link to the device; none for what the machine can do.
        """
        self._staging = staging
        self.link = Link(bytes_per_second)

    def carry_out(self, job: Job) -> None:
        """Move a job's blocks and note how it went. Does not raise."""
        job.started_ns = time.monotonic_ns()
        try:
            self._move(job)
        except TransferError as failure:
            job.reason = failure.reason
            job.error = type(failure.error).__name__ if failure.error is not None else ""
        except Exception as error:  # whatever a store raises ends this job, not the thread
            job.reason, job.error = "copy", type(error).__name__
        job.ended_ns = time.monotonic_ns()

    def _move(self, job: Job) -> None:
        if job.prepare is not None:
            job.prepare()
        batch = len(self._staging)
        for first in range(0, len(job.source_keys), batch):
            if job.is_cancelled or self.link.stopping.is_set():
                raise TransferError("dropped" if job.is_cancelled else "stopped")
            begun = time.monotonic()
            self._move_batch(job, first, first + batch)
            if job.is_limited:
                num_bytes = (job.num_done - first) * self._staging.shape[1]
                self.link.delay(num_bytes, time.monotonic() - begun)

    def _move_batch(self, job: Job, first: int, end: int) -> None:
        """Move one batch; after a failed read, what could be read before it."""
        keys = job.source_keys[first:end]
        staged = self._staging[: len(keys)]
        failure: TransferError | None = None
        try:
            job.source.read(keys, staged)
        except TransferError as error:
            failure, staged = error, staged[: error.num_good]
        if len(staged):
            try:
                job.target.write(job.target_keys[first : first + len(staged)], staged)
            except TransferError as error:
                job.num_done += error.num_good
                raise
        job.num_done += len(staged)
        if failure is not None:
            raise failure


class Worker(Protocol):
    """Carries out jobs in the order in which they were submitted. All methods belong to the engine thread."""

    def submit(self, job: Job) -> None:
        """Let a job be carried out after all that were submitted before."""
        ...

    def take_ended(self) -> list[Job]:
        """Return the jobs that have ended since the last call, in that order."""
        ...

    def wait(self, seconds: float) -> bool:
        """Sleep until a job has ended that was not taken yet, at most so long; return whether one has."""
        ...

    def stop(self) -> None:
        """Begin nothing more and end; safe to call twice."""
        ...


class TransferWorker:
    """A worker with a thread of its own."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._jobs: deque[Job] = deque()
        self._ended: deque[Job] = deque()
        self._num_jobs = threading.Semaphore(0)
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvwatch-transfer", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Let a job be carried out after all that were submitted before."""
        self._jobs.append(job)
        self._num_jobs.release()

    def take_ended(self) -> list[Job]:
        """Return the jobs that have ended since the last call, in that order."""
        self._has_ended.clear()
        ended: list[Job] = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def wait(self, seconds: float) -> bool:
        """Sleep until a job has ended that was not taken yet, at most so long; return whether one has."""
        return self._has_ended.wait(seconds)

    def stop(self) -> None:
        """End the thread after the batch that it moves; safe to call twice."""
        self._mover.link.stopping.set()
        self._num_jobs.release()
        self._thread.join(_STOP_SECONDS)
        if self._thread.is_alive():
            logger.warning("a transfer is stuck and was left behind", seconds=_STOP_SECONDS)

    def _run(self) -> None:
        while True:
            self._num_jobs.acquire()
            if self._mover.link.stopping.is_set():
                return
            job = self._jobs.popleft()
            self._mover.carry_out(job)
            self._ended.append(job)
            self._has_ended.set()
