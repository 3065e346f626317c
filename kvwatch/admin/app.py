"""The ASGI application: every request takes the same way, and only what is listed gets through.

    Host, Origin -> token -> path and method -> role -> rate -> parameters, body -> handler -> JSON, ETag

What is wrong ends as `application/problem+json`. Knows no operation by name.
"""

import asyncio
import hashlib
from collections.abc import Mapping, Sequence

import msgspec
import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvwatch.admin import problems
from kvwatch.admin.access import SAFE_METHODS, AccessGuard
from kvwatch.admin.decoding import decode_body, decode_query
from kvwatch.admin.forwarding import engine_elsewhere, forward
from kvwatch.admin.operation import Answer, Call, Operation
from kvwatch.admin.problems import Problem
from kvwatch.admin.routing import Match, RouteTable
from kvwatch.admin.site import Site
from kvwatch.errors import ChangeRefused, ControlError

MAX_BODY_BYTES = 256 * 1024
BODY_SECONDS = 20.0
"""Time in which a body must have come."""
MAX_HEADER_BYTES = 16 * 1024
JSON_TYPE = "application/json"

_HARDENING = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}

logger = structlog.get_logger(__name__)


class AdminApp:
    """Answers the admin listener. One event loop.

    Args:
        operations: Everything that is answered.
        guard: Who may ask.
        site: What handlers work with.
    """

    def __init__(self, operations: Sequence[Operation], guard: AccessGuard, site: Site) -> None:
        self._routes = RouteTable(operations)
        self._guard = guard
        self._site = site
        self._encode = msgspec.json.Encoder().encode

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        try:
            response = await self._answer(request)
        except Problem as problem:
            response = problem.response()
        except ClientDisconnect:
            return
        except ControlError as error:
            response = _control_problem(error).response()
        except Exception:
            logger.exception("an admin request failed", method=request.method)
            detail = "the request met a defect of kvwatch; its log says where"
            response = Problem(problems.DEFECT, detail).response()
        for name, value in _HARDENING.items():
            response.headers.setdefault(name, value)
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        if sum(len(name) + len(value) for name, value in request.headers.raw) > MAX_HEADER_BYTES:
            raise Problem(problems.LONG_HEADERS, f"the headers have more than {MAX_HEADER_BYTES} bytes; send fewer")
        self._guard.check_addressing(request)
        caller = self._guard.identify(request)
        match = self._routes.find(request.scope["raw_path"])
        if match is None:
            raise Problem(problems.NOT_FOUND, "nothing is offered under this path; /openapi.json lists what is")
        operation = _operation(match, request.method)
        self._guard.check_role(request, caller, operation.role)
        if operation.is_change:
            self._guard.take_change(caller)
        query = decode_query(operation.query, request)
        headers = dict(request.headers)
        _check_headers(operation, headers)
        content = await _content(operation, request)
        body = None if operation.body is None else decode_body(content, operation.body)
        is_head = request.method == "HEAD"
        call = Call(self._site, caller, match.parameters, query, body, headers, is_head)
        engine = engine_elsewhere(operation, call)
        if engine is not None:
            return await forward(engine, call, request, content)
        answer = await operation.handler(call)
        return answer if isinstance(answer, Response) else self._json(answer, request)

    def _json(self, answer: Answer, request: Request) -> Response:
        content = self._encode(answer.body)
        headers = dict(answer.headers)
        if request.method in SAFE_METHODS:
            tag = headers.setdefault("ETag", etag(content))
            wanted = request.headers.get("if-none-match", "")
            if wanted and any(each.strip().removeprefix("W/") in {"*", tag} for each in wanted.split(",")):
                return Response(status_code=304, headers=headers)
        response = Response(content, headers=headers, media_type=JSON_TYPE)
        if request.method == "HEAD":
            response.body = b""  # its length was told
        return response


def etag(content: bytes) -> str:
    """Return the strong entity tag of a body."""
    return f'"{hashlib.sha256(content).hexdigest()[:32]}"'


def _operation(match: Match, method: str) -> Operation:
    found = match.operations.get("GET" if method == "HEAD" else method)
    if found is None:
        allowed = ", ".join(match.methods)
        detail = f"{method} is not offered here; offered: {allowed}"
        raise Problem(problems.METHOD_NOT_ALLOWED, detail, {"Allow": allowed})
    return found


def _check_headers(operation: Operation, headers: Mapping[str, str]) -> None:
    for header in operation.headers:
        if header.is_required and not headers.get(header.name.lower()):
            detail = f"the header {header.name} is missing; send the ETag of what the change was decided on"
            raise Problem(problems.PRECONDITION_REQUIRED, detail)


async def _content(operation: Operation, request: Request) -> bytes:
    if operation.body is None:
        return b""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != JSON_TYPE:
        raise Problem(problems.NOT_JSON, f"Content-Type is {media_type!r}; send {JSON_TYPE}")
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _collect(request)
    except TimeoutError as error:
        raise Problem(problems.SLOW_BODY, f"the body did not come within {BODY_SECONDS:g} s; send it again") from error


async def _collect(request: Request) -> bytes:
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > MAX_BODY_BYTES:
            raise Problem(problems.TOO_LARGE, f"the body has more than {MAX_BODY_BYTES} bytes; send less")
    return bytes(content)


def _control_problem(error: ControlError) -> Problem:
    if isinstance(error, ChangeRefused):
        return Problem(problems.CONFLICT, str(error), {"Retry-After": "1"} if error.is_passing else None)
    return Problem(problems.UNAVAILABLE, str(error), {"Retry-After": "1"})
