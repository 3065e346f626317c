"""Sockets of listeners and the server that answers on them."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from kvwatch.errors import ConfigError, ExporterError

MAX_HEADER_BYTES = 16 * 1024
"""Request headers that are not complete after so many bytes (and one read of the socket) are refused."""

MAX_CONNECTIONS = 512
"""Connections beyond this are answered 503."""


def parse_address(listen: str, setting: str) -> tuple[str, int]:
    """Split `HOST:PORT` (`[::1]:9400` for IPv6).

    Args:
        listen: The address.
        setting: Name of the setting that it comes from, for the message.

    Raises:
        ConfigError: it is no address.
    """
    host, _, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ConfigError(
            f"{setting}: {listen!r} is not HOST:PORT with a port of 0 to 65535; write for instance 127.0.0.1:9400"
        )
    return host, int(port)


def bind(listen: str, setting: str) -> socket.socket:
    """Bind and return a listening socket, so that a taken port is an error of the start and not of a thread.

    Raises:
        ConfigError: `listen` is no address.
        ExporterError: the address cannot be bound.
    """
    host, port = parse_address(listen, setting)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ExporterError(f"{setting}: cannot resolve {host!r} ({error}); give a local address") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(128)
    except OSError as error:
        bound.close()
        raise ExporterError(
            f"{setting}: cannot listen on {listen} ({error.strerror}); stop what listens there or choose another"
            f" address with {setting}"
        ) from error
    bound.setblocking(False)
    return bound


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
