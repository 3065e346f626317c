"""Client of the stream: events and snapshots of an engine in another process, as if they came from its log.

    with TelemetryClient("127.0.0.1:9402") as client:
        for item in client.subscribe(from_snapshot=True, is_resuming=True):
            ...  # Started, EngineSnapshot, EventBatch, Gap, Interrupted

Also an `EngineControl`. `follow` keeps a `Follower` (a ledger's mirror, for instance) up to date. Knows nothing of what
its caller does with events. Blocking; each subscription belongs to one thread, except `cancel`.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
import msgspec
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from kvwatch.ledger.collector import Follower
from kvwatch.stream.codec import EventCodec, StreamError, StructCodec, join_parts, parse
from kvwatch.stream.contract import (
    SERVICE,
    SNAPSHOT,
    SUBSCRIBE,
    Gap,
    SnapshotPart,
    SnapshotRequest,
    Started,
    SubscribeRequest,
    Update,
    method_path,
)
from kvwatch.stream.descriptors import message_class
from kvwatch.telemetry.schema import Event
from kvwatch.telemetry.snapshot import EngineSnapshot

PLAIN_SCHEME, TLS_SCHEME = "grpc://", "grpcs://"
FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.2, 5.0
"""Pauses before connecting again: doubled from the first to the last."""

HEALTH_TIMEOUT_SECONDS = 2.0
READY = "ready"
"""Name of the health of accepting requests."""

_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),  # the reset of a large cache is one large event
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # Channels of one process share connections otherwise, and one that is not read would hold up the others.
    ("grpc.use_local_subchannel_pool", 1),
)
_REMEDIES = {
    grpc.StatusCode.UNAVAILABLE: "is the engine running, and is this its --grpc-listen address?",
    grpc.StatusCode.UNIMPLEMENTED: "is this a kvwatch engine's --grpc-listen address?",
}


class EventBatch(msgspec.Struct, frozen=True):
    """Events in order, and the number to go on from; empty when only unwanted ones have happened."""

    events: list[Event]
    next_seq: int


class Interrupted(msgspec.Struct, frozen=True):
    """The connection was lost; the subscription connects again and goes on where it was."""

    reason: str
    retry_seconds: float


Item = Started | Gap | EngineSnapshot | EventBatch | Interrupted


class TelemetryClient:
    """Connection to one engine. Any thread.

    Args:
        address: `HOST:PORT`, with `grpcs://` in front for TLS.
        token: What the server's token file holds, if it has one.
        root_certificates: PEM certificates to trust; default: the system's.
        channel_options: Further arguments of the gRPC channel, such as the size of its receive window.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        root_certificates: bytes | None = None,
        channel_options: Sequence[tuple[str, int]] = (),
    ) -> None:
        self.address = address
        self._metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        options = (*_CHANNEL_OPTIONS, *channel_options)
        target = address.removeprefix(TLS_SCHEME).removeprefix(PLAIN_SCHEME)
        if address.startswith(TLS_SCHEME):
            credentials = grpc.ssl_channel_credentials(root_certificates)
            self._channel = grpc.secure_channel(target, credentials, options)
        else:
            self._channel = grpc.insecure_channel(target, options)
        self._subscribe = self._channel.unary_stream(method_path(SUBSCRIBE), StructCodec(SubscribeRequest).encode)
        self._snapshot = self._channel.unary_stream(
            method_path(SNAPSHOT), StructCodec(SnapshotRequest).encode, StructCodec(SnapshotPart).decode
        )
        self._health = HealthStub(self._channel)

    def subscribe(self, request: SubscribeRequest | None = None, *, is_resuming: bool = False) -> "Stream":
        """Return an iterator over what happens, from where `request` says (default: from now).

        Args:
            request: Where to begin and with what.
            is_resuming: Whether a lost connection is taken up again where it was lost; else that is an error.
        """
        return Stream(self, request or SubscribeRequest(), is_resuming=is_resuming)

    def snapshot(self, timeout_seconds: float = 5.0) -> EngineSnapshot:
        """Return the engine's KV state between two steps.

        Raises:
            StreamError: it cannot be had in time.
        """
        try:
            parts: list[SnapshotPart] = list(
                self._snapshot(SnapshotRequest(), timeout=timeout_seconds, metadata=self._metadata)
            )
        except grpc.RpcError as error:
            raise self.error_of(error) from error
        if not parts or not parts[-1].is_last:
            raise StreamError(f"{self.address}: the snapshot is not complete; ask again")
        return join_parts([part.snapshot for part in parts])

    def is_alive(self) -> bool:
        """Whether the engine can be reached and makes progress."""
        return self._is_well(SERVICE.full_name)

    def is_ready(self) -> bool:
        """Whether the engine can be reached and accepts requests."""
        return self._is_well(READY)

    def close(self) -> None:
        """End all calls."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def error_of(self, error: Any) -> StreamError:
        """Return what a failed call means, for people."""
        code, details = error.code(), " ".join(str(error.details()).split())
        remedy = _REMEDIES.get(code)
        return StreamError(f"{self.address}: {details} ({code.name})" + (f"; {remedy}" if remedy else ""))

    def call(self, request: SubscribeRequest) -> Any:
        """Begin one `Subscribe` call; iterating over it gives bytes."""
        return self._subscribe(request, metadata=self._metadata)

    def _is_well(self, service: str) -> bool:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = self._health.Check(request, timeout=HEALTH_TIMEOUT_SECONDS)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


class Stream(Iterator[Item]):
    """One subscription; iterate on one thread, `cancel` from any.

    Not reading it costs the engine nothing: what is overtaken meanwhile is healed by a gap and a snapshot.
    """

    def __init__(self, client: TelemetryClient, request: SubscribeRequest, *, is_resuming: bool) -> None:
        self._client = client
        self._request = request
        self._is_resuming = is_resuming
        self.begins_with_snapshot = request.from_snapshot
        """Whether the state comes before any event."""
        self._events = EventCodec()
        self._update, self._updates = message_class(Update.__name__), StructCodec(Update)
        self._pending: list[Item] = []
        self._parts: list[EngineSnapshot] = []
        self._call: Any = None
        self._epoch = ""
        self._retry_seconds = FIRST_RETRY_SECONDS
        self._pause = 0.0
        self._cancelled = threading.Event()

    def __next__(self) -> Item:
        """Wait for the next item.

        Raises:
            StopIteration: it was cancelled.
            StreamError: the server refuses, or the connection is lost and not to be taken up again.
        """
        while not self._pending:
            if self._cancelled.wait(self._pause):
                raise StopIteration
            self._pause = 0.0
            try:
                self._receive()
            except grpc.RpcError as error:
                self._lost(error)
        return self._pending.pop(0)

    def cancel(self) -> None:
        """End the subscription; whoever waits for an item is released."""
        self._cancelled.set()
        call = self._call
        if call is not None:
            call.cancel()

    def _receive(self) -> None:
        if self._call is None:
            self._parts.clear()
            self._call = self._client.call(self._request)
            if self._cancelled.is_set():  # it came between the two
                self._call.cancel()
        message = parse(self._update, next(self._call))
        self._retry_seconds = FIRST_RETRY_SECONDS
        update = self._updates.unpack(message)
        if update.started is not None:
            self._started(update.started)
        if update.gap is not None:
            self._pending.append(update.gap)
        if update.snapshot is not None:
            self._add_part(update.snapshot)
        events = [event for each in message.events if (event := self._events.decode(each)) is not None]
        if update.next_seq is not None:
            self._go_on_from(update.next_seq)
            if update.snapshot is None:
                self._pending.append(EventBatch(events, update.next_seq))

    def _started(self, started: Started) -> None:
        self._epoch = started.epoch
        if self._request.seq is None and not self._request.from_snapshot:
            self._go_on_from(started.seq)
        elif not self._request.epoch:
            self._request = msgspec.structs.replace(self._request, epoch=started.epoch)
        self._pending.append(started)

    def _add_part(self, part: SnapshotPart) -> None:
        self._parts.append(part.snapshot)
        if part.is_last:
            self._pending.append(join_parts(self._parts))
            self._parts = []

    def _go_on_from(self, seq: int) -> None:
        """Remember what a new call has to ask for."""
        self._request = msgspec.structs.replace(
            self._request, epoch=self._epoch, seq=seq, from_snapshot=False, num_back=0
        )

    def _lost(self, error: Any) -> None:
        self._call = None
        if self._cancelled.is_set():
            raise StopIteration
        reason = self._client.error_of(error)
        can_help = error.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}
        if not self._is_resuming or not can_help:
            raise reason from error
        self._pause = self._retry_seconds
        self._retry_seconds = min(2 * self._retry_seconds, MAX_RETRY_SECONDS)
        self._pending.append(Interrupted(str(reason), self._pause))


def follow(stream: Stream, follower: Follower, observe: Callable[[Item], None] = lambda _item: None) -> None:
    """Keep a follower up to date until the stream is cancelled; begin the stream with a snapshot.

    Args:
        stream: What is followed; unfiltered, else the follower's state is not the engine's.
        follower: Loaded with every snapshot, given all events; published after each item.
        observe: Is shown every item after it was applied.

    Raises:
        StreamError: as of `Stream`.
    """
    for item in stream:
        if isinstance(item, EngineSnapshot):
            follower.load(item)
        elif isinstance(item, EventBatch):
            follower.apply(item.events)
            follower.settle()
        observe(item)
    follower.publish()
