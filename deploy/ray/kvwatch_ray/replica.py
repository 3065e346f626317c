"""One replica: an engine in a child process, and the actor that passes requests on to it.

The two live and die together. An engine that ends takes its actor with it, so that Ray sees one kind of failure and the
gateway asks another replica; an actor that ends takes its engine with it.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
from ray import serve
from ray.exceptions import RayError

from kvwatch.telemetry import metrics as m
from kvwatch_ray.child import EngineProcess
from kvwatch_ray.fleet import Report
from kvwatch_ray.forwarded import Forwarded, Head, end_to_end
from kvwatch_ray.pages import stalled_seconds, value_of
from kvwatch_ray.scaling import STALLED, USAGE, WAITING

REPORT_SECONDS = 10.0
ENGINE_LOST = 70
"""Exit status of an actor whose engine has ended (EX_SOFTWARE)."""

logger = logging.getLogger("ray.serve")


class EngineReplica:
    """Starts an engine and answers with it.

    Args:
        fleet: Handle of the `Fleet` to report to.
        command: What starts kvwatch.
        flags: Flags of `kvwatch serve` beside those that the replica sets.
    """

    def __init__(self, fleet: Any, command: Sequence[str], flags: Sequence[str]) -> None:
        rank = serve.get_replica_context().rank
        self._name = f"ray-{getattr(rank, 'rank', rank)}"
        self._fleet = fleet
        self._engine = EngineProcess(command, flags, self._name, on_end=lambda: os._exit(ENGINE_LOST))
        assert self._engine.addresses is not None
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        # An answer takes as long as it takes: deadlines are the engine's, and a client that goes away is passed on.
        self._client = httpx.AsyncClient(base_url=self._engine.addresses.api, timeout=None, limits=limits)  # noqa: S113
        self._signals: dict[str, float] = {}
        self._reporting: asyncio.Task[None] | None = None
        self._last_stall: tuple[float, float] | None = None

    async def answer(self, request: Forwarded, *, prefix: str) -> AsyncIterator[Head | bytes]:
        """Yield the head of the engine's answer, then its body as it comes.

        Args:
            request: What the client sent.
            prefix: What the router chose this replica by; not used here.
        """
        del prefix
        async with self._client.stream(
            request.method, request.path, headers=request.headers, content=request.body
        ) as answer:
            yield Head(answer.status_code, end_to_end(answer.headers))
            async for piece in answer.aiter_bytes():
                yield piece

    async def check_health(self) -> None:
        """Fail if the engine makes no steps. Ray asks every few seconds; the fleet is told at the same time."""
        if self._reporting is None or self._reporting.done():
            self._reporting = asyncio.create_task(self._report())
        (await self._client.get("/health", timeout=5)).raise_for_status()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the signals that `scaling.kv_pressure` decides by."""
        await self._look()
        return self._signals

    async def _look(self) -> str:
        page = (await self._client.get("/metrics", timeout=5)).text
        found = {
            USAGE: value_of(page, m.KV_USAGE_RATIO, {"tier": "device"}),
            WAITING: value_of(page, m.REQUESTS, {"state": "waiting"}),
            STALLED: self._stall_ratio(stalled_seconds(page)),
        }
        self._signals = {name: value for name, value in found.items() if value is not None}
        return page

    def _stall_ratio(self, seconds: float | None) -> float | None:
        """Return the part of the time since the last look in which requests waited for blocks."""
        if seconds is None:
            return None
        last, self._last_stall = self._last_stall, (time.monotonic(), seconds)
        if last is None or self._last_stall[0] <= last[0]:
            return None
        return max(0.0, seconds - last[1]) / (self._last_stall[0] - last[0])

    async def _report(self) -> None:
        """Tell the fleet. That it cannot be told is no reason to take a model out of service."""
        addresses = self._engine.addresses
        assert addresses is not None
        try:
            page = await self._look()
            report = Report(
                self._name, socket.gethostname(), os.getpid(), self._engine.pid, addresses.admin, addresses.grpc,
                self._signals, page,
            )  # fmt: skip
            await asyncio.wait_for(self._fleet.report.remote(report), REPORT_SECONDS)
        except (httpx.HTTPError, RayError, TimeoutError) as error:
            logger.warning("the fleet could not be told: %s", error)

    def __del__(self) -> None:
        """Let requests finish; Ray calls this when it takes a replica away."""
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.stop()
