"""The answer to a request that streams: events, sent as the engine produces what they tell."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Final, Protocol

import structlog
from starlette.types import Scope, Send

from kvwatch_engine.contracts.request import SequenceOutput
from kvwatch_engine.server.choice import ChoiceDelta
from kvwatch_engine.server.errors import ClientGone, GenerationFailed
from kvwatch_engine.server.events import joined
from kvwatch_engine.server.generation import Run
from kvwatch_engine.server.request_log import RequestRecord
from kvwatch_engine.server.shapes import Plan

DIRECT_WRITE: Final = "kvwatch.direct_write"
"""ASGI extension of servers that can write a piece of a body past ASGI; its entry `write` is a `DirectWrite`."""


class DirectWrite(Protocol):
    """Writes pieces of a body that has begun."""

    @property
    def has_room(self) -> bool:
        """Whether a piece can be written now."""
        ...

    def __call__(self, piece: bytes) -> None:
        """Write a piece that is not empty, while there is room."""
        ...


_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the events otherwise
]
_KEEPALIVE = b": waiting\n\n"
_log = structlog.get_logger("kvwatch.server")


async def stream_answer(plan: Plan, run: Run, record: RequestRecord, writer: "StreamWriter") -> None:
    """Send a run as it is generated.

    An error of the engine in mid-stream becomes an event of its own.

    Raises:
        ClientGone: the client hung up, or does not read.
    """
    await writer.start()
    shape = plan.shape
    if first := shape.begin():
        await writer.write(joined(first))
    if writer.is_direct:
        run.give_to(_taker(plan, run, record, writer))
    try:
        async for deltas in run.deltas():
            record.saw(deltas)
            if any(delta.prompt for delta in deltas):  # a long prompt's take a while to write
                events = await asyncio.to_thread(_events, plan, deltas)
            else:
                events = _events(plan, deltas)
            await writer.write(events or _KEEPALIVE)
        last = shape.end(run.usage())
    except GenerationFailed as error:
        record.finish_reasons.append("error")
        last = shape.failed(error, run.usage())
    await writer.write(joined(last) + shape.mark_of_end, is_last=True)


def _taker(plan: Plan, run: Run, record: RequestRecord, writer: "StreamWriter") -> Callable[[SequenceOutput], bool]:
    """Return what sends further text of a choice within the call that brings it, for as long as the client reads.

    A task that is woken up for each token of each stream costs as much as all that is to be done with the token.
    """

    def take(output: SequenceOutput) -> bool:
        if output.finish_reason is not None or not writer.has_room:
            return False
        delta = run.add(output)
        if delta is not None:
            record.saw((delta,))
            writer.write_now(_events(plan, (delta,)) or _KEEPALIVE)
        return True

    return take


def _events(plan: Plan, deltas: Iterable[ChoiceDelta]) -> bytes:
    shape = plan.shape
    return b"".join([shape.text_event(delta) or joined(shape.chunks(delta)) for delta in deltas])


class StreamWriter:
    """Sends a body in pieces; a client that does not take one in time counts as gone."""

    def __init__(self, scope: Scope, send: Send, seconds: float) -> None:
        """Write the answer to a request.

        Args:
            scope: the request's; it may offer to write without `send`.
            send: its ASGI channel.
            seconds: how long a piece may have to wait.
        """
        self._send = send
        self._seconds = seconds
        self._direct: DirectWrite | None = (scope.get("extensions") or {}).get(DIRECT_WRITE, {}).get("write")

    @property
    def is_direct(self) -> bool:
        """Whether pieces can be written without `write`."""
        return self._direct is not None

    @property
    def has_room(self) -> bool:
        """Whether `write_now` may be called: the answer has begun, and the client reads."""
        return self._direct is not None and self._direct.has_room

    def write_now(self, body: bytes) -> None:
        """Send a piece that is not empty; only while there is room."""
        assert self._direct is not None, "`has_room` was asked"
        self._direct(body)

    async def start(self) -> None:
        """Send status and headers."""
        await self._send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})

    async def write(self, body: bytes, *, is_last: bool = False) -> None:
        """Send a piece, which is not empty unless it is the last.

        Raises:
            ClientGone: the client hung up, or does not read.
        """
        if not is_last and self.has_room:
            self.write_now(body)  # no layer has anything to do with it, and no timer is needed
            return
        try:
            async with asyncio.timeout(self._seconds):
                await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})
        except TimeoutError as error:
            raise ClientGone(f"the client took nothing for {self._seconds:g} s") from error
        except OSError as error:
            raise ClientGone("the client hung up") from error
