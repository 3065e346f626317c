"""Connections that would stay for ever: answers that nobody reads, and bodies that never come."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from kvwatch import http_protocol
from kvwatch.http_protocol import BoundedProtocol, BoundedRequestProtocol, BoundedStreamProtocol
from kvwatch.listener import Listener, bind

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
START = {"type": "http.response.start", "status": 200, "headers": []}
PIECE = b"x" * 65536


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "EXCHANGE_SECONDS", 0.5)
    monkeypatch.setattr(http_protocol, "LOOK_SECONDS", 0.1)


class EndlessAnswers:
    """Sends until the client is gone, or gives up after a few pieces that nobody takes."""

    def __init__(self, *, gives_up: bool) -> None:
        self._gives_up = gives_up
        self.num_pieces = 0
        self.has_ended = asyncio.Event()

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        leaving = asyncio.ensure_future(_until_gone(receive))
        sending = asyncio.ensure_future(self._send_all(send))
        limit = 0.3 if self._gives_up else None
        await asyncio.wait({leaving, sending}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        sending.cancel()
        self.has_ended.set()

    async def _send_all(self, send: Send) -> None:
        while True:
            await send({"type": "http.response.body", "body": PIECE, "more_body": True})
            self.num_pieces += 1
            await asyncio.sleep(0.001)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def answer_at_once(_scope: Scope, _receive: Receive, send: Send) -> None:
    await send(START)
    await send({"type": "http.response.body", "body": b"no", "more_body": False})


def visit(
    app: ASGIApp, protocol: type[BoundedProtocol], request: bytes, then: Callable[[socket.socket], Awaitable[None]]
) -> None:
    """Serve `app`, send it a request through a socket that takes little, and go on with that."""

    async def run() -> None:
        bound = bind("127.0.0.1:0", "--x")
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        stop = asyncio.Event()
        serving = asyncio.create_task(Listener(app, bound, protocol).serve(stop))
        loop = asyncio.get_running_loop()
        try:
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
                client.setblocking(False)
                await loop.sock_connect(client, bound.getsockname())
                await loop.sock_sendall(client, request)
                await asyncio.wait_for(then(client), 60)
        finally:
            stop.set()
            await asyncio.wait_for(serving, 60)

    asyncio.run(run())


async def read_to_the_end(client: socket.socket) -> bytes:
    loop, received = asyncio.get_running_loop(), b""
    try:
        while piece := await loop.sock_recv(client, 65536):
            received += piece
    except ConnectionError:
        pass
    return received


def test_who_reads_nothing_of_a_stream_is_hung_up_on_and_that_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    app = EndlessAnswers(gives_up=False)

    async def read_nothing(_client: socket.socket) -> None:
        await app.has_ended.wait()

    with caplog.at_level(logging.INFO):
        visit(app, BoundedStreamProtocol, GET, read_nothing)

    assert [each for each in caplog.records if each.levelno >= logging.ERROR] == []


def test_who_reads_slowly_may_go_on_with_a_stream() -> None:
    app = EndlessAnswers(gives_up=False)

    async def read_slowly(client: socket.socket) -> None:
        loop, end, received = asyncio.get_running_loop(), asyncio.get_running_loop().time() + 2, 0
        while loop.time() < end:
            piece = await loop.sock_recv(client, 262_144)
            assert piece, "it was hung up on"
            received += len(piece)
            await asyncio.sleep(0.002)
        assert not app.has_ended.is_set()

    visit(app, BoundedStreamProtocol, GET, read_slowly)


def test_an_answer_that_is_given_up_does_not_wait_for_its_reader() -> None:
    """Closing waits until what was sent has been read; the connection has to be cut."""
    app = EndlessAnswers(gives_up=True)

    async def read_late(client: socket.socket) -> None:
        await app.has_ended.wait()
        await asyncio.sleep(2)  # long after the limit; now nothing but what had left the server may come
        received = await read_to_the_end(client)
        assert len(received) < app.num_pieces * len(PIECE)

    visit(app, BoundedRequestProtocol, GET, read_late)


@pytest.mark.parametrize("protocol", [BoundedProtocol, BoundedRequestProtocol, BoundedStreamProtocol])
def test_a_body_that_never_comes_keeps_no_connection_after_the_answer(protocol: type[BoundedProtocol]) -> None:
    half = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"

    async def wait_for_the_end(client: socket.socket) -> None:
        assert (await read_to_the_end(client)).startswith(b"HTTP/1.1 200 ")

    visit(answer_at_once, protocol, half, wait_for_the_end)
