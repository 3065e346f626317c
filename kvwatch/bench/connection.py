"""One connection to the target: a request, and its answer piece by piece at the moment at which it arrives.

A load generator beside a server takes the processor from it. So pieces are not awaited one by one through the layers of
a library for every use; each is given to its reader from the event loop's own callback. h11 reads the head.
"""

import asyncio
import select
from typing import Protocol

import h11

from kvwatch.bench.errors import RequestFailed
from kvwatch.bench.http_body import Body, ChunkedBody, EndlessBody, SizedBody

_BUFFER_BYTES = 128 * 1024
_MAX_HEAD_BYTES = 256 * 1024


class Reader(Protocol):
    """Takes one answer. What its methods raise ends the request."""

    def head(self, status: int, headers: dict[str, str]) -> bool:
        """Take status and headers, names in lower case; return whether it wants nothing more."""
        ...

    def piece(self, data: bytes) -> bool:
        """Take a piece of the body; return whether it wants nothing more."""
        ...


class Connection(asyncio.BufferedProtocol):
    """An open connection. Event loop only; one request at a time."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._transport: asyncio.Transport | None = None
        self._reader: Reader | None = None
        self._ended: asyncio.Future[None] | None = None
        self._head: h11.Connection | None = None
        self._body: Body | None = None
        self._may_stay = False
        self.idle_since = 0.0

    @property
    def is_open(self) -> bool:
        """Whether nobody is known to have closed it."""
        return self._transport is not None and not self._transport.is_closing()

    def is_quiet(self) -> bool:
        """Return whether another request may be sent: it is open, and nothing has come that nobody asked for.

        A server that closes after an answer without a word does so at the moment in which the next request would be
        sent. Then the end of the connection is there already, but the event loop has not looked yet.
        """
        if self._transport is None or not self.is_open:
            return False
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket"), select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        """Close it at once, whatever is under way."""
        if self._transport is not None:
            self._transport.abort()

    async def ask(self, request: h11.Request, content: bytes, reader: Reader) -> bool:
        """Send a request and give its answer to `reader`; return whether the connection may be used again.

        Raises:
            RequestFailed: the answer is no HTTP or incomplete, or the connection was lost; or as `reader` raises it.
        """
        assert self._transport is not None
        self._reader, self._body, self._may_stay = reader, None, False
        self._head = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)
        self._ended = asyncio.get_running_loop().create_future()
        parts = [self._head.send(each) for each in (request, h11.Data(data=content), h11.EndOfMessage())]
        self._transport.write(b"".join(part for part in parts if part))
        try:
            await self._ended
        finally:
            self._reader = self._ended = None
        return self._may_stay and self.is_open

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.BaseProtocol`."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, _sizehint: int) -> memoryview:
        """See `asyncio.BufferedProtocol`: one buffer for all pieces, of which each is copied out."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """See `asyncio.BufferedProtocol`."""
        reader = self._reader
        if reader is None or self._ended is None or self._ended.done():
            self.close()  # nobody asked for it
            return
        data = self._buffer[:nbytes].tobytes()
        try:
            is_enough = self._received(reader, data)
        except Exception as error:
            self._end(error)
            return
        if is_enough:
            self._end()
        elif self._body is not None and self._body.is_over:
            self._may_stay = self._may_stay and not self._body.ends_with_connection
            self._end()

    def eof_received(self) -> bool:
        """See `asyncio.BaseProtocol`: the connection is closed, which says whether the answer is complete."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.BaseProtocol`."""
        if exc is not None:
            self._end(RequestFailed("connection", str(exc) or type(exc).__name__))
        elif self._body is not None and self._body.ends_with_connection:
            self._end()
        elif self._body is not None:
            self._end(RequestFailed("truncated", "the connection was closed before the end of the answer"))
        else:
            self._end(RequestFailed("truncated", "the server hung up without an answer"))

    def _received(self, reader: Reader, data: bytes) -> bool:
        if self._body is None:
            found = self._read_head(data)
            if found is None:
                return False
            response, data = found
            headers = _joined(response)
            self._body = _body_of(response.status_code, headers)
            self._may_stay = response.http_version == b"1.1" and "close" not in headers.get("connection", "").lower()
            if reader.head(response.status_code, headers):
                self._may_stay = False
                return True
        content = self._body.feed(data) if data else b""
        if content and reader.piece(content):
            self._may_stay = False
            return True
        return False

    def _read_head(self, data: bytes) -> tuple[h11.Response, bytes] | None:
        """Return the head and what came after it; none as long as it is incomplete."""
        assert self._head is not None
        try:
            self._head.receive_data(data)
            while isinstance(event := self._head.next_event(), h11.InformationalResponse):
                pass
        except h11.RemoteProtocolError as error:
            raise RequestFailed("protocol", str(error)) from error
        if event is h11.NEED_DATA:
            return None
        assert isinstance(event, h11.Response)
        return event, self._head.trailing_data[0]

    def _end(self, error: Exception | None = None) -> None:
        if self._ended is None or self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)


def _joined(response: h11.Response) -> dict[str, str]:
    """Return headers by name; one that came several times is a list (RFC 9110, 5.3)."""
    headers: dict[str, str] = {}
    for name, value in response.headers:
        key, text = name.decode("latin-1"), value.decode("latin-1")
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
    return headers


def _body_of(status: int, headers: dict[str, str]) -> Body:
    """Return how the body of an answer ends (RFC 9112, 6.3)."""
    if status in (204, 304):
        return SizedBody(0)
    if "transfer-encoding" in headers:
        if headers["transfer-encoding"].strip().lower() != "chunked":
            raise RequestFailed("protocol", f"transfer coding {headers['transfer-encoding'][:40]!r}")
        return ChunkedBody()
    if "content-length" in headers:
        return SizedBody(int(headers["content-length"]))
    return EndlessBody()
