"""HTTP connections that end: whoever asks slowly, or does not read the answer, does not keep a place for ever.

Uvicorn has a limit for the time between two requests, none for that within one. Without it, as many connections as are
allowed, each with half a request, shut everybody else out.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

DIRECT_WRITE: Final = "kvwatch.direct_write"
"""ASGI extension of `BoundedRequestProtocol`: its entry `write` is a `DirectWrite`."""

EXCHANGE_SECONDS = 20.0
"""Time from the begin of a connection, or of a further request on it, until its answer has been read."""

LOOK_SECONDS = 2.0
"""How often a connection is looked at."""

MAX_OPEN = 1024
"""Connections beyond this are closed without an answer, so that descriptors are left for others."""


class BoundedProtocol(H11Protocol):
    """One connection. The event loop's thread."""

    has_limit = True
    """Whether connections beyond `MAX_OPEN` are closed."""
    _busy_since: float | None = None
    """When the exchange under way began, as far as it was noticed; none between two of them."""
    _look_task: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin to watch the connection, or refuse it if there are too many."""
        super().connection_made(transport)
        if self.has_limit and len(self.connections) > MAX_OPEN:
            transport.abort()
            return
        self._busy_since = self.loop.time()
        self._look_later()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop watching."""
        if self._look_task is not None:
            self._look_task.cancel()
            self._look_task = None
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Note that an answer was written; it may still have to be read."""
        self._busy_since = self.loop.time()
        super().on_response_complete()

    def _look_later(self) -> None:
        self._look_task = self.loop.call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        now = self.loop.time()
        if self._is_idle():
            self._busy_since = None
        elif self._busy_since is None:
            self._busy_since = now
        elif now - self._busy_since > EXCHANGE_SECONDS:
            self.transport.abort()  # to close would wait for a reader who does not read
            return
        self._look_later()

    def _is_idle(self) -> bool:
        """Whether an answer was given and read, and no part of a further request has come, nor of a body is to come."""
        cycle: RequestResponseCycle | None = self.cycle  # uvicorn sets it with the first request
        is_answered = cycle is not None and cycle.response_complete
        is_whole = self.conn.their_state is not h11.SEND_BODY and not self.conn.trailing_data[0]
        return is_answered and is_whole and self.transport.get_write_buffer_size() == 0


class BoundedRequestProtocol(BoundedProtocol):
    """A connection whose answers may take their time, as generated text does: only its requests have to come in one.

    How long a body may take, and what waits for a slow reader, is the application's to bound.
    """

    has_limit = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what uvicorn makes a connection with."""
        super().__init__(*args, **kwargs)
        self._inner = self.app
        self.app = self._with_direct_write

    async def _with_direct_write(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
        send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
    ) -> None:
        """Call the application, and let it write without detours where that is HTTP's chunked coding."""
        if scope["http_version"] == "1.1" and scope["method"] != "HEAD":
            scope.setdefault("extensions", {})[DIRECT_WRITE] = {"write": DirectWrite(self)}
        await self._inner(scope, receive, send)

    def _is_idle(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        # One that was given up has an answer without an end: closing waits for a reader who may never read.
        is_answering = cycle is not None and not cycle.response_complete and not self.transport.is_closing()
        return is_answering or super()._is_idle()


class DirectWrite:
    """Writes pieces of an answer of unknown length, all but the last, without a turn through ASGI and h11.

    A step of a model is a piece for each of its readers. What is written is what uvicorn would write for the same
    piece.
    """

    __slots__ = ("_cycle", "_flow", "_transport")

    def __init__(self, connection: BoundedRequestProtocol) -> None:
        self._cycle: RequestResponseCycle = connection.cycle
        self._flow = connection.flow
        self._transport = connection.transport

    @property
    def has_room(self) -> bool:
        """Whether a piece can be written now; otherwise `send` has to do it, which may wait."""
        cycle = self._cycle
        return not (
            self._flow.write_paused
            or self._transport.is_closing()
            or not cycle.response_started
            or cycle.response_complete
        )

    def __call__(self, piece: bytes) -> None:
        """Write a piece, while there is room.

        Args:
            piece: Part of a body that has begun, and is neither empty nor its end.
        """
        assert piece, "an empty chunk would be the end of the body"
        self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))


class BoundedStreamProtocol(BoundedRequestProtocol):
    """The same, with a limit of connections, and who takes nothing of an answer for so long is hung up on.

    For a listener that few people speak to.
    """

    has_limit = True
    _is_paused = False
    """Whether more is to be sent than the reader takes."""

    def pause_writing(self) -> None:
        """Begin to wait for the reader."""
        self._is_paused, self._busy_since = True, self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        """Go on: the reader has taken something."""
        self._is_paused = False
        super().resume_writing()

    def _is_idle(self) -> bool:
        return not self._is_paused and super()._is_idle()
