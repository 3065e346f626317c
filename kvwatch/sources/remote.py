"""The source that reads a remote kvwatch engine over its event stream.

    engine ──Subscribe──► reader thread ──events, unchanged──► log ──► the sidecar's ledger, recorder, stream ...
                               └────────► state at the log's head, for snapshots

What the engine's own observatory counts is counted here in the same way from the same events. After a lost connection
the stream goes on where it was; what the engine has forgotten meanwhile, or a restart, is a gap in the log that every
follower heals from a snapshot, as it would in the engine's process.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable

import structlog

from kvwatch.errors import ControlError
from kvwatch.ledger.view import HistogramSample, Sample
from kvwatch.sources.engines import SETTING, EngineSpec
from kvwatch.sources.remote_control import RemoteControl
from kvwatch.sources.remote_state import RemoteState
from kvwatch.sources.source import Rank
from kvwatch.stream.client import EventBatch, Interrupted, Item, Stream, TelemetryClient
from kvwatch.stream.contract import Gap, Started, SubscribeRequest
from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.snapshot import EngineSnapshot

FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.5, 5.0
"""Pauses after a refusal, doubled from the first to the last: the token's file may be mended meanwhile."""

LOG_SECONDS = 60.0
"""At most one line about a missing engine in this time."""

JOIN_SECONDS = 2.0

logger = structlog.get_logger(__name__)


class RemoteSource:
    """One kvwatch engine. `run` on the observatory's loop; what it tells may be read on any thread.

    Args:
        spec: Where it is, and how it is reached.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._control = RemoteControl(spec)
        self._state: RemoteState | None = None
        self._labels: dict[str, str] = {}
        self._is_stopping = threading.Event()
        self._stream: Stream | None = None
        self._logged: float | None = None
        self._num_gaps = 0
        self._num_resets = 0
        self._num_errors = 0
        self._epoch = ""
        self._used_credentials: tuple[str | None, bytes | None] = (None, None)
        self.next_seq: int | None = None
        """Number, as the engine counts, of the next event that is to come; none to begin with a snapshot."""
        self._last_event_ns: int | None = None
        self.is_up = False
        """Whether events come in."""

    @property
    def name(self) -> str:
        """The name that the sidecar was given."""
        return self._spec.name

    @property
    def model_name(self) -> str:
        """Name of the model, as the engine tells it."""
        return self._labels.get("model_name", "")

    async def run(self, stop: asyncio.Event, on_rank: Callable[[Rank], None]) -> None:
        """Read until `stop` is set; tell the rank as soon as its state is known."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def tell(rank: Rank) -> None:
            loop.call_soon_threadsafe(on_rank, rank)

        def read() -> None:
            try:
                self._read(tell)
            finally:
                with contextlib.suppress(RuntimeError):  # the loop was not willing to wait for this
                    loop.call_soon_threadsafe(ended.set)

        thread = threading.Thread(target=read, name=f"kvwatch-source-{self.name}", daemon=True)
        thread.start()
        await stop.wait()
        self._is_stopping.set()
        stream = self._stream
        if stream is not None:
            stream.cancel()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), JOIN_SECONDS)
        self._control.close()

    def samples(self) -> Iterable[Sample | HistogramSample]:
        """Return how reading goes. Any thread."""
        is_whole = self.is_up and self._state is not None
        yield Sample(m.SOURCE_UP, (), self.is_up)
        yield Sample(m.SOURCE_COMPLETE, (), is_whole)
        yield Sample(m.SOURCE_GAPS, (), self._num_gaps)
        yield Sample(m.SOURCE_RESETS, (), self._num_resets)
        yield Sample(m.SOURCE_DECODE_ERRORS, ("event",), self._num_errors)
        if self._last_event_ns is not None:
            yield Sample(m.SOURCE_LAST_EVENT_TIMESTAMP, (), self._last_event_ns / 1e9)
        if self._state is not None:
            yield from self._state.insight.samples()

    # ------------------------------------------------------------ the reader's thread

    def _read(self, tell: Callable[[Rank], None]) -> None:
        pause = FIRST_RETRY_SECONDS
        while not self._is_stopping.is_set():
            try:
                with self._connect() as client:
                    stream = self._stream = client.subscribe(self._request(), is_resuming=True)
                    if self._is_stopping.is_set():
                        return
                    for item in stream:
                        self._take(item, tell)
                        if self.is_up:
                            pause = FIRST_RETRY_SECONDS
                        elif isinstance(item, Interrupted) and self._credentials() != self._used_credentials:
                            break  # the stream would try again with what it has
            except Exception as error:  # a source reads on for ever, whatever comes
                self._complain(error)
            self.is_up = False
            self._is_stopping.wait(pause)
            pause = min(2 * pause, MAX_RETRY_SECONDS)

    def _connect(self) -> TelemetryClient:
        token, certificates = self._used_credentials = self._credentials()
        return TelemetryClient(self._spec.url, token=token, root_certificates=certificates)

    def _credentials(self) -> tuple[str | None, bytes | None]:
        """Return token and certificates as their files say now."""
        return self._spec.token(), self._spec.ca()

    def _request(self) -> SubscribeRequest:
        return SubscribeRequest(
            epoch=self._epoch if self.next_seq is not None else "",
            seq=self.next_seq,
            from_snapshot=self.next_seq is None,
            with_token_ids=self._spec.token_ids,
        )

    def _take(self, item: Item, tell: Callable[[Rank], None]) -> None:
        if isinstance(item, EventBatch):
            self._take_events(item)
        elif isinstance(item, EngineSnapshot):
            self._take_snapshot(item, tell)
        elif isinstance(item, Started):
            self._take_started(item)
        elif isinstance(item, Gap):
            self._num_gaps += 1
        else:
            assert isinstance(item, Interrupted)
            self.is_up = False
            self._complain(item.reason)

    def _take_started(self, started: Started) -> None:
        is_new = started.epoch != self._epoch
        if is_new and self._epoch:
            self._num_resets += 1
            logger.info("the engine was started anew", engine=self.name)
        if is_new and self._state is not None:
            self._state.restarted(started.wall_offset_ns)
        elif is_new:
            self._state = RemoteState(started.wall_offset_ns)
        self._epoch, self._labels = started.epoch, started.labels
        if is_new:
            self.next_seq = None  # until its snapshot has come
        self.is_up = self.next_seq is not None

    def _take_snapshot(self, snapshot: EngineSnapshot, tell: Callable[[Rank], None]) -> None:
        state = self._state
        assert state is not None, "a snapshot before the beginning"
        if snapshot.is_foreign:
            raise ControlError("this is a sidecar that watches a foreign engine; give this sidecar that engine itself")
        num_missed = 1 if self.next_seq is None else snapshot.seq - self.next_seq
        is_first = not state.is_loaded
        state.load(snapshot, num_missed)
        self.next_seq = snapshot.seq
        self.is_up = True
        if is_first:
            logger.info("the engine is watched", engine=self.name, model=self.model_name)
            may_ask = self._spec.admin_token_file is not None
            tell(
                Rank(
                    self._dp_rank(),
                    state.log,
                    state,
                    self.samples,
                    lambda: self.is_up,
                    forward=self._control.call if may_ask else None,
                    why_not=f"the sidecar has no token for it: add ?admin_token_file=FILE to {SETTING} {self.name}",
                )
            )

    def _take_events(self, batch: EventBatch) -> None:
        state = self._state
        assert state is not None, "events before the beginning"
        assert self.next_seq is not None, "events before a state"
        try:
            state.append(batch.events)
        except Exception:
            self._num_errors += 1
            self.next_seq = None  # the state is not to be trusted: begin anew from a snapshot
            raise
        self.next_seq = batch.next_seq
        if batch.events:
            self._last_event_ns = time.time_ns()

    def _dp_rank(self) -> int:
        text = self._labels.get("dp_rank", "0")
        return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0

    def _complain(self, reason: object) -> None:
        now = time.monotonic()
        if self._is_stopping.is_set() or (self._logged is not None and now - self._logged < LOG_SECONDS):
            return
        self._logged = now
        logger.warning("an engine cannot be read, trying again", engine=self.name, reason=str(reason) or repr(reason))


def make_source(spec: EngineSpec) -> RemoteSource:
    """Make the source of one engine."""
    return RemoteSource(spec)
