"""What clients talk to: sends each request to a replica, and again to another one when that one is lost.

An answer that the client has not begun to see is asked for again. One that was lost in the middle of a stream ends with
an error event in place of `[DONE]`; no client can take it for a whole one.
"""

import logging
from collections.abc import AsyncIterator
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from kvwatch_ray.forwarded import Forwarded, Head, end_to_end, error_body
from kvwatch_ray.routing import prefix_of

ATTEMPTS = 4
"""Replicas that a request is sent to, one after the other."""

RETRY_AFTER = {"retry-after": "5"}
LOST = "the replica that answered was lost; send the request again"
logger = logging.getLogger("ray.serve")


class Gateway:
    """The ingress.

    Args:
        replicas: Handle of the engine replicas, whose router chooses by prefix.
        fleet: Handle of the `Fleet`.
    """

    def __init__(self, replicas: Any, fleet: Any) -> None:
        self._replicas = replicas.options(stream=True)
        self._fleet = fleet

    async def __call__(self, request: Request) -> Response:
        """Answer a request of any path: two are the gateway's own, the others the engine's."""
        try:
            if request.url.path == "/metrics":
                page: str = await self._fleet.page.remote()
                return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")
            if request.url.path == "/kvwatch/replicas":
                return JSONResponse(await self._fleet.table.remote())
        except RayActorError:
            body = error_body("the reports of the replicas were lost; they come again within seconds", "fleet_lost")
            return Response(body, 503, RETRY_AFTER, "application/json")
        body = await request.body()
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        return await self._answer(Forwarded(request.method, path, end_to_end(request.headers), body))

    async def _answer(self, request: Forwarded) -> Response:
        prefix = prefix_of(request.path, request.body)
        for attempt in range(ATTEMPTS):
            pieces = self._replicas.answer.remote(request, prefix=prefix)
            try:
                return await self._begun(pieces)
            except RayActorError as error:
                logger.warning("a replica was lost (attempt %d of %d): %s", attempt + 1, ATTEMPTS, type(error).__name__)
            except BackPressureError:
                body = error_body("all replicas are full; retry later", "overloaded")
                return Response(body, 503, RETRY_AFTER, "application/json")
        return Response(error_body(LOST, "replica_lost"), 503, RETRY_AFTER, "application/json")

    async def _begun(self, pieces: Any) -> Response:
        """Return an answer of which nothing can be lost unseen: whole, or a stream whose first event is there."""
        head: Head = await anext(pieces)
        if head.is_stream:
            first: bytes = await anext(pieces, b"")
            return StreamingResponse(_relayed(first, pieces), head.status, head.headers)
        return Response(b"".join([piece async for piece in pieces]), head.status, head.headers)


async def _relayed(first: bytes, pieces: Any) -> AsyncIterator[bytes]:
    yield first
    try:
        async for piece in pieces:
            yield piece
    except RayActorError:
        yield b"data: " + error_body(LOST, "replica_lost") + b"\n\n"
    finally:
        pieces.cancel()  # a client that went away: the engine must not work for nobody
