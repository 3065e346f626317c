"""The read-only listener: GET and HEAD on /metrics, /health, /ready, and nothing else."""

import asyncio
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvwatch.exporters.prometheus.page import MetricsPage

METHODS = ("GET", "HEAD")


class MetricsApp:
    """ASGI application that answers every path with the metrics page; mount it where it belongs.

    May be called from several event loops at once: the page is shared between threads, and rendered in a thread of
    the loop that asks.
    """

    def __init__(self, page: MetricsPage) -> None:
        self._page = page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        response: Response
        if scope["method"] in METHODS:
            response = await self._answer(Request(scope))
        else:
            response = PlainTextResponse("Method Not Allowed", 405, {"Allow": ", ".join(METHODS)})
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        accept = request.headers.get("accept", "")
        page = self._page.shared(accept)
        if page is None:
            page = await asyncio.to_thread(self._page.render, accept)
        headers = {"Content-Type": page.content_type, "Cache-Control": "no-store", "Vary": "Accept"}
        return Response(page.body, headers=headers)


def make_listener(metrics: ASGIApp, is_alive: Callable[[], bool], is_ready: Callable[[], bool]) -> Starlette:
    """Return the listener's application.

    Args:
        metrics: Answers /metrics.
        is_alive: Whether the engine makes progress; decides about /health.
        is_ready: Whether the engine takes requests; decides about /ready.
    """

    def health(_: Request) -> Response:
        return _status(is_alive, "ok", "the engine's step loop is stuck or has ended")

    def ready(_: Request) -> Response:
        return _status(is_ready, "ready", "the engine takes no requests: it loads, drains or has ended")

    app = Starlette(
        routes=[
            Route("/metrics", metrics),
            Route("/health", health, methods=["GET"]),
            Route("/ready", ready, methods=["GET"]),
        ]
    )
    app.router.redirect_slashes = False
    return app


def _status(ask: Callable[[], bool], yes: str, no: str) -> Response:
    try:
        is_good = ask()
    except Exception:  # an engine that cannot even answer is not well
        is_good = False
    return PlainTextResponse(yes if is_good else no, 200 if is_good else 503, {"Cache-Control": "no-store"})
