"""The recorder's files: what the observatory's thread hands over is compressed and written by another thread.

Owns rotation, the bounded queue between the two threads, and what happens when the disk is full, slow or gone: events
are dropped and counted, a gap is noted, and recording goes on from a state (`wants_state`) once it works again. Does
not know where states come from.

Each file begins with a state and so stands alone. Further states are put into a file now and then, so that its end can
be reached without replaying all of it.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec
import structlog

from kvwatch.errors import RecordingError
from kvwatch.recorder.frames import FrameKind, Span
from kvwatch.recorder.header import RecordingHeader
from kvwatch.recorder.writer import RecordingFolder, RecordingWriter

MAX_OVERSIZE = 2
"""A file is closed when it is so many times as large as it should be and no state could be had for the next one."""

QUEUE_BYTES = 32 * 2**20
"""Bytes that may wait for the disk; what comes beyond is dropped."""

FRAME_BYTES = 256 * 1024
"""Events are collected into frames of this size (less in small files) before they are compressed ..."""

FLUSH_SECONDS = 1.0
"""... unless they have waited for so long."""

WAKE_SECONDS = 1.0
"""Events wait so long for the writing thread: waking it for each batch would take the interpreter from the engine."""

STATE_EVERY_BYTES = 8 * 2**20
"""Bytes of events after which a file gets another state, or ten times the state's own size if that is more."""

RETRY_SECONDS = 5.0
"""Pause after the disk failed."""

LOG_SECONDS = 60.0
"""At most one failure is logged in this time; all are counted."""

STOP_SECONDS = 3.0

logger = structlog.get_logger(__name__)


class Chunk(msgspec.Struct, frozen=True):
    """Encoded events, or an encoded state."""

    raw: bytes
    span: Span


class Destination(Protocol):
    """Something that states and events are recorded in. All calls come from the observatory's thread."""

    @property
    def wants_state(self) -> bool:
        """Whether a state is needed before what comes next, or would do good."""
        ...

    def put_state(self, state: Chunk) -> None:
        """Take the state before the events that come next."""
        ...

    def put_events(self, events: Chunk) -> None:
        """Take events; they continue the last ones, unless a state came between."""
        ...


class RecorderThread:
    """A thread that does jobs in order and calls `tick` at least every `FLUSH_SECONDS`. Jobs must not raise.

    It wakes up for jobs that somebody waits for; the others it finds when it wakes up.
    """

    def __init__(self) -> None:
        self._jobs: deque[Callable[[], None]] = deque()
        self._has_urgent_job = threading.Event()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="kvwatch-recorder", daemon=True)
        self.tick: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def put(self, job: Callable[[], None], *, is_urgent: bool = True) -> None:
        """Have a job done: at once, or within `WAKE_SECONDS`. Any thread."""
        self._jobs.append(job)
        if is_urgent:
            self._has_urgent_job.set()

    def stop(self, timeout_seconds: float = STOP_SECONDS) -> None:
        """Do what was put, then end; wait at most so long. Safe without `start`."""
        self._is_stopping = True
        self._has_urgent_job.set()
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)
            if self._thread.is_alive():
                logger.warning("the recorder's disk does not answer; its last events are lost")

    def _run(self) -> None:
        is_last_round = False
        while not is_last_round:
            self._has_urgent_job.wait(WAKE_SECONDS)
            self._has_urgent_job.clear()
            is_last_round = self._is_stopping  # read first: what was put before `stop` is done in this round
            while self._jobs:
                self._do(self._jobs.popleft())
            self._do(self.tick)

    def _do(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:  # a job that does so is a defect; the others must still be done
            logger.exception("a job of the recorder failed; the engine is not affected", error=repr(error))


@dataclass(frozen=True, slots=True)
class FileLimits:
    """How much may be on disk."""

    total_bytes: int
    file_bytes: int


class FileSink:
    """Records into rotating files. Methods belong to the observatory's thread unless they say otherwise.

    Args:
        folder: Where files go.
        make_header: Makes the header of a file.
        limits: File and folder sizes; a file may be larger by what comes until a state is had, at most twice as large.
        thread: Writes.
        now: Seconds from any zero.
    """

    def __init__(
        self,
        folder: RecordingFolder,
        make_header: Callable[[], RecordingHeader],
        limits: FileLimits,
        thread: RecorderThread,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._make_header = make_header
        self._limits = limits
        self._frame_bytes = min(FRAME_BYTES, limits.file_bytes // 4)
        self._state_every_bytes = min(STATE_EVERY_BYTES, limits.file_bytes)
        self._thread = thread
        self._now = now
        thread.tick = self._flush_if_old
        # The observatory's thread:
        self._bytes_put = 0
        self._bytes_since_state = 0
        self._state_bytes = 0
        self._num_states_put = 0
        self._is_dropping = False
        self._num_refused = 0
        # The writing thread; the other one only reads:
        self._bytes_done = 0
        self._num_states_done = 0
        self._file: RecordingWriter | None = None
        self._buffer: list[Chunk] = []
        self._buffer_bytes = 0
        self._buffered_at = 0.0
        self._end_seq: int | None = None
        self._retry_at = 0.0
        self._logged_at: float | None = None
        self._num_lost = 0
        self.num_errors = 0
        """Times that the disk failed. Any thread may read it."""

    @property
    def num_dropped(self) -> int:
        """Events that are in no file. Any thread may read it."""
        return self._num_refused + self._num_lost

    @property
    def wants_state(self) -> bool:
        """Whether the next file, or a long file, needs a state."""
        if self._num_states_put != self._num_states_done:
            return False
        file = self._file
        if file is None or self._is_dropping:
            return self._now() >= self._retry_at and self.num_waiting_bytes < QUEUE_BYTES // 2
        interval = max(self._state_every_bytes, 10 * self._state_bytes)
        return file.size >= self._limits.file_bytes or self._bytes_since_state >= interval

    def put_state(self, state: Chunk) -> None:
        """Take a state; it opens a file if none is open or the open one is full. Put off if the disk is too slow."""
        self._is_dropping = self.num_waiting_bytes > QUEUE_BYTES
        if self._is_dropping:
            return
        self._num_states_put += 1
        self._bytes_since_state, self._state_bytes = 0, len(state.raw)
        self._bytes_put += len(state.raw)
        self._thread.put(lambda: self._write_state(state))

    def put_events(self, events: Chunk) -> None:
        """Take events; dropped if the disk is too slow for them."""
        if self._is_dropping or self.num_waiting_bytes + len(events.raw) > QUEUE_BYTES:
            self._is_dropping = True
            self._num_refused += events.span.num_events
            return
        self._bytes_put += len(events.raw)
        self._bytes_since_state += len(events.raw)
        self._thread.put(lambda: self._write_events(events), is_urgent=self.num_waiting_bytes > self._frame_bytes)

    def flush(self, done: Callable[[], None]) -> None:
        """Have everything that was put written, and `done` called then. Any thread."""
        self._thread.put(self._flush)
        self._thread.put(done)

    def close(self) -> None:
        """Have the last file finished. The caller then stops the thread."""
        self._thread.put(self._finish)

    @property
    def num_waiting_bytes(self) -> int:
        """Bytes that wait for the disk. Any thread may read it."""
        return self._bytes_put - self._bytes_done

    # ------------------------------------------------------------ the writing thread

    def _write_events(self, events: Chunk) -> None:
        self._bytes_done += len(events.raw)
        if self._file is None:
            self._num_lost += events.span.num_events
            return
        if not self._buffer:
            self._buffered_at = self._now()
        self._buffer.append(events)
        self._buffer_bytes += len(events.raw)
        if self._buffer_bytes >= self._frame_bytes:
            self._flush()

    def _flush_if_old(self) -> None:
        if self._buffer and self._now() - self._buffered_at >= FLUSH_SECONDS:
            self._flush()

    def _flush(self) -> None:
        chunks, self._buffer, self._buffer_bytes = self._buffer, [], 0
        if not chunks:
            return
        span = chunks[0].span.joined(chunks[-1].span)
        file = self._file
        try:
            if file is None:
                self._num_lost += span.num_events
                return
            file.append(FrameKind.EVENTS, b"".join(chunk.raw for chunk in chunks), span)
            self._end_seq = span.end_seq
            if file.size >= MAX_OVERSIZE * self._limits.file_bytes:  # no state can be had to begin the next one with
                self._close_file()
        except (OSError, RecordingError) as error:
            self._num_lost += span.num_events
            self._fail(error)

    def _write_state(self, state: Chunk) -> None:
        self._bytes_done += len(state.raw)
        try:
            self._flush()
            file = self._file
            if file is not None and file.size >= self._limits.file_bytes:
                self._close_file()
                file = None
            if file is None:
                file = self._open_file(len(state.raw))
            if self._end_seq is not None and state.span.first_seq > self._end_seq:
                span = state.span
                gap = Span(self._end_seq, span.first_seq, span.first_step, span.last_step, span.first_ns, span.last_ns)
                file.append(FrameKind.GAP, b"", gap)
            file.append(FrameKind.STATE, state.raw, state.span)
            self._end_seq = state.span.end_seq
        except (OSError, RecordingError) as error:
            self._fail(error)
        finally:
            self._num_states_done += 1

    def _open_file(self, state_bytes: int) -> RecordingWriter:
        self._folder.make_room(MAX_OVERSIZE * max(self._limits.file_bytes, state_bytes))
        self._file = RecordingWriter(self._folder.new_path(), self._make_header())
        return self._file

    def _close_file(self) -> None:
        file = self._file
        if file is not None:
            file.finish()
        self._file = None

    def _finish(self) -> None:
        self._flush()
        try:
            self._close_file()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.num_errors += 1
        file, self._file = self._file, None
        if file is not None:
            file.abandon()
        now = self._now()
        self._retry_at = now + RETRY_SECONDS
        if self._logged_at is None or now - self._logged_at >= LOG_SECONDS:
            self._logged_at = now
            logger.warning(
                "the recorder cannot write; events are lost until it can, serving is not affected",
                folder=str(self._folder.folder),
                error=getattr(error, "strerror", None) or str(error),
                num_errors=self.num_errors,
                num_dropped=self.num_dropped,
            )
