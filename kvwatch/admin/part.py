"""The admin API as a part of the observatory: its listener, on the observatory's thread and loop."""

import asyncio
import socket
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvwatch.admin.access import REFUSALS, AccessGuard
from kvwatch.admin.app import AdminApp
from kvwatch.admin.audit import AuditTrail
from kvwatch.admin.change_desk import ChangeDesk
from kvwatch.admin.declared_file import DeclaredFile
from kvwatch.admin.engines import AdminEngines
from kvwatch.admin.event_stream import EventStreams
from kvwatch.admin.looking import Looks
from kvwatch.admin.openapi import make_document
from kvwatch.admin.operations import OPERATIONS
from kvwatch.admin.settings import AdminOptions, is_loopback, open_audit_file, reserve
from kvwatch.admin.site import Site
from kvwatch.admin.tokens import TokenFile
from kvwatch.http_protocol import BoundedStreamProtocol
from kvwatch.ledger.view import Sample
from kvwatch.listener import Listener
from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.clock import Clock, SystemClock

if TYPE_CHECKING:
    from kvwatch.admin.grpc_service import ControlService

NAME = "admin"


class AdminPart:
    """A `Part` of the observatory. `open` on the caller's thread, `run` and `close` on the observatory's.

    Args:
        options: Address and access.
        engines: What is spoken of; more may be added while it runs.
        clock: Tells the time.
    """

    name = NAME

    def __init__(self, options: AdminOptions, engines: AdminEngines, clock: Clock | None = None) -> None:
        self._options = options
        self._engines = engines
        self._clock = clock or SystemClock()
        self._streams = EventStreams(options.max_streams)
        self._guard: AccessGuard | None = None
        self._trail: AuditTrail | None = None
        self._socket: socket.socket | None = None
        self._grpc: ControlService | None = None
        self.address: tuple[str, int] | None = None
        """Host and port, once open."""

    def open(self) -> None:
        """Take the address and read the tokens.

        Raises:
            ConfigError: an option is wrong, or others could look in without a token.
            ExporterError: the address cannot be bound.
        """
        options = self._options
        tokens = None if options.token_file is None else TokenFile(options.token_file, self._clock)
        self._socket = reserve(options)
        self.address = self._socket.getsockname()[:2]
        file = None if options.audit_file is None else open_audit_file(options.audit_file)
        self._trail = AuditTrail(self._clock, file)
        is_local = is_loopback(self.address[0])
        self._guard = AccessGuard(options, tokens, self._clock, is_loopback=is_local)

    def grpc_service(self) -> "ControlService":
        """Return the same API as a service for a gRPC server on the observatory's loop. Before the part runs."""
        from kvwatch.admin.grpc_service import ControlService

        if self._grpc is None:
            self._grpc = ControlService()
        return self._grpc

    def samples(self) -> Iterable[Sample]:
        """Return refused requests, and what the event streams have lost. Any thread."""
        guard, streams = self._guard, self._streams
        for why in REFUSALS:
            yield Sample(m.ADMIN_AUTH_FAILURES, (why,), 0 if guard is None else guard.num_refused[why])
        yield Sample(m.TELEMETRY_GAPS, (NAME,), streams.num_gaps)
        yield Sample(m.TELEMETRY_DROPPED, (NAME,), streams.num_lost)

    async def run(self, stop: asyncio.Event) -> None:
        """Answer until `stop` is set."""
        assert self._socket is not None
        assert self._guard is not None
        assert self._trail is not None
        file = None if self._options.config_file is None else DeclaredFile(self._options.config_file)
        desk = ChangeDesk(self._engines, self._trail, self._clock, file)
        described = make_document(OPERATIONS, is_reading_open=is_loopback(self._socket.getsockname()[0]))
        site = Site(
            engines=self._engines,
            streams=self._streams,
            trail=self._trail,
            desk=desk,
            looks=Looks(),
            document=described,
        )
        app = AdminApp(OPERATIONS, self._guard, site)
        if self._grpc is not None:
            self._grpc.attach(app)
        serving = asyncio.ensure_future(Listener(app, self._socket, BoundedStreamProtocol).serve(stop))
        reverting = asyncio.ensure_future(desk.run(stop))
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        self._streams.end()
        stopping.cancel()
        await asyncio.gather(serving, reverting)

    def close(self) -> None:
        """Give back the address."""
        if self._socket is not None:
            self._socket.close()
        if self._trail is not None:
            self._trail.close()
