"""Runs the application until it is told to stop, and then lets running requests finish.

first SIGTERM or SIGINT   refuse new requests; wait for running ones, at most the grace time; abort the rest; return
second                    exit at once
"""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator

import structlog
import uvicorn
from starlette.types import ASGIApp

from kvwatch_engine.engine import Engine
from kvwatch_engine.server.drain import Drain

MAX_HEADER_BYTES = 64 * 1024
"""Larger request headers are refused before anything reads them."""

_POLL_SECONDS = 0.05
_CLOSE_SECONDS = 5

logger = structlog.get_logger(__name__)


class _Server(uvicorn.Server):
    """A server that leaves signals to `serve_until_signal`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(app: ASGIApp, protocol: type[asyncio.Protocol]) -> uvicorn.Server:
    """Return a uvicorn server with the limits that hostile clients need.

    Args:
        app: The application.
        protocol: What a connection speaks: uvicorn's own HTTP waits for half a request for ever.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="on",
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        http=protocol,
        ws="none",
    )
    return _Server(config)


async def serve_until_signal(
    server: uvicorn.Server,
    bound: socket.socket,
    engine: Engine,
    drain: Drain,
    grace_seconds: float,
    on_ready: Callable[[], None],
) -> None:
    """Serve on a bound socket until SIGTERM or SIGINT; return when all requests have ended.

    On the main thread's event loop only, since signals arrive there.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, _on_signal, signum, stop)
    serving = asyncio.create_task(server.serve(sockets=[bound]))
    while not server.started and not serving.done():
        await asyncio.sleep(_POLL_SECONDS)
    if not serving.done():
        on_ready()
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not serving.done():
        await _finish_requests(engine, drain, grace_seconds)
    server.should_exit = True
    stopping.cancel()
    await serving


async def _finish_requests(engine: Engine, drain: Drain, grace_seconds: float) -> None:
    logger.info("draining", live_requests=engine.num_live_requests, grace_seconds=grace_seconds)
    drain.begin_drain()
    engine.begin_drain(grace_seconds)
    if not await drain.wait_idle(grace_seconds):
        logger.warning("grace time is over; aborting", live_requests=engine.num_live_requests)
        engine.abort_all()
        await drain.wait_idle(_CLOSE_SECONDS)


def _on_signal(signum: signal.Signals, stop: asyncio.Event) -> None:
    if stop.is_set():
        logger.warning("second signal: exiting at once", signal=signum.name)
        os._exit(128 + signum)
    stop.set()
