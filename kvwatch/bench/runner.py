"""All requests of a run: closed loop (a fixed number of clients) or open loop (requests have times)."""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from kvwatch.bench.outcome import RequestOutcome
from kvwatch.bench.scenarios import RequestSpec

LAG_INTERVAL_SECONDS = 0.02


class Sender(Protocol):
    """Sends one request."""

    async def send(self, spec: RequestSpec, intended_seconds: float, now: Callable[[], float]) -> RequestOutcome:
        """Ask, and return what became of it."""
        ...


class Run:
    """One run. Event loop only."""

    def __init__(
        self,
        sender: Sender,
        specs: Sequence[RequestSpec],
        concurrency: int | None,
        max_seconds: float | None = None,
        on_done: Callable[[RequestOutcome], None] = lambda _outcome: None,
    ) -> None:
        """Create a run.

        Args:
            sender: Sends requests.
            specs: Requests in their order; either all have times or none has.
            concurrency: Requests under way at once; None for no limit (open loop only).
            max_seconds: After this no new request begins; those under way go on to their end.
            on_done: Told of every request that ended.
        """
        self._sender = sender
        self._specs = specs
        self._concurrency = concurrency
        self._max_seconds = max_seconds
        self._on_done = on_done
        self._start = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._defect: BaseException | None = None
        self.outcomes: list[RequestOutcome] = []
        self.is_interrupted = False
        self.duration_seconds = 0.0
        self.lags: list[float] = []
        """By how many seconds this process's own event loop was late, looked at 50 times a second."""

    def now(self) -> float:
        """Return the seconds since the run began."""
        return time.perf_counter() - self._start

    def interrupt(self) -> None:
        """Begin no new request and break off those under way; `run` then returns."""
        self.is_interrupted = True
        for task in tuple(self._tasks):
            task.cancel()

    async def run(self, beside: Sequence[Callable[[Callable[[], float]], Awaitable[None]]] = ()) -> None:
        """Send everything and wait for all ends.

        Args:
            beside: What runs meanwhile, given the run's clock; it is cancelled at the end.
        """
        self._start = time.perf_counter()
        others = [asyncio.ensure_future(each(self.now)) for each in (self._watch_lag, *beside)]
        with _interrupted_by_signal(self.interrupt):
            try:
                await (self._closed_loop() if self._is_closed() else self._open_loop())
            finally:
                self.duration_seconds = self.now()
                for other in others:
                    other.cancel()
                for end in await asyncio.gather(*others, return_exceptions=True):
                    # What runs beside never ends by itself; if it did, it was a defect, and its numbers are missing.
                    if isinstance(end, Exception):
                        raise end

    def _is_closed(self) -> bool:
        return not self._specs or self._specs[0].due_seconds is None

    async def _closed_loop(self) -> None:
        specs = iter(self._specs)
        for _ in range(min(self._concurrency or 1, len(self._specs))):
            self._begin(self._client(specs))
        await self._all_ended()

    async def _client(self, specs: Iterator[RequestSpec]) -> None:
        while not self._is_over():
            spec = next(specs, None)
            if spec is None:
                return
            await self._send(spec, self.now())

    async def _open_loop(self) -> None:
        room = asyncio.Semaphore(self._concurrency) if self._concurrency else None
        # A task of its own, so that an interrupt ends it too.
        self._begin(self._release(room))
        await self._all_ended()

    async def _release(self, room: asyncio.Semaphore | None) -> None:
        for spec in self._specs:
            due = spec.due_seconds or 0.0
            await asyncio.sleep(max(0.0, due - self.now()))
            if self._is_over():
                return
            self._begin(self._when_there_is_room(spec, due, room))

    async def _when_there_is_room(self, spec: RequestSpec, due: float, room: asyncio.Semaphore | None) -> None:
        if room is None:
            await self._send(spec, due)
            return
        async with room:
            if not self._is_over():
                await self._send(spec, due)

    async def _send(self, spec: RequestSpec, intended_seconds: float) -> None:
        outcome = await self._sender.send(spec, intended_seconds, self.now)
        self.outcomes.append(outcome)
        self._on_done(outcome)

    def _is_over(self) -> bool:
        return self.is_interrupted or (self._max_seconds is not None and self.now() >= self._max_seconds)

    def _begin(self, work: "Awaitable[None]") -> None:
        task = asyncio.ensure_future(work)
        assert isinstance(task, asyncio.Task)
        self._tasks.add(task)
        task.add_done_callback(self._on_end)

    def _on_end(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            self._defect = self._defect or task.exception()

    async def _all_ended(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)
            await asyncio.sleep(0)  # lets the callbacks of the last ends run
        if self._defect is not None:
            raise self._defect

    async def _watch_lag(self, _now: Callable[[], float]) -> None:
        while True:
            due = time.perf_counter() + LAG_INTERVAL_SECONDS
            await asyncio.sleep(LAG_INTERVAL_SECONDS)
            self.lags.append(time.perf_counter() - due)


@contextmanager
def _interrupted_by_signal(interrupt: Callable[[], None]) -> Iterator[None]:
    """Call `interrupt` at the first SIGINT; the second ends the process as usual. Outside the main thread: nothing."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        interrupt()

    try:
        loop.add_signal_handler(signal.SIGINT, on_signal)
    except (ValueError, RuntimeError, NotImplementedError):
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
