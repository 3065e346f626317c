"""One log line for each request, and the ids that tie together what belongs to it.

The request id is the client's `x-request-id` if that is sane, else a new one; it is sent back. The trace is the one
that the client's `traceparent` names if that is valid, else a new one. Both ids are on every line that is logged while
the request is handled.
"""

import re
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvwatch.telemetry.trace_context import TraceContext, begin_trace, read_trace_parent
from kvwatch_engine.contracts.errors import EngineOverloaded, RequestInvalid
from kvwatch_engine.server.choice import ChoiceDelta
from kvwatch_engine.server.errors import ApiError, ClientGone, internal_error, shorten
from kvwatch_engine.server.protocol.reply import Usage

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that hung up; in the log only."""
MAX_STATE_CHARS = 512
"""Longest `tracestate` that is passed on, which the W3C asks for; tens of thousands of events are kept in memory."""
_RECORD = "kvwatch.record"
_SANE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_QUIET_PATHS = ("/health", "/ready", "/metrics")
"""Asked every few seconds by machines: logged at debug level."""
_log = structlog.get_logger("kvwatch.server")


@dataclass(slots=True)
class RequestRecord:
    """What is known of a request when it ends."""

    request_id: str
    trace: TraceContext = field(default_factory=begin_trace)
    trace_state: str = ""
    """The client's `tracestate`; empty if there was none, or no valid `traceparent` beside it."""
    begin: float = field(default_factory=time.monotonic)
    status: int = 0
    key_name: str = ""
    """Name of the API key that was sent; empty where none is asked for."""
    answer_id: str = ""
    is_stream: bool = False
    usage: Usage | None = None
    first_token_seconds: float | None = None
    finish_reasons: list[str] = field(default_factory=list)
    error_param: str | None = None
    error_code: str | None = None
    """As in the answer's error. Its message may quote what the client sent, and is in the answer only."""

    def saw(self, deltas: Sequence[ChoiceDelta]) -> None:
        """Note the time of the first text and why choices ended."""
        if deltas and self.first_token_seconds is None:
            self.first_token_seconds = time.monotonic() - self.begin
        for delta in deltas:
            if delta.finish_reason is not None:
                self.finish_reasons.append(delta.finish_reason)

    def fields(self) -> dict[str, object]:
        """Return what the log line says beside method and path."""
        found: dict[str, object] = {"status": self.status, "seconds": round(time.monotonic() - self.begin, 4)}
        if self.key_name:
            found["api_key"] = self.key_name
        if self.error_param is not None:
            found["error_param"] = shorten(self.error_param)
        if self.error_code is not None:
            found["error_code"] = self.error_code
        if self.answer_id:
            found |= {"answer_id": self.answer_id, "is_stream": self.is_stream, "finish": self.finish_reasons}
        if self.first_token_seconds is not None:
            found["first_token_seconds"] = round(self.first_token_seconds, 4)
        if self.usage is not None:
            found["prompt_tokens"] = self.usage.prompt_tokens
            found["cached_tokens"] = self.usage.prompt_tokens_details.cached_tokens
            found["generated_tokens"] = self.usage.completion_tokens
        return found


def record_of(scope: Scope) -> RequestRecord:
    """Return the record of the request that is being handled."""
    record = scope[_RECORD]
    assert isinstance(record, RequestRecord)
    return record


def noting(handler: Callable[[Request, Exception], Response]) -> Callable[[Request, Exception], Response]:
    """Return an exception handler that also puts the error's `param` and `code` into the request's line."""

    def handle(request: Request, error: Exception) -> Response:
        record = record_of(request.scope)
        if isinstance(error, ApiError | RequestInvalid):
            record.error_param, record.error_code = error.param, error.code
        elif isinstance(error, EngineOverloaded):
            record.error_code = error.reason
        return handler(request, error)

    return handle


class RequestLog:
    """Middleware: names each request, logs its end, and answers 500 for what nobody caught."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection scope."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = scope[_RECORD] = RequestRecord(_request_id(scope), *_trace(scope))
        with structlog.contextvars.bound_contextvars(request_id=record.request_id, trace_id=record.trace.trace_id):
            try:
                await self._handle(scope, receive, _naming(send, record), record)
            finally:
                write = _log.debug if scope["path"] in _QUIET_PATHS else _log.info
                write("request", method=scope["method"], path=shorten(scope["path"], 256), **record.fields())

    async def _handle(self, scope: Scope, receive: Receive, send: Send, record: RequestRecord) -> None:
        try:
            await self._app(scope, receive, send)
        except ClientGone as error:
            record.status = CLIENT_CLOSED_REQUEST
            _log.info("client_gone", reason=str(error))
        except Exception:
            _log.exception("request_failed")
            if record.status:
                return  # the answer has begun; what is missing of it tells the client
            await internal_error()(scope, receive, send)


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _SANE_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"


def _trace(scope: Scope) -> tuple[TraceContext, str]:
    """Return the trace of a request and the `tracestate` that belongs to it."""
    headers = Headers(scope=scope)
    given = headers.getlist("traceparent")
    trace = read_trace_parent(given[0]) if len(given) == 1 else None
    if trace is None:
        return begin_trace(), ""
    state = ",".join(headers.getlist("tracestate"))
    return trace, state if len(state) <= MAX_STATE_CHARS else ""


def _naming(send: Send, record: RequestRecord) -> Send:
    """Return a `send` that adds the id to the answer and notes its status."""

    async def named(message: Message) -> None:
        if message["type"] == "http.response.start":
            record.status = message["status"]
            MutableHeaders(scope=message)["x-request-id"] = record.request_id
        await send(message)

    return named
