"""`/health`, `/ready` and `/version`.

Liveness and readiness are different questions: a stuck step loop should be restarted, a draining server should not.
"""

from importlib.metadata import version

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvwatch_engine.contracts.request import EngineClient
from kvwatch_engine.server.drain import Drain
from kvwatch_engine.server.errors import error_response
from kvwatch_engine.server.models import json_response
from kvwatch_engine.server.protocol.reply import Status, Version

_UNAVAILABLE = "service_unavailable"


def health_routes(engine: EngineClient, drain: Drain) -> list[Route]:
    """Return the routes that ask after the server's state."""

    async def health(_request: Request) -> Response:
        if engine.is_alive():
            return json_response(Status("ok"))
        return error_response(
            503, "the engine's step loop is stuck or has ended; restart the server", _UNAVAILABLE, code="engine_stuck"
        )

    async def ready(_request: Request) -> Response:
        if drain.is_draining:
            return error_response(503, "the server is shutting down", _UNAVAILABLE, code="draining")
        if engine.is_ready():
            return json_response(Status("ready"))
        return error_response(503, "the engine does not accept requests now", _UNAVAILABLE, code="not_ready")

    async def show_version(_request: Request) -> Response:
        return json_response(Version(version("kvwatch")))

    return [Route("/health", health), Route("/ready", ready), Route("/version", show_version)]
