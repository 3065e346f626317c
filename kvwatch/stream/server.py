"""The gRPC server of the event stream: a part of the observatory, on its thread and loop.

Offers `kvwatch.v1.Telemetry`, health (which needs no token) and reflection. Nothing that a caller does reaches the
engine, except that a snapshot may be taken between two steps, a few times a second at most.
"""

import asyncio
import contextlib
import secrets
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import grpc
import structlog
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import SERVICE_NAME as HEALTH_NAME
from grpc_health.v1.health import aio as health_aio
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from grpc_reflection.v1alpha import reflection, reflection_pb2

from kvwatch.control import EngineControl
from kvwatch.errors import ControlError, ExporterError
from kvwatch.ledger.pace import pause
from kvwatch.ledger.view import Sample
from kvwatch.stream.access import (
    LISTEN_SETTING,
    Permits,
    RevokedError,
    StreamOptions,
    TokenGuard,
    Tokens,
    make_credentials,
    reserve,
)
from kvwatch.stream.codec import StreamError, StructCodec
from kvwatch.stream.contract import (
    SERVICE,
    SNAPSHOT,
    SUBSCRIBE,
    SnapshotPart,
    SnapshotRequest,
    SubscribeRequest,
)
from kvwatch.stream.descriptors import POOL
from kvwatch.stream.engines import StreamedEngines
from kvwatch.stream.subscription import NAME, Subscription, numbered_parts
from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.log import EventLog

MAX_SUBSCRIBERS = 64
MAX_CALLS = 2 * MAX_SUBSCRIBERS
"""Calls at a time, of any kind."""

MAX_REQUEST_BYTES = 64 * 1024
MAX_METADATA_BYTES = 16 * 1024
STOP_SECONDS = 1.0
"""What subscribers get for taking the last events."""

HEALTH_SECONDS = 1.0
READY = "ready"
"""Name of the health of accepting requests; the others tell whether the engine makes progress."""

_SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),  # else two servers may share a port without noticing
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    # A peer that has vanished without a word holds its place no longer than two minutes.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 60_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
)

logger = structlog.get_logger(__name__)

for _file in (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):  # so that reflection tells them as well
    POOL.AddSerializedFile(_file.serialized_pb)


@dataclass(frozen=True, slots=True)
class _Subscribers:
    """Who is there, and what those lost who have left. Replaced as a whole, so that any thread reads true sums."""

    running: tuple[Subscription, ...] = ()
    num_gaps: int = 0
    num_dropped: int = 0

    def joined_by(self, subscription: Subscription) -> "_Subscribers":
        return replace(self, running=(*self.running, subscription))

    def left_by(self, subscription: Subscription) -> "_Subscribers":
        return _Subscribers(
            tuple(each for each in self.running if each is not subscription),
            self.num_gaps + subscription.num_gaps,
            self.num_dropped + subscription.num_dropped,
        )


class GrpcService(Protocol):
    """A further service of the same server, which decides by itself who may call it."""

    @property
    def full_name(self) -> str:
        """Its name with the package's."""
        ...

    @property
    def descriptor(self) -> bytes:
        """The file that describes it, for reflection."""
        ...

    def handlers(self) -> dict[str, Any]:
        """Return gRPC's handlers by method."""
        ...


class TelemetryServer:
    """A `Part` of the observatory. `open` on the caller's thread, `run` and `close` on the observatory's.

    Args:
        options: Address and access.
        engines: What is streamed; more may be added while it runs.
        is_alive: Whether what is behind it makes progress, for health.
        is_ready: Whether it accepts requests, for health.
        services: What else is offered on the same address.
    """

    name = NAME

    def __init__(
        self,
        options: StreamOptions,
        engines: StreamedEngines,
        is_alive: Callable[[], bool],
        is_ready: Callable[[], bool],
        services: Sequence[GrpcService] = (),
    ) -> None:
        self._options = options
        self._engines = engines
        self._is_alive = is_alive
        self._is_ready = is_ready
        self._services = services
        self._reserved: socket.socket | None = None
        self._tokens: Tokens | None = None
        self._permits = Permits(None)
        self._credentials: grpc.ServerCredentials | None = None
        self._subscribers = _Subscribers()
        self._num_errors = 0
        self._requests = StructCodec(SubscribeRequest)
        self._snapshot_requests = StructCodec(SnapshotRequest)
        self._parts = StructCodec(SnapshotPart)
        self.address: tuple[str, int] | None = None
        """Host and port, once open."""
        self.is_serving = threading.Event()
        """Set as soon as callers are answered, a moment after the observatory has started."""

    @property
    def num_subscribers(self) -> int:
        """Subscriptions that are running."""
        return len(self._subscribers.running)

    def open(self) -> None:
        """Take the address and read tokens and certificates.

        Raises:
            ConfigError: an option is wrong, or others could listen in without a token.
            ExporterError: the address cannot be bound.
        """
        self._tokens = None if self._options.token_file is None else Tokens(self._options.token_file)
        self._permits = Permits(self._tokens)
        self._credentials = make_credentials(self._options)
        self._reserved = reserve(self._options)
        self.address = self._reserved.getsockname()[:2]

    def samples(self) -> Iterable[Sample]:
        """Return gaps, losses, the greatest lag and errors over all subscribers. Any thread."""
        now, labels = self._subscribers, (NAME,)
        yield Sample(m.TELEMETRY_GAPS, labels, now.num_gaps + sum(each.num_gaps for each in now.running))
        yield Sample(m.TELEMETRY_DROPPED, labels, now.num_dropped + sum(each.num_dropped for each in now.running))
        yield Sample(m.TELEMETRY_LAG, labels, max((each.lag for each in now.running), default=0))
        yield Sample(m.TELEMETRY_ERRORS, labels, self._num_errors)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then end all calls within `STOP_SECONDS`.

        Raises:
            ExporterError: gRPC cannot listen on the address.
        """
        health = health_aio.HealthServicer()
        server = self._make_server(health)
        await server.start()
        self.is_serving.set()
        try:
            await asyncio.gather(self._engines.run(stop), self._supervise(health, stop))
        finally:
            await server.stop(STOP_SECONDS)

    def close(self) -> None:
        """Give back the address and all places in the log."""
        if self._reserved is not None:
            self._reserved.close()
        for each in self._subscribers.running:
            each.close()

    # ------------------------------------------------------------ gRPC

    def _make_server(self, health: Any) -> Any:
        others = tuple(f"/{each.full_name}/" for each in self._services)
        guards = [TokenGuard(self._tokens, others)] if self._tokens else []
        server = grpc.aio.server(interceptors=guards, options=_SERVER_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS)
        handlers = {
            # Requests come as bytes: what gRPC cannot decode by itself it logs with a traceback, each time.
            SUBSCRIBE.name: grpc.unary_stream_rpc_method_handler(self._subscribe),
            SNAPSHOT.name: grpc.unary_stream_rpc_method_handler(self._snapshot, response_serializer=self._parts.encode),
        }
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE.full_name, handlers)])
        for each in self._services:
            POOL.AddSerializedFile(each.descriptor)
            server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(each.full_name, each.handlers())])
        add_HealthServicer_to_server(health, server)
        own = (SERVICE.full_name, HEALTH_NAME, reflection.SERVICE_NAME)
        names = (*own, *(each.full_name for each in self._services))
        reflection.enable_server_reflection(names, server, POOL)
        self._bind(server)
        return server

    def _bind(self, server: Any) -> None:
        assert self.address is not None
        assert self._reserved is not None
        host, port = self.address
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._reserved.close()
        try:
            if self._credentials is None:
                server.add_insecure_port(target)
            else:
                server.add_secure_port(target, self._credentials)
        except RuntimeError as error:
            raise ExporterError(
                f"{LISTEN_SETTING}: gRPC cannot listen on {target} ({error}); stop what listens there or choose another"
            ) from error

    async def _subscribe(self, request: bytes, context: Any) -> None:
        if self.num_subscribers >= MAX_SUBSCRIBERS:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_SUBSCRIBERS} subscribers are connected; end one of them"
            )
        try:
            wanted = self._requests.decode(request)
            source = self._engines.find(wanted.engine, wanted.dp_rank)
            subscription = Subscription(source, wanted, context.write)
        except StreamError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            return
        self._subscribers = self._subscribers.joined_by(subscription)
        code, why = grpc.StatusCode.UNAVAILABLE, "this engine's telemetry has ended; connect again later"
        try:
            async with self._permits.hold(context.invocation_metadata() or ()):
                await subscription.run()
        except RevokedError as error:
            logger.info("a subscription has ended since its token is no longer accepted")
            code, why = grpc.StatusCode.UNAUTHENTICATED, str(error)
        except Exception as error:
            if context.done():  # it has gone, and that is no error
                return
            self._num_errors += 1
            logger.warning("a subscription failed, the subscriber may come again", error=repr(error))
            code, why = grpc.StatusCode.INTERNAL, "the subscription failed; subscribe again"
        finally:
            subscription.close()
            self._subscribers = self._subscribers.left_by(subscription)
        with contextlib.suppress(grpc.aio.InternalError):  # the server ended before the peer took it
            await context.abort(code, why)

    async def _snapshot(self, request: bytes, context: Any) -> None:
        try:
            wanted = self._snapshot_requests.decode(request)
            source = self._engines.find(wanted.engine, wanted.dp_rank)
        except StreamError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            return
        try:
            snapshot = await source.snapshots.take()
        except ControlError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            return
        async for part in numbered_parts(snapshot, source.epoch):
            await context.write(part)

    async def _supervise(self, health: Any, stop: asyncio.Event) -> None:
        """Once a second, end the subscriptions whose token was taken away, and tell health."""
        known = health_pb2.HealthCheckResponse
        while not stop.is_set():
            self._permits.end_revoked()
            is_alive, is_ready = self._is_alive(), self._is_ready()
            for name, is_well in (("", is_alive), (SERVICE.full_name, is_alive), (READY, is_ready)):
                await health.set(name, known.SERVING if is_well else known.NOT_SERVING)
            await pause(stop, HEALTH_SECONDS)
        await health.enter_graceful_shutdown()


class StreamServer(TelemetryServer):
    """The stream of the one engine in this process.

    Args:
        log: What is streamed.
        control: Gives snapshots and says how the engine is.
        options: Address and access.
        labels: Labels of the engine in all metrics; told to subscribers.
        epoch: Names this run of the engine; a random name if none is given.
        services: What else is offered on the same address.
    """

    def __init__(
        self,
        log: EventLog,
        control: EngineControl,
        options: StreamOptions,
        labels: Mapping[str, str] | None = None,
        epoch: str | None = None,
        services: Sequence[GrpcService] = (),
    ) -> None:
        self.epoch = epoch or secrets.token_hex(8)
        """Names this run of the engine; another after every restart."""
        engines = StreamedEngines()
        engines.add(log, control.snapshot, dict(labels or {}), self.epoch)
        super().__init__(options, engines, control.is_alive, control.is_ready, services)
