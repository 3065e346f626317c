"""The observatory inside an engine's process: one thread that collects events and answers on the metrics listener.

    log = EventLog()
    identity = EngineIdentity("chat", model_name="smollm2")
    observatory = Observatory(log, control, identity, metrics_listen="127.0.0.1:9400")
    observatory.start()
    ...
    observatory.stop()

The engine's API server may mount `observatory.metrics_app` as well: both show the same bytes.
"""

import asyncio
import contextlib
import socket
import threading
import time

import structlog

from kvwatch.control import EngineControl
from kvwatch.errors import ExporterError
from kvwatch.exporters.identity import EngineIdentity
from kvwatch.exporters.listener import Listener, bind
from kvwatch.exporters.prometheus.asgi import MetricsApp, make_listener
from kvwatch.exporters.prometheus.families import ViewCollector
from kvwatch.exporters.prometheus.page import MetricsPage
from kvwatch.exporters.prometheus.process import ProcessMetrics
from kvwatch.ledger.collector import Collector
from kvwatch.ledger.mirror import Mirror
from kvwatch.ledger.view import View
from kvwatch.telemetry.log import EventLog

METRICS_SETTING = "--metrics-listen"
STOP_SECONDS = 5.0
"""`stop` waits no longer than this for the thread."""

logger = structlog.get_logger(__name__)


class Observatory:
    """Watches one engine. `start` and `stop` on one thread; everything else on any.

    Args:
        log: The engine's event log. Events are recorded from `start` to `stop` only.
        control: The engine.
        identity: Labels of every series.
        metrics_listen: `HOST:PORT` of the metrics listener, port 0 for any free one; none for no listener.
        view_interval_seconds: Least time between two views while the engine is busy; 0 for one at every step.
        render_interval_seconds: Least time between two renderings of the page; 0 renders for every scrape.
    """

    def __init__(
        self,
        log: EventLog,
        control: EngineControl,
        identity: EngineIdentity,
        *,
        metrics_listen: str | None = None,
        view_interval_seconds: float = 0.1,
        render_interval_seconds: float = 1.0,
    ) -> None:
        self._log = log
        self._control = control
        self._metrics_listen = metrics_listen
        self._mirror = Mirror(log.clock, view_interval_seconds)
        self._collector: Collector | None = None
        self._cpu_seconds = 0.0
        self._process = ProcessMetrics(self._subscribers, self._thread_seconds)
        self._page = MetricsPage(
            ViewCollector(lambda: self._mirror.view, [self._process], identity),
            log.clock,
            render_interval_seconds,
        )
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._has_begun = threading.Event()
        self._failure: Exception | None = None
        self.metrics_app = MetricsApp(self._page)
        """ASGI application that answers with the metrics page; any event loop may call it."""

    @property
    def view(self) -> View:
        """The newest view."""
        return self._mirror.view

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        """Host and port of the metrics listener while it is up."""
        if self._socket is None or self._socket.fileno() < 0:
            return None
        host, port = self._socket.getsockname()[:2]
        return host, port

    @property
    def is_running(self) -> bool:
        """Whether the thread is up."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Begin to listen and to collect; returns when both have begun.

        The first view appears when the engine has answered with a snapshot: it need not run yet.

        Raises:
            ConfigError: `metrics_listen` is no address.
            ExporterError: the address cannot be bound, the observatory was started before, or its thread failed.
        """
        if self._thread is not None:
            raise ExporterError("the observatory was started before; make a new one for every start")
        if self._metrics_listen is not None:
            self._socket = bind(self._metrics_listen, METRICS_SETTING)
        self._collector = Collector(self._log, self._control.snapshot, self._mirror)
        self._thread = threading.Thread(target=self._run, name="kvwatch-observatory", daemon=True)
        self._thread.start()
        self._has_begun.wait()
        if self._failure is not None:
            raise ExporterError(f"the observatory could not start ({self._failure!r})") from self._failure

    def stop(self, timeout_seconds: float = STOP_SECONDS) -> None:
        """Apply what the log still holds, close the listener, end the thread. Safe twice, and without `start`.

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
            asyncio.run(self._main())
        except Exception as error:
            self._failure = error
            logger.exception("the observatory ended by an error; the engine is not affected")
        finally:
            self._has_begun.set()

    async def _main(self) -> None:
        assert self._collector is not None
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        try:
            listener = self._make_listener()
            tasks = [self._collector.run(self._stop), self._measure(self._stop)]
            if listener is not None:
                tasks.append(listener.serve(self._stop))
            self._has_begun.set()
            # A listener that fails does not end the collection, nor the other way round.
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(outcome, Exception):
                    logger.error("a part of the observatory failed; the engine is not affected", error=repr(outcome))
        finally:
            self._collector.finish()
            if self._socket is not None:
                self._socket.close()

    def _make_listener(self) -> Listener | None:
        if self._socket is None:
            return None
        app = make_listener(self.metrics_app, self._control.is_alive, self._control.is_ready)
        return Listener(app, self._socket)

    async def _measure(self, stop: asyncio.Event) -> None:
        """Note the processor time of this thread; only the thread itself can read it."""
        while not stop.is_set():
            self._cpu_seconds = time.thread_time()
            try:
                await asyncio.wait_for(stop.wait(), 1.0)
            except TimeoutError:
                continue

    def _subscribers(self) -> list[Collector]:
        return [] if self._collector is None else [self._collector]

    def _thread_seconds(self) -> dict[str, float]:
        return {"observatory": self._cpu_seconds, "render": self._page.cpu_seconds}
