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
import socket
from collections.abc import Iterator, Sequence

import structlog

from kvwatch.control import EngineControl
from kvwatch.errors import ExporterError
from kvwatch.exporters.exemplars import ExemplarStore
from kvwatch.exporters.identity import EngineIdentity
from kvwatch.exporters.prometheus.asgi import MetricsApp, make_listener
from kvwatch.exporters.prometheus.page import MetricsPage
from kvwatch.exporters.prometheus.process import ProcessMetrics
from kvwatch.ledger.mirror import Mirror
from kvwatch.ledger.series import SeriesSettings
from kvwatch.ledger.view import HistogramSample, Sample, View
from kvwatch.listener import Listener, bind
from kvwatch.observatory.part import Part
from kvwatch.observatory.thread import STOP_SECONDS, LoopThread
from kvwatch.observatory.watch import Watch, WatchOptions
from kvwatch.telemetry.log import EventLog

METRICS_SETTING = "--metrics-listen"

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
        view_interval_seconds: float = 0.5,
        render_interval_seconds: float = 1.0,
    ) -> None:
        options = WatchOptions(
            parts=parts,
            series=series,
            exemplars=exemplars,
            has_vllm_aliases=has_vllm_aliases,
            view_interval_seconds=view_interval_seconds,
        )
        self._control = control
        self._metrics_listen = metrics_listen
        self._watch = Watch(log, control, lambda: identity, options)
        self._page = MetricsPage(self._watch, log.clock, render_interval_seconds)
        self._watch.add_sources(ProcessMetrics(lambda: self._watch.collectors, self._thread_seconds))
        self._socket: socket.socket | None = None
        self._thread = LoopThread(self._main)
        self.metrics_app = MetricsApp(self._page)
        """ASGI application that answers with the metrics page; any event loop may call it."""

    @property
    def mirror(self) -> Mirror:
        """Ledger and counters behind the view. They belong to the observatory's thread: for parts, nobody else."""
        return self._watch.mirror

    @property
    def view(self) -> View:
        """The newest view."""
        return self._watch.mirror.view

    def samples(self) -> Iterator[Sample | HistogramSample]:
        """Give everything that the metrics page shows, as it is now. Any thread."""
        return self._watch.samples()

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
        return self._thread.is_running

    def start(self) -> None:
        """Begin to listen and to collect; returns when both have begun.

        The first view appears when the engine has answered with a snapshot: it need not run yet.

        Raises:
            ConfigError: `metrics_listen` is no address.
            ExporterError: an address cannot be bound, a part cannot open, the observatory was started before, or its
                thread failed.
        """
        if self._thread.was_started:
            raise ExporterError("the observatory was started before; make a new one for every start")
        if self._metrics_listen is not None:
            self._socket = bind(self._metrics_listen, METRICS_SETTING)
        try:
            self._watch.open()
        except BaseException:
            if self._socket is not None:
                self._socket.close()
            raise
        self._watch.attach()
        self._thread.start()

    def stop(self, timeout_seconds: float = STOP_SECONDS) -> None:
        """Apply what the log still holds, close the listener, end the thread. Safe twice, and without `start`.

        Waits at most `timeout_seconds`; a thread that is stuck beyond that ends with the process.
        """
        self._thread.stop(timeout_seconds)

    # ------------------------------------------------------------ the thread

    async def _main(self, stop: asyncio.Event) -> None:
        try:
            listener = self._make_listener()
            tasks = self._watch.tasks(stop)
            if listener is not None:
                tasks.append(listener.serve(stop))
            self._thread.begun()
            # A listener that fails does not end the collection, nor the other way round.
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(outcome, Exception):
                    logger.error("a part of the observatory failed; the engine is not affected", error=repr(outcome))
        finally:
            self._watch.finish()
            if self._socket is not None:
                self._socket.close()

    def _make_listener(self) -> Listener | None:
        if self._socket is None:
            return None
        app = make_listener(self.metrics_app, self._control.is_alive, self._control.is_ready)
        return Listener(app, self._socket)

    def _thread_seconds(self) -> dict[str, float]:
        return {"observatory": self._thread.cpu_seconds, "render": self._page.cpu_seconds}
