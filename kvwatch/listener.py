"""The server that answers on a listener's socket."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from kvwatch.http_protocol import BoundedProtocol
from kvwatch.ledger.pace import pause
from kvwatch.sockets import bind, parse_address

__all__ = ["Listener", "bind", "parse_address"]

MAX_HEADER_BYTES = 16 * 1024
"""Request headers that are not complete after so many bytes (and one read of the socket) are refused."""

MAX_CONNECTIONS = 512
"""Connections beyond this are answered 503."""


TICK_SECONDS = 1.0
"""How often the server's Date header is renewed."""


class _Server(uvicorn.Server):
    """A server that leaves the process's signals alone, and sleeps while nobody asks.

    It is not the one to decide about the process. The library's own loop wakes up ten times a second to see whether it
    shall end; each time the interpreter is taken from the engine.
    """

    stopping: asyncio.Event

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        while not (self.stopping.is_set() or await self.on_tick(0)):
            await pause(self.stopping, TICK_SECONDS)


class Listener:
    """An ASGI application served on a bound socket. `serve` and `close` on one event loop.

    Args:
        app: What answers.
        bound: Where it is asked.
        protocol: How connections are bounded.
    """

    def __init__(self, app: ASGIApp, bound: socket.socket, protocol: type[BoundedProtocol] = BoundedProtocol) -> None:
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
            http=protocol,
            ws="none",
        )
        self._server = _Server(config)

    async def serve(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set; then finish open answers for at most a second and close the socket."""
        self._server.stopping = stop
        serving = asyncio.create_task(self._server.serve(sockets=[self.socket]))
        waiting = asyncio.create_task(stop.wait())
        await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
        self._server.should_exit = True
        waiting.cancel()
        await serving
