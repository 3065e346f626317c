"""Recorder and flight recorder as one part of the observatory: one cursor on the log, each event encoded once.

Owns where states come from: the ledger beside it, read at exactly the event where the state is to stand. So neither
the engine is asked nor a second ledger kept. Does not know what happens to what it hands on.

    part = RecorderPart(settings, headers, mirror=lambda: observatory.mirror)
    observatory = Observatory(log, engine, identity, parts=[part])
    ...
    path = part.trigger("admin").result(timeout=5)
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

import msgspec

from kvwatch.errors import ConfigError, ExporterError
from kvwatch.ledger.collector import Follower
from kvwatch.ledger.ledger import Ledger
from kvwatch.ledger.pace import POLL_SECONDS, next_tick
from kvwatch.ledger.view import Sample
from kvwatch.recorder.flight import FlightRecorder, FlightSettings
from kvwatch.recorder.frames import Span
from kvwatch.recorder.header import HeaderSource
from kvwatch.recorder.ring import MAX_RING_BYTES
from kvwatch.recorder.schema import EventEncoder, encodable
from kvwatch.recorder.sink import MAX_OVERSIZE, Chunk, Destination, FileLimits, FileSink, RecorderThread
from kvwatch.recorder.triggers import SLOW_STEP_SECONDS, Triggers
from kvwatch.recorder.writer import RecordingFolder
from kvwatch.telemetry import metrics
from kvwatch.telemetry.schema import Event
from kvwatch.telemetry.snapshot import EngineSnapshot

NAME = "recorder"
FILES_NAME, FLIGHT_NAME = "recorder-files", "recorder-flight"
"""Values of the label `subscriber` for what is lost behind the cursor: by the disk, or by the ring."""

MIN_FILE_BYTES = 16 * 1024
MIN_FLIGHT_BYTES = 256 * 1024
DUMPS_KEPT = 16


class LiveState(Protocol):
    """The mirror beside the recorder; both live on the observatory's thread."""

    @property
    def ledger(self) -> Ledger:
        """The engine's state."""
        ...

    @property
    def num_violations(self) -> int:
        """Steps after which ledger and engine disagreed."""
        ...


class RecorderSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What is recorded where. Checked by `RecorderPart`."""

    stem: str
    """Names the engine in file names; two engines that share a folder need different ones."""
    record_dir: Path | None = None
    """Folder of the recorder's files; none records nothing."""
    record_bytes: int = 2**30
    """Most bytes of all its files."""
    file_bytes: int = 64 * 2**20
    """Bytes after which a new file is begun."""
    flight_dir: Path | None = None
    """Folder of the flight recorder; none for no flight recorder."""
    is_flight_dir_asked_for: bool = True
    """Whether to refuse to start when that folder cannot be used; a default folder is not worth that."""
    flight_bytes: int = 16 * 2**20
    flight_seconds: float = 30.0
    slow_step_seconds: float = SLOW_STEP_SECONDS
    burst: int | None = None
    """Preemptions or allocation failures within ten seconds that make a burst; none for the default."""
    keep_token_ids: bool = False


class RecorderPart:
    """A `Part` of the observatory. Methods belong to its thread unless they say otherwise.

    Args:
        settings: What is recorded where.
        headers: What recordings say of the engine.
        mirror: Returns the ledger beside it; called when the observatory runs.
        thread: Writes files; a new one if none is given.
        take_state: Gives the engine's state at the head of its log, where the ledger does not know all of it.

    Raises:
        ConfigError: sizes that cannot be kept.
    """

    name = NAME
    period_seconds = POLL_SECONDS

    def __init__(
        self,
        settings: RecorderSettings,
        headers: HeaderSource,
        mirror: Callable[[], LiveState],
        thread: RecorderThread | None = None,
        take_state: Callable[[], EngineSnapshot] | None = None,
    ) -> None:
        check_settings(settings)
        self._settings = settings
        self._mirror = mirror
        self._thread = thread or RecorderThread()
        self._files: FileSink | None = None
        self._flight: FlightRecorder | None = None
        if settings.record_dir is not None:
            folder = RecordingFolder(settings.record_dir, settings.stem, settings.record_bytes)
            limits = FileLimits(settings.record_bytes, settings.file_bytes)
            self._files = FileSink(folder, headers.make, limits, self._thread)
        if settings.flight_dir is not None:
            flight = FlightSettings(
                folder=settings.flight_dir,
                stem=settings.stem,
                num_bytes=settings.flight_bytes,
                seconds=settings.flight_seconds,
            )
            dumps = RecordingFolder(
                settings.flight_dir, f"{settings.stem}-flight", DUMPS_KEPT * settings.flight_bytes
            )  # fmt: skip
            self._flight = FlightRecorder(flight, headers, dumps, self._thread)
        self._follower = RecordingFollower(self._files, self._flight, mirror, settings, take_state)
        self._follower.caught_up = self._note_caught_up
        self._has_caught_up = False
        self._asked: deque[tuple[str, Future[Path]]] = deque()
        self._num_violations = 0

    @property
    def follower(self) -> Follower:
        """What events are brought to."""
        return self._follower

    @property
    def ring_path(self) -> Path | None:
        """The flight recorder's ring while there is one. Any thread."""
        return self._flight.path if self._flight else None

    def open(self) -> None:
        """Make folders and ring, and begin to write.

        Raises:
            ExporterError: a folder that was asked for cannot be used.
        """
        check_folders(self._settings)
        if self._flight is not None:
            self._flight.open()
        self._thread.start()

    @property
    def num_waiting_bytes(self) -> int:
        """Bytes that wait for the disk. Any thread."""
        return self._files.num_waiting_bytes if self._files else 0

    def samples(self) -> Iterable[Sample]:
        """Return what was lost behind the cursor. Any thread."""
        for name, sink in ((FILES_NAME, self._files), (FLIGHT_NAME, self._flight)):
            if sink is not None:
                yield Sample(metrics.TELEMETRY_DROPPED, (name,), sink.num_dropped)
                yield Sample(metrics.TELEMETRY_ERRORS, (name,), sink.num_errors)

    def trigger(self, reason: str) -> "Future[Path]":
        """Have the flight recorder written out. Any thread, and signal handlers.

        Returns:
            The path of the file; an `ExporterError` when there is no flight recorder, it was just written out, or the
            disk refused.
        """
        answer: Future[Path] = Future()
        if self._flight is None:
            answer.set_exception(ExporterError("there is no flight recorder; set --flight-dir"))
        else:
            self._asked.append((reason, answer))
        return answer

    def flush(self, timeout_seconds: float = 5.0) -> bool:
        """Have everything written that was recorded; return whether that was done in time. Any thread."""
        done = threading.Event()
        if self._files is not None:
            self._files.flush(done.set)
        else:
            self._thread.put(done.set)
        return done.wait(timeout_seconds)

    async def run(self, stop: asyncio.Event) -> None:
        """Look for what asks for a dump, until `stop` is set, if the log cannot be followed.

        Else that is done when all events are recorded: a dump made before would lack what it was asked for.
        """
        while not stop.is_set():
            if not self._has_caught_up:
                self.poll()
            self._has_caught_up = False
            await next_tick()

    def _note_caught_up(self) -> None:
        self._has_caught_up = True
        self.poll()

    def poll(self) -> None:
        """Do what was asked for, and look whether ledger and engine still agree."""
        if self._flight is None:
            return
        num_violations = self._mirror().num_violations
        if num_violations > self._num_violations:
            self._flight.dump("ledger-violation")
        self._num_violations = num_violations
        while self._asked:
            reason, answer = self._asked.popleft()
            self._flight.dump(reason, was_asked_for=True, answer=answer)

    def close(self) -> None:
        """Finish the files; bounded in time."""
        self.poll()
        if self._files is not None:
            self._files.close()
        self._thread.stop()
        if self._flight is not None:
            self._flight.close()


class RecordingFollower:
    """Encodes each event once and hands it to all destinations, with states where they want them."""

    def __init__(
        self,
        files: FileSink | None,
        flight: FlightRecorder | None,
        mirror: Callable[[], LiveState],
        settings: RecorderSettings,
        take_state: Callable[[], EngineSnapshot] | None = None,
    ) -> None:
        self._take_whole_state = take_state
        self._destinations: list[Destination] = [each for each in (files, flight) if each is not None]
        self._flight = flight
        self._mirror = mirror
        self._encoder = EventEncoder(keep_token_ids=settings.keep_token_ids)
        self._triggers = Triggers(settings.slow_step_seconds, settings.burst)
        self.caught_up: Callable[[], None] = lambda: None
        """Called whenever everything that is known is recorded."""
        self._next_seq: int | None = None
        """Number of the next event to record; none before the first state."""
        self._pending: EngineSnapshot | None = None
        """A state of the ledger, which may be ahead of the recorder."""

    def load(self, snapshot: EngineSnapshot) -> None:
        """Begin anew from the engine's own state; the gap before it, if there is one, is noted by the destinations."""
        self._next_seq = snapshot.seq
        self._pending = None
        state = _encode_state(snapshot)
        for each in self._destinations:
            each.put_state(state)

    def apply(self, events: Sequence[Event]) -> None:
        """Record events."""
        if not events:
            return
        self._take_state()
        pending = self._pending
        if pending is not None and events[0].seq <= pending.seq <= events[-1].seq:
            place = pending.seq - events[0].seq
            self._record(events[:place])
            self._put_state(pending)
            events = events[place:]
        self._record(events)
        reason = self._triggers.look(events) if self._flight else None
        if reason is not None and self._flight is not None:
            self._flight.dump(reason)

    def settle(self) -> None:
        """Give an idle engine's state to whoever wants it."""
        self._take_state()
        if self._pending is not None and self._pending.seq == self._next_seq:
            self._put_state(self._pending)
        self.caught_up()

    def publish(self) -> None:
        """Nothing more will come; `RecorderPart.close` finishes the files."""

    def _record(self, events: Sequence[Event]) -> None:
        if not events:
            return
        first, last = events[0], events[-1]
        span = Span(first.seq, last.seq + 1, first.step, last.step, first.time_ns, last.time_ns)
        chunk = Chunk(self._encoder.encode(events), span)
        for each in self._destinations:
            each.put_events(chunk)
        self._next_seq = last.seq + 1

    def _take_state(self) -> None:
        """Read the ledger if somebody wants a state and the ledger is not behind the recorder."""
        next_seq = self._next_seq
        assert next_seq is not None, "events without a snapshot"
        if self._pending is not None and self._pending.seq >= next_seq:
            return
        self._pending = None
        if any(each.wants_state for each in self._destinations):
            ledger = self._mirror().ledger
            if ledger.is_loaded and ledger.next_seq >= next_seq:
                started = time.perf_counter()
                self._pending = ledger.to_snapshot() if self._take_whole_state is None else self._take_whole_state()
                if self._flight is not None:
                    self._flight.note_state_cost(time.perf_counter() - started)

    def _put_state(self, snapshot: EngineSnapshot) -> None:
        self._pending = None
        wanting = [each for each in self._destinations if each.wants_state]
        if wanting:
            state = _encode_state(snapshot)
            for each in wanting:
                each.put_state(state)


def _encode_state(snapshot: EngineSnapshot) -> Chunk:
    seq, step, time_ns = snapshot.seq, snapshot.step, snapshot.time_ns
    try:
        raw = msgspec.msgpack.encode(snapshot)
    except UnicodeEncodeError:
        raw = msgspec.msgpack.encode(encodable(msgspec.to_builtins(snapshot, builtin_types=(bytes,))))
    return Chunk(raw, Span(seq, seq, step, step, time_ns, time_ns))


def check_settings(settings: RecorderSettings) -> None:
    """Check sizes against each other.

    Raises:
        ConfigError: they cannot be kept.
    """
    if settings.file_bytes < MIN_FILE_BYTES:
        raise ConfigError(
            f"--record-file-bytes {settings.file_bytes} is too small; it must be at least {MIN_FILE_BYTES}"
        )
    if settings.record_bytes < 2 * MAX_OVERSIZE * settings.file_bytes:
        raise ConfigError(
            f"--record-bytes {settings.record_bytes} is less than {2 * MAX_OVERSIZE} files of --record-file-bytes "
            f"{settings.file_bytes}; raise one or lower the other"
        )
    if not MIN_FLIGHT_BYTES <= settings.flight_bytes <= MAX_RING_BYTES:
        raise ConfigError(
            f"--flight-bytes {settings.flight_bytes} is out of range; it must be between {MIN_FLIGHT_BYTES} and "
            f"{MAX_RING_BYTES}"
        )


def check_folders(settings: RecorderSettings) -> None:
    """Make the folders that were asked for and try to write there.

    Raises:
        ExporterError: one cannot be used.
    """
    if settings.record_dir is not None:
        _try_folder(settings.record_dir, "--record-dir")
    if settings.flight_dir is not None and settings.is_flight_dir_asked_for:
        _try_folder(settings.flight_dir, "--flight-dir")


def _try_folder(folder: Path, flag: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".kvwatch-{time.time_ns()}"
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise ExporterError(
            f"folder {folder} cannot be written to ({error.strerror}); change {flag} or its permissions"
        ) from error
