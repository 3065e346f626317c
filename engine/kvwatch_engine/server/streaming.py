"""Server-sent events: `data: {json}` and a blank line for each chunk, after its name where it has one."""

import asyncio
from collections.abc import Iterable

import msgspec
import structlog
from starlette.types import Send

from kvwatch_engine.server.choice import ChoiceDelta
from kvwatch_engine.server.errors import ClientGone, GenerationFailed
from kvwatch_engine.server.generation import Run
from kvwatch_engine.server.protocol.reply import NamedEvent
from kvwatch_engine.server.request_log import RequestRecord
from kvwatch_engine.server.settings import ServerSettings
from kvwatch_engine.server.shapes import Plan

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the events otherwise
]
_KEEPALIVE = b": waiting\n\n"
_SEPARATORS = tuple((each.encode(), b"\\u%04x" % ord(each)) for each in "\x85\u2028\u2029")
"""What JSON leaves as it is and many clients, Python's `splitlines` among them, take for the end of a line."""

_encode = msgspec.json.Encoder().encode
_log = structlog.get_logger("kvwatch.server")


async def stream_answer(plan: Plan, run: Run, record: RequestRecord, settings: ServerSettings, send: Send) -> None:
    """Send a run as it is generated.

    An error of the engine in mid-stream becomes an event of its own.

    Raises:
        ClientGone: the client hung up, or does not read.
    """
    writer = _Writer(send, settings.write_seconds)
    await writer.start()
    shape = plan.shape
    if first := shape.begin():
        await writer.write(_joined(first))
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
    await writer.write(_joined(last) + shape.mark_of_end, is_last=True)


def _events(plan: Plan, deltas: Iterable[ChoiceDelta]) -> bytes:
    return b"".join(_joined(plan.shape.chunks(delta)) for delta in deltas)


def _joined(chunks: Iterable[msgspec.Struct]) -> bytes:
    return b"".join(map(_event, chunks))


def _event(chunk: msgspec.Struct) -> bytes:
    content = _encode(chunk)
    for separator, escaped in _SEPARATORS:
        content = content.replace(separator, escaped)
    name = f"event: {chunk.__struct_config__.tag}\n".encode() if isinstance(chunk, NamedEvent) else b""
    return name + b"data: " + content + b"\n\n"


class _Writer:
    """Sends a body in pieces; a client that does not take one in time counts as gone."""

    def __init__(self, send: Send, seconds: float) -> None:
        self._send = send
        self._seconds = seconds

    async def start(self) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})

    async def write(self, body: bytes, *, is_last: bool = False) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})
        except TimeoutError as error:
            raise ClientGone(f"the client took nothing for {self._seconds:g} s") from error
        except OSError as error:
            raise ClientGone("the client hung up") from error
