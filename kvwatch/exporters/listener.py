"""The server that answers on a listener's socket."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from kvwatch.sockets import bind, parse_address

__all__ = ["Listener", "bind", "parse_address"]

MAX_HEADER_BYTES = 16 * 1024
"""Request headers that are not complete after so many bytes (and one read of the socket) are refused."""

MAX_CONNECTIONS = 512
"""Connections beyond this are answered 503."""


class _Server(uvicorn.Server):
    """A server that leaves the process's signals alone: it is not the one to decide about the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Listener:
    """An ASGI application served on a bound socket. `serve` and `close` on one event loop."""

    def __init__(self, app: ASGIApp, bound: socket.socket) -> None:
        self.socket = bound
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=1,
            timeout_keep_alive=75,
            limit_concurrency=MAX_CONNECTIONS,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            http="h11",
            ws="none",
        )
        self._server = _Server(config)

    async def serve(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set; then finish open answers for at most a second and close the socket."""
        serving = asyncio.create_task(self._server.serve(sockets=[self.socket]))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        self._server.should_exit = True
        stopping.cancel()
        await serving
