"""The flight recorder: the last seconds in a ring that outlives the process, written out when something happens.

Owns the ring, when it wants a state, and the rate at which it is written out. What is worth writing out is decided by
`triggers.py` and by whoever calls `trigger`.

A ring can only be replayed from a state on. So states are put into it again and again: after a quarter of the ring or
a third of the time it is to hold, but so seldom that making them takes at most a two-hundredth of the time.
"""

import errno
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import msgspec
import structlog

from kvwatch.errors import ExporterError, RecordingError
from kvwatch.recorder.frames import FrameKind, Span, open_body
from kvwatch.recorder.header import HeaderSource
from kvwatch.recorder.ring import FlightRing, Slot, read_ring, remove_old_rings, ring_path
from kvwatch.recorder.sink import LOG_SECONDS, Chunk, RecorderThread
from kvwatch.recorder.writer import RecordingFolder, RecordingWriter

AUTOMATIC_DUMP_SECONDS = 60.0
"""At most one dump in this time for what was noticed; more would tell the same story."""

ASKED_DUMP_SECONDS = 1.0
"""At most one dump in this time for what people ask for."""

RETRY_SECONDS = 60.0
"""Pause after a ring could not be made."""

LOOK_SECONDS = 1.0
"""How often to look whether the ring's file is still there."""

STATE_COST_RATIO = 200
"""States are at least so many times as far apart as making one takes."""

NS_PER_SECOND = 1_000_000_000

SILENCE_PART = 10
"""A time without events, however long, takes at most a tenth of the seconds that a dump goes back to."""

logger = structlog.get_logger(__name__)


class FlightSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a flight recorder is told."""

    folder: Path
    stem: str
    """Names the engine in file names."""
    num_bytes: int
    seconds: float
    """What a dump goes back to, if the ring holds as much."""


class FlightRecorder:
    """Records into a ring. Methods belong to the observatory's thread unless they say otherwise.

    Args:
        settings: Where, how much.
        headers: Makes the headers of ring and dumps.
        dumps: Where dumps go.
        thread: Writes them.
        now: Seconds from any zero.
    """

    def __init__(
        self,
        settings: FlightSettings,
        headers: HeaderSource,
        dumps: RecordingFolder,
        thread: RecorderThread,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._headers = headers
        self._dumps = dumps
        self._thread = thread
        self._now = now
        self._ring: FlightRing | None = None
        self._retry_at = 0.0
        self._look_at = 0.0
        self._bytes_since_state = 0
        self._state_at: float | None = None
        self._state_seconds = 0.0
        self._needs_state = True
        self._dumped_at: dict[bool, float] = {}
        self._logged_at: float | None = None
        self.num_errors = 0
        """Rings and dumps that could not be written. Any thread may read it."""
        self.num_dropped = 0
        """Events that are not in the ring since there is none, or since they are too large. Any thread may read it."""
        self.num_dumps = 0
        """Files written. Any thread may read it."""

    @property
    def path(self) -> Path | None:
        """The ring's file while there is one."""
        return self._ring.path if self._ring else None

    def open(self) -> bool:
        """Make the ring; return whether it could be made. Tried again later if not."""
        settings = self._settings
        try:
            settings.folder.mkdir(parents=True, exist_ok=True)
            remove_old_rings(settings.folder, settings.stem)
            path = ring_path(settings.folder, settings.stem)
            self._ring = FlightRing(path, settings.num_bytes, self._headers.make())
        except OSError as error:
            self._retry_at = self._now() + RETRY_SECONDS
            self._count_error("the flight recorder has no ring; serving is not affected", error)
            return False
        self._needs_state = True
        return True

    def close(self) -> None:
        """Leave the ring as it is: it says what came before the end."""
        if self._ring is not None:
            self._ring.close()

    @property
    def wants_state(self) -> bool:
        """Whether the ring needs a state. Tries to make a ring if there is none."""
        self._let_go_of_a_spoiled_ring()
        ring = self._ring
        if ring is None:
            return self._now() >= self._retry_at and self.open()
        if self._needs_state or self._state_at is None:
            return True
        age = self._now() - self._state_at
        is_old = self._bytes_since_state > 0 and age >= self._settings.seconds / 3  # not while the engine is idle
        is_due = is_old or self._bytes_since_state >= ring.area_bytes // 4
        return is_due and age >= STATE_COST_RATIO * self._state_seconds

    def _let_go_of_a_spoiled_ring(self) -> None:
        """Notice now and then that somebody removed the ring's file or cut it: what goes there would be of no use."""
        now = self._now()
        if self._ring is None or now < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        try:
            if self._ring.is_removed:
                self._let_go(FileNotFoundError(errno.ENOENT, "the file was removed"))
            elif self._ring.is_spoiled:
                self._let_go(OSError(errno.EIO, "somebody else cut the file short or wrote into it"))
        except OSError as error:
            self._let_go(error)

    def _let_go(self, error: OSError) -> None:
        if self._ring is not None:
            self._ring.close()
            self._ring = None
        self._count_error("the flight recorder's ring is made anew; what it held is lost", error)

    def note_state_cost(self, seconds: float) -> None:
        """Be told how long it took to make the state that is put next."""
        self._state_seconds = seconds

    def put_state(self, state: Chunk) -> None:
        """Take a state."""
        ring = self._ring
        if ring is None:
            return
        span = state.span
        if ring.end_seq is not None and span.first_seq > ring.end_seq:
            gap = Span(ring.end_seq, span.first_seq, span.first_step, span.last_step, span.first_ns, span.last_ns)
            self._write(ring, FrameKind.GAP, Chunk(b"", gap))
        self._state_at, self._bytes_since_state, self._needs_state = self._now(), 0, False
        if not self._write(ring, FrameKind.STATE, state) and self._ring is ring:
            ring.end_seq = span.end_seq
            self._count_error(
                "the flight recorder's ring is too small for the engine's state: blocks cannot be rebuilt from it",
                RecordingError(f"raise --flight-bytes to at least {4 * len(state.raw)}"),
            )

    def put_events(self, events: Chunk) -> None:
        """Take events."""
        ring = self._ring
        written = self._write(ring, FrameKind.EVENTS, events) if ring and not self._needs_state else 0
        if written:
            self._bytes_since_state += written
        else:
            self.num_dropped += events.span.num_events
            self._needs_state = True

    def _write(self, ring: FlightRing, kind: FrameKind, chunk: Chunk) -> int:
        """Write a frame; return its size, 0 when it is too large or the disk refused, which costs the ring."""
        if ring is not self._ring:
            return 0  # the disk has just refused
        try:
            return ring.write(kind, chunk.raw, chunk.span)
        except OSError as error:
            self._let_go(error)
            self._retry_at = self._now() + RETRY_SECONDS
            return 0

    # ------------------------------------------------------------ writing it out

    def dump(self, reason: str, *, was_asked_for: bool = False, answer: "Future[Path] | None" = None) -> None:
        """Have the last seconds written to a recording of their own, unless that was just done.

        Args:
            reason: Goes into the file's header and name.
            was_asked_for: Whether somebody waits for it; then it may be done more often.
            answer: Is given the file's path, or an `ExporterError`.
        """
        answer = answer or Future()
        limit = ASKED_DUMP_SECONDS if was_asked_for else AUTOMATIC_DUMP_SECONDS
        now, last = self._now(), self._dumped_at.get(was_asked_for)
        if self._ring is None:
            answer.set_exception(ExporterError("the flight recorder has no ring; look at the log, check --flight-dir"))
        elif last is not None and now - last < limit:
            answer.set_exception(ExporterError(f"the flight recorder was just written out; wait {limit:g} s"))
        else:
            self._dumped_at[was_asked_for] = now
            try:
                image = self._ring.image()
            except OSError as error:
                answer.set_exception(ExporterError(f"the flight recorder's ring cannot be read ({error})"))
            else:
                self._thread.put(partial(self._write_out, image, reason, answer))

    def _write_out(self, image: bytes, reason: str, answer: "Future[Path]") -> None:
        """Write a recording from a copy of the ring. The recorder's thread."""
        try:
            _, slots = read_ring(image)
            kept = slots[_first_kept(slots, round(self._settings.seconds * NS_PER_SECOND)) :]
            self._dumps.make_room(len(image))
            path, header = self._dumps.new_path(reason), self._headers.make(reason)
            writer = RecordingWriter(path, header, is_shown_when_finished=True)
            try:
                for slot in kept:
                    frame = image[slot.offset : slot.offset + slot.info.size]
                    writer.append(slot.info.kind, open_body(frame, slot.info), slot.info.span)
                writer.finish()
            except BaseException:
                writer.abandon()
                raise
        except (OSError, RecordingError) as error:
            self._count_error("the flight recorder could not be written out", error)
            answer.set_exception(ExporterError(f"the flight recorder could not be written out ({error})"))
            return
        self.num_dumps += 1
        logger.info("the flight recorder was written out", reason=reason, file=str(writer.path))
        answer.set_result(writer.path)

    def _count_error(self, message: str, error: Exception) -> None:
        self.num_errors += 1
        now = self._now()
        if self._logged_at is None or now - self._logged_at >= LOG_SECONDS:
            self._logged_at = now
            shown = getattr(error, "strerror", None) or str(error)
            logger.warning(message, folder=str(self._settings.folder), error=shown, num_errors=self.num_errors)


def _first_kept(slots: list[Slot], reach_ns: int) -> int:
    """Return the place of the last state that is at least `reach_ns` old, else of the first state, else 0.

    A silence counts for a `SILENCE_PART` of that at most: what led to a stall is what a dump is wanted for.
    """
    silence_ns = reach_ns // SILENCE_PART
    age_ns, first = 0, 0
    newer_ns = slots[-1].info.span.last_ns if slots else 0
    for place in reversed(range(len(slots))):
        span = slots[place].info.span
        age_ns += min(newer_ns - span.last_ns, silence_ns)
        if slots[place].info.kind is FrameKind.STATE:
            first = place
            if age_ns >= reach_ns:
                break
        age_ns += min(span.last_ns - span.first_ns, silence_ns)
        newer_ns = span.first_ns
    return first
