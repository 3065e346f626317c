"""Has another process answer what is asked of its engine: a sidecar's part in the admin API.

What the ledger and the log here know is answered here, also while the engine is not reached. Everything else goes to
the engine under the sidecar's own token, which has to have the role; who asked the sidecar is in both audit trails.
"""

from typing import Any
from urllib.parse import urlencode

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvwatch.admin.engines import AdminEngine, EngineQuery
from kvwatch.admin.operation import Call, Operation
from kvwatch.admin.threads import off_loop
from kvwatch.errors import ControlError
from kvwatch.wire.control import CallReply, CallRequest

ACTION = "forward"


def engine_elsewhere(operation: Operation, call: Call[Any, Any]) -> AdminEngine | None:
    """Return the engine whose process has to answer; none if it is answered here."""
    if operation.is_answered_here or not isinstance(call.query, EngineQuery):
        return None
    engine = call.site.engines.find(call.query)
    return None if engine.forward is None else engine


async def forward(engine: AdminEngine, call: Call[Any, Any], request: Request, body: bytes) -> Response:
    """Have the engine's process answer.

    Raises:
        ControlError: it does not answer.
        Problem: the change cannot be recorded.
    """
    query = [(name, value) for name, value in request.query_params.multi_items() if name not in {"engine", "dp_rank"}]
    path = request.scope["raw_path"].decode("ascii", "replace")
    asked = CallRequest(
        method=request.method,
        path=f"{path}?{urlencode(query)}" if query else path,
        if_match=request.headers.get("if-match", ""),
        body=body,
        on_behalf_of=f"{call.caller.name} at {call.caller.address}",
    )
    if call.body is None or getattr(call.query, "dry_run", False):
        return _response(await _send(engine, asked))
    entry = call.site.entry(call.caller, engine, ACTION, call.body.reason, f"{asked.method} {path}")
    begun = await off_loop(call.site.trail.begin, entry)
    try:
        reply = await _send(engine, asked)
    except ControlError as error:
        call.site.trail.end(msgspec.structs.replace(begun, outcome="failed", message=str(error)))
        raise
    outcome = "done" if reply.status < 400 else "refused"
    call.site.trail.end(msgspec.structs.replace(begun, outcome=outcome, message=f"answered {reply.status}"))
    return _response(reply)


async def _send(engine: AdminEngine, request: CallRequest) -> CallReply:
    assert engine.forward is not None
    return await off_loop(engine.forward, request)


def _response(reply: CallReply) -> Response:
    headers = {"ETag": reply.etag} if reply.etag else {}
    return Response(reply.body, reply.status, headers, reply.content_type or None)
