"""`GET events`: the log as server-sent events, with a filter, and resumed by `Last-Event-ID`.

Each stream has a cursor of its own. One that falls behind is told which numbers it missed and goes on from the oldest
that is kept; a client that does not read is hung up on by the listener. Nothing here can hold up the engine.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

import kvwatch.telemetry.events  # noqa: F401 - fills the registry
from kvwatch.admin import problems
from kvwatch.admin.engines import AdminEngine, EngineQuery, given
from kvwatch.admin.operation import EVENT_STREAM, PREFIX, Call, Operation, RequestHeader
from kvwatch.admin.problems import Problem
from kvwatch.admin.tokens import Role
from kvwatch.config import unknown_name
from kvwatch.ledger.pace import next_tick
from kvwatch.telemetry.log import GapError
from kvwatch.telemetry.schema import REGISTRY, Event

LAST_EVENT_ID = "Last-Event-ID"
BATCH = 256
"""Events taken without yielding."""
ALIVE_SECONDS = 15.0
"""Silence after which a comment shows that the connection lives."""
LOOK_SECONDS = 1.0
"""How often a stream looks whether its reader is still allowed to read."""
MAX_SECONDS = 86_400.0
MAX_DIGITS = 18
TOKEN_FIELDS = ("token_ids", "image_hashes")
"""Fields that tell what people wrote; only for tokens with the role `prompts`."""
_KNOWN = sorted({spec.name for spec in REGISTRY} | {spec.family for spec in REGISTRY})
_NAMES = "|".join(re.escape(name) for name in _KNOWN)
_REQUEST_FIELDS = ("request", "for_request")


class EventsQuery(EngineQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which events are wanted."""

    events: Annotated[
        str,
        Meta(
            description="Names or families of events, as `block,request.finished`; all if empty.",
            extra_json_schema={"pattern": f"^(({_NAMES})(,({_NAMES}))*)?$"},
        ),
    ] = ""
    request: Annotated[
        Annotated[str, Meta(min_length=1, max_length=512)] | UnsetType, Meta(description="Events of this request.")
    ] = UNSET
    seconds: Annotated[float, Meta(ge=0, le=MAX_SECONDS, description="When the stream ends; resume it then.")] = 3600.0


@dataclass(frozen=True, slots=True)
class EventFilter:
    """What a stream lets through."""

    classes: frozenset[type[Event]]
    request: str | None
    may_see_tokens: bool
    is_still_allowed: Callable[[], bool] = lambda: True
    """Whether the token that the reader came with lets it in yet."""

    def lets_through(self, event: Event) -> bool:
        """Whether an event is wanted."""
        if type(event) not in self.classes:
            return False
        return self.request is None or any(getattr(event, name, None) == self.request for name in _REQUEST_FIELDS)


class _Permit:
    """Looks now and then whether a reader may read on: a stream outlives the moment in which its token was checked."""

    def __init__(self, is_still_allowed: Callable[[], bool], now: float) -> None:
        self._is_still_allowed = is_still_allowed
        self._looked = now

    def is_over(self, now: float) -> bool:
        """Whether the reader may not read on."""
        if now - self._looked < LOOK_SECONDS:
            return False
        self._looked = now
        return not self._is_still_allowed()


class EventStreams:
    """All streams of one listener. Its loop only, except the counts.

    Args:
        limit: Streams at a time.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.num_running = 0
        self.num_gaps = 0
        """Times that events were lost to a stream."""
        self.num_lost = 0
        """Events lost."""
        self._ended = asyncio.Event()

    def end(self) -> None:
        """End all streams and begin no further."""
        self._ended.set()

    async def events(
        self, engine: AdminEngine, wanted: EventFilter, last_id: str, seconds: float
    ) -> AsyncGenerator[bytes, None]:
        """Yield what is sent, until the time is over."""
        if self.num_running >= self._limit:
            raise Problem(problems.TOO_MANY, f"{self._limit} event streams are open; end one", {"Retry-After": "5"})
        loop = asyncio.get_running_loop()
        cursor = engine.log.subscribe("admin")
        self.num_running += 1
        try:
            start, missed = _begin(engine, last_id)
            cursor.position = start
            if missed:
                yield missed
            end, spoken, permit = loop.time() + seconds, loop.time(), _Permit(wanted.is_still_allowed, loop.time())
            yield b": " + engine.epoch.encode() + b"\n\n"
            while not self._ended.is_set() and loop.time() < end:
                if permit.is_over(loop.time()):
                    yield b": the token lets nobody in any more\n\n"
                    return
                try:
                    batch = cursor.read(BATCH)
                except GapError as gap:
                    lost_from = cursor.position
                    cursor.resume_at(gap.oldest)
                    self.num_gaps += 1
                    self.num_lost += gap.oldest - lost_from
                    yield _gap(engine, lost_from, gap.oldest, "the stream fell behind")
                    continue
                content = b"".join(_event(engine, each, wanted) for each in batch if wanted.lets_through(each))
                if content or loop.time() - spoken > ALIVE_SECONDS:
                    yield content or b": alive\n\n"
                    spoken = loop.time()
                await (asyncio.sleep(0) if len(batch) == BATCH else next_tick())
        finally:
            cursor.close()
            self.num_running -= 1


class EventStreamResponse(Response):
    """An answer that goes on for long."""

    def __init__(self, content: AsyncGenerator[bytes, None], *, is_head: bool) -> None:
        super().__init__(headers={"Content-Type": EVENT_STREAM, "Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._content = content
        self._is_head = is_head

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the content or the connection ends."""
        del scope
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if not self._is_head:
                await self._send_content(receive, send)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._content.aclose()

    async def _send_content(self, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send_all(send))
        leaving = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in (sending, leaving):
                each.cancel()
            await asyncio.wait({sending, leaving})
        if not sending.cancelled() and (error := sending.exception()) is not None:
            raise error

    async def _send_all(self, send: Send) -> None:
        async for chunk in self._content:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})


async def get_events(call: Call[EventsQuery, None]) -> Response:
    """Stream events."""
    query = call.query
    engine = call.site.engines.find(query)
    caller = call.caller
    wanted = EventFilter(
        _classes(query.events), given(query.request), caller.may(Role.PROMPTS), caller.is_still_allowed
    )
    last_id = call.headers.get(LAST_EVENT_ID.lower(), "")
    content = call.site.streams.events(engine, wanted, last_id, query.seconds)
    if call.is_head:
        return EventStreamResponse(content, is_head=True)
    return EventStreamResponse(_chain(await anext(content), content), is_head=False)  # what is refused is refused now


async def _chain(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    try:
        yield first
        async for each in rest:
            yield each
    finally:
        await rest.aclose()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


def _begin(engine: AdminEngine, last_id: str) -> tuple[int, bytes]:
    """Return the number to begin with, and what is to be said of what was missed."""
    log = engine.log
    if not last_id:
        return log.head, b""
    epoch, _, number = last_id.rpartition("-")
    is_ours = epoch == engine.epoch and number.isascii() and number.isdigit() and len(number) <= MAX_DIGITS
    if not is_ours or int(number) >= log.head:
        oldest = max(0, log.head - log.capacity)
        return oldest, _gap(engine, None, oldest, "the id is of no event of this run of the engine")
    return int(number) + 1, b""


def _gap(engine: AdminEngine, first: int | None, after: int, why: str) -> bytes:
    data = msgspec.json.encode({"event": "gap", "first_missed": first, "next": after, "reason": why})
    place = b"id: %s-%d\n" % (engine.epoch.encode(), after - 1) if after else b""
    return b"%sevent: gap\ndata: %s\n\n" % (place, data)


def _event(engine: AdminEngine, event: Event, wanted: EventFilter) -> bytes:
    clock = engine.log.clock
    content: dict[str, Any] = {
        "event": REGISTRY.of(type(event)).name,
        "unix_ns": event.time_ns + clock.wall_ns() - clock.monotonic_ns(),
    }
    for name in event.__struct_fields__:
        if wanted.may_see_tokens or name not in TOKEN_FIELDS:
            content[name] = _shown(getattr(event, name))
    name = content["event"].encode()
    return b"id: %s-%d\nevent: %s\ndata: %s\n\n" % (engine.epoch.encode(), event.seq, name, _encode(content))


def _shown(value: Any) -> Any:
    """Return a value with its byte strings as hexadecimal digits."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list) and value and any(isinstance(each, bytes | list) for each in value):
        return [_shown(each) for each in value]
    return value


_encode: Callable[[Any], bytes] = msgspec.json.Encoder(enc_hook=str).encode


def _classes(text: str) -> frozenset[type[Event]]:
    """Return the classes of events that a list of names and families means."""
    specs = list(REGISTRY)
    names = {name.strip() for name in text.split(",") if name.strip()}
    for name in names - set(_KNOWN):
        raise Problem(problems.INVALID, str(unknown_name(name[:64], _KNOWN, "parameter events:")))
    return frozenset(spec.cls for spec in specs if not names or spec.name in names or spec.family in names)


OPERATIONS = (
    Operation(
        method="GET", path=f"{PREFIX}/events", name="streamEvents", tag="read",
        brief="Events as they happen, as server-sent events; what a stream missed comes as the event `gap`.",
        query=EventsQuery, answer=None, handler=get_events, is_answered_here=True,
        headers=(
            RequestHeader(
                name=LAST_EVENT_ID, brief="Id of the last event that was seen; the stream goes on after it.",
            ),
        ),
    ),
)  # fmt: skip
