"""`kvwatch.v1.Control`: the admin API for whoever calls over gRPC. The observatory's loop.

Each call goes through the same application as over HTTP, so that who may do what is decided in one place. Here a token
is always needed, also for reading and on loopback. Event streams are not offered: `kvwatch.v1.Telemetry` has them.
"""

from typing import Any

import grpc
from starlette.types import ASGIApp, Message

from kvwatch.admin.access import NEEDS_TOKEN, ON_BEHALF_OF
from kvwatch.admin.operation import PREFIX
from kvwatch.wire.control import DESCRIPTOR, METHOD, SERVICE, CallReply, decode_request, encode_reply

AUTHORIZATION = "authorization"
MAX_NAME = 200

_CODES = {
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


class ControlService:
    """The service; `attach` the application before it is called."""

    full_name = SERVICE
    descriptor = DESCRIPTOR

    def __init__(self) -> None:
        self._app: ASGIApp | None = None

    def attach(self, app: ASGIApp) -> None:
        """Say who answers."""
        self._app = app

    def handlers(self) -> dict[str, Any]:
        """Return the methods."""
        return {METHOD: grpc.unary_unary_rpc_method_handler(self._call)}

    async def _call(self, content: bytes, context: Any) -> bytes:
        app = self._app
        if app is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the admin API does not run yet; call again")
        try:
            request = decode_request(content)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        sent = [value for key, value in context.invocation_metadata() or () if key == AUTHORIZATION]
        if sent and request.path.startswith(f"{PREFIX}/events"):
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "events are streamed by kvwatch.v1.Telemetry/Subscribe")
        headers = [(AUTHORIZATION, str(value)) for value in sent] + [("host", "localhost")]
        if request.body:
            headers.append(("content-type", "application/json"))
        if request.if_match:
            headers.append(("if-match", request.if_match))
        scope = _scope(request.method, request.path, headers, context.peer(), request.on_behalf_of)
        assert app is not None
        reply = await _ask(app, scope, request.body)
        code = _CODES.get(reply.status)
        if code is not None:
            await context.abort(code, reply.body.decode("utf-8", "replace"))
        return encode_reply(reply)


def _scope(method: str, path: str, headers: list[tuple[str, str]], peer: str, on_behalf_of: str) -> dict[str, Any]:
    plain, _, query = path.partition("?")
    return {
        "type": "http",
        "method": method.upper(),
        "path": plain,
        "raw_path": plain.encode(),
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers],
        "client": (_address(peer), 0),
        NEEDS_TOKEN: True,
        ON_BEHALF_OF: "".join(letter for letter in on_behalf_of[:MAX_NAME] if letter.isprintable()),
    }


def _address(peer: str) -> str:
    """Return the address in gRPC's name of a peer, such as `ipv4:127.0.0.1:4711`."""
    kind, _, rest = peer.partition(":")
    if kind not in {"ipv4", "ipv6"}:
        return peer
    return rest.rpartition(":")[0].replace("%5B", "").replace("%5D", "").strip("[]")


async def _ask(app: ASGIApp, scope: dict[str, Any], body: bytes) -> CallReply:
    """Have the application answer."""
    status, headers, content = 500, {}, bytearray()

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status = message["status"]
            headers = {name.decode().lower(): value.decode("latin-1") for name, value in message["headers"]}
        else:
            content.extend(message.get("body", b""))

    await app(scope, receive, send)
    return CallReply(
        status=status, content_type=headers.get("content-type", ""), etag=headers.get("etag", ""), body=bytes(content)
    )
