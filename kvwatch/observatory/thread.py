"""The observatory's thread: an event loop of its own, begun and ended from another thread."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable

import structlog

from kvwatch.errors import ExporterError
from kvwatch.ledger.pace import pause

STOP_SECONDS = 5.0
"""`stop` waits no longer than this for the thread."""

logger = structlog.get_logger(__name__)


class LoopThread:
    """Runs one coroutine on a thread until it is told to stop. `start` and `stop` on one thread; the rest on any.

    Args:
        main: What is run. It calls `begun` as soon as it works, and ends soon after the event that it is given is set.
    """

    def __init__(self, main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
        self._main = main
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._has_begun = threading.Event()
        self._failure: Exception | None = None
        self.cpu_seconds = 0.0
        """Processor time that the thread took, as of a second ago."""

    @property
    def was_started(self) -> bool:
        """Whether `start` was called."""
        return self._thread is not None

    @property
    def is_running(self) -> bool:
        """Whether the thread is up."""
        return self._thread is not None and self._thread.is_alive()

    def begun(self) -> None:
        """Let `start` return."""
        self._has_begun.set()

    def start(self) -> None:
        """Begin, and return when `begun` was called.

        Raises:
            ExporterError: the thread failed before that.
        """
        self._thread = threading.Thread(target=self._run, name="kvwatch-observatory", daemon=True)
        self._thread.start()
        self._has_begun.wait()
        if self._failure is not None:
            raise ExporterError(f"the observatory could not start ({self._failure!r})") from self._failure

    def stop(self, timeout_seconds: float = STOP_SECONDS) -> None:
        """End the thread. Safe twice, and without `start`.

        Waits at most `timeout_seconds`; a thread that is stuck beyond that ends with the process.
        """
        thread, loop, stop = self._thread, self._loop, self._stop
        if thread is None or loop is None or stop is None or not thread.is_alive():
            return
        with contextlib.suppress(RuntimeError):  # the loop has just closed by itself
            loop.call_soon_threadsafe(stop.set)
        thread.join(timeout_seconds)
        if thread.is_alive():
            logger.warning("the observatory's thread did not end in time", timeout_seconds=timeout_seconds)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            asyncio.run(self._begin())
        except Exception as error:
            self._failure = error
            logger.exception("the observatory ended by an error; the engine is not affected")
        finally:
            self._has_begun.set()

    async def _begin(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        measuring = asyncio.create_task(self._measure(self._stop))
        try:
            await self._main(self._stop)
        finally:
            measuring.cancel()

    async def _measure(self, stop: asyncio.Event) -> None:
        """Note the processor time of this thread; only the thread itself can read it."""
        while not stop.is_set():
            self.cpu_seconds = time.thread_time()
            await pause(stop)
