"""The observatory inside an engine's process: one thread that collects events and answers on the metrics listener.

Further parts (an exporter, a recorder, the stream) follow the log beside the ledger, each with a cursor of its own.

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
from collections.abc import Callable, Iterable, Iterator, Sequence

import structlog

from kvwatch.control import EngineControl
from kvwatch.errors import ExporterError
from kvwatch.exporters.exemplars import ExemplarStore
from kvwatch.exporters.identity import EngineIdentity
from kvwatch.exporters.listener import Listener, bind
from kvwatch.exporters.prometheus.asgi import MetricsApp, make_listener
from kvwatch.exporters.prometheus.families import ViewCollector
from kvwatch.exporters.prometheus.gateway import gateway_samples
from kvwatch.exporters.prometheus.page import MetricsPage
from kvwatch.exporters.prometheus.process import ProcessMetrics
from kvwatch.ledger.collector import Collector
from kvwatch.ledger.mirror import Mirror
from kvwatch.ledger.series import SeriesSettings
from kvwatch.ledger.view import HistogramSample, Sample, View
from kvwatch.observatory.part import Part
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
        parts: What else follows the log.
        series: Allow-lists of labels and further bounds of histograms.
        exemplars: Traces that the page gives for buckets of latencies; whoever exports traces fills it.
        has_vllm_aliases: Whether the page offers vLLM's names too.
        view_interval_seconds: Least time between two views while the engine is busy; 0 for one at every step.
        render_interval_seconds: Least time between two renderings of the page; 0 renders for every scrape.
    """

    def __init__(  # noqa: PLR0913 - by keyword
        self,
        log: EventLog,
        control: EngineControl,
        identity: EngineIdentity,
        *,
        metrics_listen: str | None = None,
        parts: Sequence[Part] = (),
        series: SeriesSettings | None = None,
        exemplars: ExemplarStore | None = None,
        has_vllm_aliases: bool = False,
        view_interval_seconds: float = 0.1,
        render_interval_seconds: float = 1.0,
    ) -> None:
        self._log = log
        self._control = control
        self._metrics_listen = metrics_listen
        self._mirror = Mirror(log.clock, view_interval_seconds, series=series)
        self._parts = parts
        self._collectors: list[Collector] = []
        self._cpu_seconds = 0.0
        self._process = ProcessMetrics(self._subscribers, self._thread_seconds)
        self._sources: list[Callable[[], Iterable[Sample]]] = [
            self._process,
            lambda: gateway_samples(self._mirror.view),
            *(part.samples for part in parts),
        ]
        self._page = MetricsPage(
            ViewCollector(
                lambda: self._mirror.view,
                self._sources,
                identity,
                exemplars=exemplars,
                has_vllm_aliases=has_vllm_aliases,
            ),
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
    def mirror(self) -> Mirror:
        """Ledger and counters behind the view. They belong to the observatory's thread: for parts, nobody else."""
        return self._mirror

    @property
    def view(self) -> View:
        """The newest view."""
        return self._mirror.view

    def samples(self) -> Iterator[Sample | HistogramSample]:
        """Give everything that the metrics page shows, as it is now. Any thread."""
        view = self._mirror.view
        yield from view.gauges
        yield from view.counters
        yield from view.histograms
        for source in self._sources:
            yield from source()

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
            ExporterError: an address cannot be bound, a part cannot open, the observatory was started before, or its
                thread failed.
        """
        if self._thread is not None:
            raise ExporterError("the observatory was started before; make a new one for every start")
        if self._metrics_listen is not None:
            self._socket = bind(self._metrics_listen, METRICS_SETTING)
        self._open_parts()
        followers = [("ledger", self._mirror), *((part.name, part.follower) for part in self._parts)]
        self._collectors = [
            Collector(self._log, self._control.snapshot, follower, name) for name, follower in followers if follower
        ]
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

    def _open_parts(self) -> None:
        """Open all parts, or none: what was opened is closed again when a later one is refused."""
        with contextlib.ExitStack() as opened:
            if self._socket is not None:
                opened.callback(self._socket.close)
            for part in self._parts:
                part.open()
                opened.callback(part.close)
            opened.pop_all()

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
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        try:
            listener = self._make_listener()
            tasks = [self._measure(self._stop)]
            tasks += [collector.run(self._stop) for collector in self._collectors]
            tasks += [part.run(self._stop) for part in self._parts]
            if listener is not None:
                tasks.append(listener.serve(self._stop))
            self._has_begun.set()
            # A listener that fails does not end the collection, nor the other way round.
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(outcome, Exception):
                    logger.error("a part of the observatory failed; the engine is not affected", error=repr(outcome))
        finally:
            self._end_parts()
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

    def _end_parts(self) -> None:
        ends = [each.finish for each in self._collectors] + [part.close for part in self._parts]
        for end in ends:
            try:
                end()
            except Exception as error:  # the others must still write what they have
                logger.warning("a part of the observatory did not end well", error=repr(error))

    def _subscribers(self) -> list[Collector]:
        return self._collectors

    def _thread_seconds(self) -> dict[str, float]:
        return {"observatory": self._cpu_seconds, "render": self._page.cpu_seconds}
