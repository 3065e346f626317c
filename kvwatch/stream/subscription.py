"""One subscriber's way through the log, and what all subscribers share. Observatory's loop only.

The log is the only buffer: a subscriber reads as fast as its peer takes messages, and one that is overtaken is told
what it missed and given a snapshot. Nothing is kept for it meanwhile. Knows no gRPC: bytes go to a function that waits
until they are taken.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import structlog

from kvwatch.config import unknown_name
from kvwatch.errors import ControlError
from kvwatch.stream.codec import EventCodec, StreamError, StructCodec, snapshot_parts
from kvwatch.stream.contract import Gap, SnapshotPart, Started, SubscribeRequest, Update
from kvwatch.stream.snapshots import Snapshots
from kvwatch.telemetry.log import EventLog, GapError
from kvwatch.telemetry.schema import REGISTRY, Event
from kvwatch.telemetry.snapshot import EngineSnapshot

BATCH = 256
"""Events encoded without yielding."""

MAX_UPDATE_BYTES = 1 << 20
"""A message is sent when it has grown to this; one event alone may be longer."""

RETRY_SECONDS = 1.0
"""Pause after a snapshot could not be had."""

RUNS_KEPT = 4
"""Encoded runs of events that are kept for others who read the same ones: subscribers all wake up together."""

MARK_SECONDS = 1.0
"""A subscriber to whom nothing is sent since nothing is wanted hears this often how far the log has gone."""

NAME = "stream"
"""Value of the label `subscriber` for all subscribers together."""

Write = Callable[[bytes], Awaitable[None]]

logger = structlog.get_logger(__name__)
_EVENT_CLASSES = {spec.name: spec.cls for spec in REGISTRY}


class EncodedEvents:
    """Bytes of events, encoded once for all subscribers that are near the head of the log."""

    def __init__(self, size: int = 1024, max_bytes_each: int = 32_768, *, with_token_ids: bool = False) -> None:
        self._codec = EventCodec(with_token_ids=with_token_ids)
        self._ring: list[tuple[Event, bytes] | None] = [None] * size
        self._max_bytes_each = max_bytes_each
        self._runs: deque[tuple[Event, Event, bytes]] = deque(maxlen=RUNS_KEPT)

    def of(self, event: Event) -> bytes:
        """Return the bytes of an update that holds this event; several of them may be concatenated."""
        place = event.seq % len(self._ring)
        kept = self._ring[place]
        if kept is not None and kept[0] is event:
            return kept[1]
        content = self._codec.encode(event)
        if len(content) <= self._max_bytes_each:
            self._ring[place] = (event, content)
        return content

    def of_run(self, events: Sequence[Event]) -> bytes:
        """Return the bytes of an update that holds these events, which follow each other in the log."""
        first, last = events[0], events[-1]
        for kept_first, kept_last, content in self._runs:
            if kept_first is first and kept_last is last:
                return content
        content = self._codec.encode_all(events)
        if len(content) <= MAX_UPDATE_BYTES:
            self._runs.append((first, last, content))
        return content

    def pieces(self, events: Sequence[Event]) -> Iterator[tuple[bytes, int]]:
        """Yield the same in pieces that fit into a message, each with the number of the event that comes after it."""
        content = self.of_run(events)
        if len(content) <= MAX_UPDATE_BYTES or len(events) == 1:
            yield content, events[-1].seq + 1
            return
        middle = len(events) // 2
        yield from self.pieces(events[:middle])
        yield from self.pieces(events[middle:])

    def chosen(self, events: Sequence[Event], wanted: Collection[type[Event]]) -> Iterator[tuple[bytes, int]]:
        """Yield the bytes of those of these classes, each with the number of the event that comes after it."""
        for event in events:
            if type(event) in wanted:
                yield self.of(event), event.seq + 1


class News:
    """Wakes those who wait for events. The engine wakes nobody: the log is looked at from here, once for all."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._changed = asyncio.Event()
        self._seen = log.head
        self.is_over = False
        """Whether the observatory stops: nothing more will be appended."""

    def look(self) -> None:
        """Look at the log and wake those who wait if something has happened. Called at every tick."""
        if self._log.head != self._seen:
            self._seen = self._log.head
            self._wake()

    def end(self) -> None:
        """Wake everybody for the last time."""
        self.is_over = True
        self._wake()

    async def wait(self, position: int, timeout_seconds: float | None) -> None:
        """Return when the log has gone past `position`, the observatory stops, or the time is over."""
        if self._log.head > position or self.is_over:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_seconds)

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


@dataclass(frozen=True, slots=True)
class Source:
    """What all subscribers of one engine share."""

    log: EventLog
    epoch: str
    labels: Mapping[str, str]
    snapshots: Snapshots
    news: News
    encoded: EncodedEvents
    encoded_with_token_ids: EncodedEvents
    updates: StructCodec[Update]

    @property
    def oldest(self) -> int:
        """Number of the oldest event that the log still holds."""
        return max(0, self.log.head - self.log.capacity)

    def started(self, seq: int) -> Started:
        """Return what a subscription that begins at `seq` is told first."""
        clock = self.log.clock
        return Started(
            epoch=self.epoch,
            seq=seq,
            head=self.log.head,
            oldest=self.oldest,
            wall_offset_ns=clock.wall_ns() - clock.monotonic_ns(),
            labels=dict(self.labels),
        )


class Subscription:
    """One subscriber. `run` once, `close` at the end; the counts may be read by any thread.

    Args:
        source: What is shared.
        request: What the subscriber asked for.
        write: Sends one message; returns when the peer has room for more.

    Raises:
        StreamError: the request is wrong.
    """

    def __init__(self, source: Source, request: SubscribeRequest, write: Write) -> None:
        self._source = source
        self._write = write
        self._wanted = _wanted_classes(request)
        self._encoded = source.encoded_with_token_ids if request.with_token_ids else source.encoded
        self._needs_snapshot = _check(request, source)
        self._cursor = source.log.subscribe(NAME)
        self._cursor.position = _first_seq(request, source)
        self._told_seq = -1
        self._told_at = 0.0
        self._gathered: list[bytes] = []
        """Encoded events that were not sent yet."""
        self._num_gathered_bytes = 0

    @property
    def lag(self) -> int:
        """Events appended and not yet read."""
        return self._cursor.lag

    @property
    def num_gaps(self) -> int:
        """Times events were missed."""
        return self._cursor.num_gaps

    @property
    def num_dropped(self) -> int:
        """Events missed."""
        return self._cursor.num_lost

    async def run(self) -> None:
        """Send until the observatory stops; then what is left, and return."""
        await self._send(Update(started=self._source.started(self._cursor.position)))
        self._told_seq = self._cursor.position
        if self._needs_snapshot:
            snapshot = await self._take_snapshot()
            self._cursor.position = snapshot.seq  # it asked for the state: nothing was missed
            await self._send_snapshot(snapshot)
        while True:
            try:
                events = self._cursor.read(BATCH)
            except GapError:
                await self._send_gathered(self._cursor.position)
                await self._heal()
                continue
            if events:
                await self._gather(events)
            if len(events) == BATCH:  # one message for all that is there
                await asyncio.sleep(0)
                continue
            await self._send_gathered(self._cursor.position)
            if not events:
                if self._source.news.is_over:
                    return
                await self._wait()

    def close(self) -> None:
        """Give up the place in the log. Safe to call twice."""
        self._cursor.close()

    async def _wait(self) -> None:
        """Wait for events; if some were passed over, say how far, now or when it is due."""
        position, now = self._cursor.position, asyncio.get_running_loop().time()
        is_told = self._told_seq == position
        if not is_told and now - self._told_at >= MARK_SECONDS:
            await self._send(Update(next_seq=position))
        else:
            await self._source.news.wait(position, None if is_told else MARK_SECONDS)

    async def _gather(self, events: list[Event]) -> None:
        encoded, gathered_to = self._encoded, events[0].seq
        for content, next_seq in encoded.chosen(events, self._wanted) if self._wanted else encoded.pieces(events):
            if self._gathered and self._num_gathered_bytes + len(content) > MAX_UPDATE_BYTES:
                await self._send_gathered(gathered_to)
            self._gathered.append(content)
            self._num_gathered_bytes += len(content)
            gathered_to = next_seq

    async def _send_gathered(self, next_seq: int) -> None:
        """Send what was gathered: everything before `next_seq` that is wanted."""
        pieces, self._gathered, self._num_gathered_bytes = self._gathered, [], 0
        if pieces:
            await self._send(Update(next_seq=next_seq), pieces)

    async def _heal(self) -> None:
        first = self._cursor.position
        snapshot = await self._take_snapshot()
        self._cursor.resume_at(snapshot.seq)
        await self._send(Update(gap=Gap(seq=first, num_missed=snapshot.seq - first)))
        await self._send_snapshot(snapshot)

    async def _take_snapshot(self) -> EngineSnapshot:
        while True:
            try:
                return await self._source.snapshots.take()
            except ControlError as error:  # in the middle of a long step, or gone: health tells which
                if self._source.news.is_over:
                    raise
                logger.warning("no snapshot for a subscriber of the stream, trying again", error=repr(error))
                await asyncio.sleep(RETRY_SECONDS)

    async def _send_snapshot(self, snapshot: EngineSnapshot) -> None:
        async for part in numbered_parts(snapshot, self._source.epoch):
            await self._send(Update(snapshot=part, next_seq=snapshot.seq if part.is_last else None))

    async def _send(self, update: Update, events: list[bytes] | None = None) -> None:
        content = self._source.updates.encode(update)
        if update.next_seq is not None:
            self._told_seq, self._told_at = update.next_seq, asyncio.get_running_loop().time()
        await self._write(b"".join((*(events or ()), content)))


async def numbered_parts(snapshot: EngineSnapshot, epoch: str) -> AsyncIterator[SnapshotPart]:
    """Yield a snapshot's parts, giving way to others between them."""
    parts = snapshot_parts(snapshot)
    part: EngineSnapshot | None = next(parts)
    while part is not None:
        following = next(parts, None)
        yield SnapshotPart(snapshot=part, is_last=following is None, epoch=epoch)
        part = following
        await asyncio.sleep(0)


def _wanted_classes(request: SubscribeRequest) -> frozenset[type[Event]]:
    for name in request.events:
        if name not in _EVENT_CLASSES:
            raise StreamError(str(unknown_name(name, _EVENT_CLASSES, "event")))
    return frozenset(_EVENT_CLASSES[name] for name in request.events)


def _check(request: SubscribeRequest, source: Source) -> bool:
    """Check where a request wants to begin; return whether it must begin with a snapshot."""
    is_other_epoch = bool(request.epoch) and request.epoch != source.epoch
    if request.seq is not None and request.from_snapshot:
        raise StreamError("both seq and from_snapshot say where to begin; send one of them")
    if request.num_back < 0 or (request.seq is not None and request.seq < 0):
        raise StreamError(f"seq {request.seq} and num_back {request.num_back} must be at least 0")
    if request.seq is not None and not is_other_epoch and request.seq > source.log.head:
        raise StreamError(
            f"seq {request.seq} is in the future: the next event is {source.log.head}; send the epoch that it belongs"
            " to, so that a restart of the engine is noticed"
        )
    return request.from_snapshot or is_other_epoch


def _first_seq(request: SubscribeRequest, source: Source) -> int:
    head = source.log.head
    if request.seq is not None and request.epoch in {"", source.epoch}:
        return request.seq
    # The oldest events may be overwritten before they are read; a few are left out so that they need not be healed.
    reach = min(source.log.capacity * 15 // 16, head)
    return head - min(request.num_back, reach)
