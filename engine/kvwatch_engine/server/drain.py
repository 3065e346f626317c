"""Refusing new work while running requests finish."""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from kvwatch_engine.contracts.errors import EngineOverloaded

T = TypeVar("T")


class Drain:
    """Whether the server takes new requests, and how many it is working on. Event loop only."""

    def __init__(self, retry_after_seconds: int) -> None:
        self._is_draining = False
        self._num_running = 0
        self._arriving: set[asyncio.Task[Any]] = set()
        self._retry_after_seconds = retry_after_seconds

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused."""
        return self._is_draining

    @property
    def num_running(self) -> int:
        """Requests that have begun and not ended."""
        return self._num_running

    @property
    def num_arriving(self) -> int:
        """Requests whose body is not complete yet."""
        return len(self._arriving)

    def begin_drain(self) -> None:
        """Refuse new requests with 503 and fail `/ready` from now on. Safe to call twice."""
        self._is_draining = True
        for task in self._arriving:
            task.cancel()

    async def unless_draining(self, arrival: Coroutine[Any, Any, T]) -> T:
        """Wait for a request to arrive; one that is not complete when the drain begins is refused, not waited for.

        Raises:
            EngineOverloaded: the server drains.
        """
        if self._is_draining:
            arrival.close()
            raise self._refusal()
        task = asyncio.ensure_future(arrival)
        self._arriving.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self.is_draining and task.cancelled():
                raise self._refusal() from None
            task.cancel()
            raise
        finally:
            self._arriving.discard(task)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count a request for as long as it runs.

        Raises:
            EngineOverloaded: the server drains.
        """
        if self._is_draining:
            raise self._refusal()
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1

    async def wait_idle(self, seconds: float) -> bool:
        """Wait until nothing runs, at most `seconds`; return whether that came about."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while self._num_running and loop.time() < deadline:
            await asyncio.sleep(0.02)
        return not self._num_running

    def _refusal(self) -> EngineOverloaded:
        return EngineOverloaded(
            "the server is shutting down and takes no new requests; send it to another one, or retry later",
            reason="draining",
            retry_after_seconds=self._retry_after_seconds,
        )
