"""Who may use the API: every path but a few needs a key, also one that does not exist."""

from collections.abc import Mapping
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from kvwatch.telemetry.events.request import Operation
from kvwatch_engine.contracts.request import EngineClient, RequestOrigin
from kvwatch_engine.server.api_keys import MAX_KEY_CHARS, ApiKeys, Caller
from kvwatch_engine.server.errors import INVALID_REQUEST, error_response
from kvwatch_engine.server.request_log import record_of

OPEN_PATHS: Final = frozenset({"/health", "/ready", "/version", "/metrics"})
"""Asked by orchestrators and scrapers, which have no keys; none shows what anybody wrote."""
_CALLER: Final = "kvwatch.caller"
_SCHEME: Final = "bearer "


def caller_of(scope: Scope) -> Caller | None:
    """Return who sent a request; None when the server asks for no keys."""
    caller = scope.get(_CALLER)
    assert caller is None or isinstance(caller, Caller)
    return caller


class ApiKeyGuard:
    """Middleware inside of the request log: answers 401 to whoever sends no key that is known."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, engine: EngineClient, operations: Mapping[str, Operation]) -> None:
        """Guard `app`; `operations` are the paths whose refused requests count as such."""
        self._app = app
        self._keys = keys
        self._engine = engine
        self._operations = operations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection scope."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).getlist("authorization")
        caller = self._keys.caller(given[0][len(_SCHEME) :].strip()) if _is_bearer(given) else None
        record = record_of(scope)
        if caller is not None:
            scope[_CALLER] = caller
            record.key_name = caller.key_name
            await self._app(scope, receive, send)
            return
        operation = self._operations.get(scope["path"])
        if operation is not None and scope["method"] == "POST":
            origin = RequestOrigin(
                operation=operation, trace_parent=record.trace.to_trace_parent(), trace_state=record.trace_state
            )
            self._engine.note_rejection(record.request_id, "unauthorized", origin, round(record.begin * 1e9))
        await error_response(401, _message(given), INVALID_REQUEST, code="invalid_api_key", headers=_HEADERS)(
            scope, receive, send
        )


_HEADERS: Final = {"www-authenticate": "Bearer", "connection": "close"}  # the body was not read


def _is_bearer(given: list[str]) -> bool:
    return (
        len(given) == 1
        and len(given[0]) <= len(_SCHEME) + MAX_KEY_CHARS
        and given[0][: len(_SCHEME)].lower() == _SCHEME
    )


def _message(given: list[str]) -> str:
    if not given:
        return "no API key was sent; send the header authorization: Bearer KEY"
    return "the API key is unknown or expired, or not sent as authorization: Bearer KEY; ask the operator for one"
