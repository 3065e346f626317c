"""The observatory of a sidecar: one thread and one metrics page for many engines, which may appear later.

    fleet = Fleet(metrics_listen="127.0.0.1:9400", runners=[source.run ...])
    fleet.start()
    ...
    fleet.add(watch)      # on its thread, when an engine or another rank of it becomes known
    ...
    fleet.stop()

Each engine is a `Watch` of its own: what fails for one does not touch another. The listener says that it is healthy and
ready whatever its engines do, since a sidecar must never take the pod of its model out of service.
"""

import asyncio
import socket
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import structlog

from kvwatch.derive.metrics import PREFIX
from kvwatch.errors import ExporterError
from kvwatch.exporters.identity import COMMON_LABELS
from kvwatch.exporters.prometheus.asgi import MetricsApp, make_listener
from kvwatch.exporters.prometheus.families import Family, SampleSource, Series
from kvwatch.exporters.prometheus.labels import printable
from kvwatch.exporters.prometheus.page import MetricsPage
from kvwatch.exporters.prometheus.process import ProcessMetrics, subscriber_samples
from kvwatch.ledger.view import Sample
from kvwatch.listener import Listener, bind
from kvwatch.observatory.observatory import METRICS_SETTING
from kvwatch.observatory.part import Part
from kvwatch.observatory.thread import STOP_SECONDS, LoopThread
from kvwatch.observatory.watch import Watch, always
from kvwatch.telemetry.clock import SystemClock
from kvwatch.telemetry.metrics import CATALOGUE
from kvwatch.telemetry.schema import Metric

Runner = Callable[[asyncio.Event], Awaitable[None]]
"""Something that lives on the fleet's loop until the event is set."""

LabelledSample = tuple[tuple[str, str, str], Sample]
"""The three common labels, and a sample."""

NOBODY = ("", "", "")
"""Common labels of what concerns no engine: for Prometheus an empty label is an absent one."""

FINISH_SECONDS = 3.0
"""What sources and parts get for ending by themselves."""

_PLACES = {PREFIX + metric.name: place for place, metric in enumerate(CATALOGUE)}

logger = structlog.get_logger(__name__)


class Fleet:
    """Watches many engines. `start` and `stop` on one thread, `add` on its own; everything else on any.

    Args:
        metrics_listen: `HOST:PORT` of the metrics listener, port 0 for any free one; none for no listener.
        runners: What brings engines to it, such as sources; begun after the listener.
        parts: What serves all engines together, such as the event stream.
        more: Further samples with their common labels, such as those of engines that were never reached.
        render_interval_seconds: Least time between two renderings of the page; 0 renders for every scrape.
    """

    def __init__(
        self,
        *,
        metrics_listen: str | None = None,
        runners: Sequence[Runner] = (),
        parts: Sequence[Part] = (),
        more: Callable[[], Iterable[LabelledSample]] = tuple,
        render_interval_seconds: float = 1.0,
    ) -> None:
        self._metrics_listen = metrics_listen
        self._runners = runners
        self._parts = parts
        self._more = more
        self._watches: tuple[Watch, ...] = ()  # replaced as a whole, so that any thread may read it
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop: asyncio.Event | None = None
        self._socket: socket.socket | None = None
        self._thread = LoopThread(self._main)
        self._page = MetricsPage(self, SystemClock(), render_interval_seconds)
        process = ProcessMetrics(
            list, lambda: {"observatory": self._thread.cpu_seconds, "render": self._page.cpu_seconds}
        )
        self._own: list[SampleSource] = [process, *(part.samples for part in parts)]

    @property
    def watches(self) -> Sequence[Watch]:
        """Engines that are watched, in the order in which they were added."""
        return self._watches

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        """Host and port of the metrics listener while it is up."""
        if self._socket is None or self._socket.fileno() < 0:
            return None
        host, port = self._socket.getsockname()[:2]
        return host, port

    def families(self) -> Iterator[Family]:
        """Yield the families of all engines, merged, in the order of the catalogue. Any thread."""
        merged: dict[str, Family] = {}
        for source in (self._own_families, *(watch.families for watch in self._watches)):
            try:
                found = list(source())
            except Exception as error:  # one engine's defect must not hide the others
                logger.warning("metrics of an engine could not be read", error=repr(error))
                continue
            for family in found:
                known = merged.get(family.name)
                merged[family.name] = (
                    family if known is None else replace(known, series=(*known.series, *family.series))
                )
        yield from sorted(merged.values(), key=lambda family: _PLACES.get(family.name, len(_PLACES)))

    def start(self) -> None:
        """Begin to listen and to run; returns when both have begun.

        Raises:
            ConfigError: `metrics_listen` is no address.
            ExporterError: an address cannot be bound, a part cannot open, it was started before, or its thread failed.
        """
        if self._thread.was_started:
            raise ExporterError("the observatory was started before; make a new one for every start")
        if self._metrics_listen is not None:
            self._socket = bind(self._metrics_listen, METRICS_SETTING)
        opened: list[Part] = []
        try:
            for part in self._parts:
                part.open()
                opened.append(part)
        except BaseException:
            for part in opened:
                part.close()
            if self._socket is not None:
                self._socket.close()
            raise
        self._thread.start()

    def stop(self, timeout_seconds: float = STOP_SECONDS) -> None:
        """End sources, apply what their logs still hold, close the listener, end the thread. Safe twice."""
        self._thread.stop(timeout_seconds)

    def add(self, watch: Watch) -> None:
        """Watch one more engine, or none of it: what cannot be opened is logged. The fleet's thread only."""
        assert self._stop is not None, "the fleet does not run"
        try:
            watch.open()
        except Exception as error:  # the other engines go on
            logger.warning("an engine cannot be watched", engine=watch.identity().engine, error=str(error))
            return
        watch.add_sources(lambda: subscriber_samples(watch.collectors))
        watch.attach()
        self._watches = (*self._watches, watch)
        for task in watch.tasks(self._stop):
            self._spawn(task)

    # ------------------------------------------------------------ the thread

    async def _main(self, stop: asyncio.Event) -> None:
        self._stop = stop
        try:
            for part in self._parts:
                self._spawn(part.run(stop))
            if self._socket is not None:
                app = make_listener(MetricsApp(self._page), always, always)
                self._spawn(Listener(app, self._socket).serve(stop))
            for runner in self._runners:
                self._spawn(runner(stop))
            self._thread.begun()
            await stop.wait()
            await self._wait_for_tasks()
        finally:
            for watch in self._watches:
                watch.finish()
            for part in self._parts:
                part.close()
            if self._socket is not None:
                self._socket.close()

    async def _wait_for_tasks(self) -> None:
        _, late = await asyncio.wait(self._tasks, timeout=FINISH_SECONDS)
        for task in late:
            task.cancel()
        if late:
            logger.warning("some parts of the sidecar did not end in time", number=len(late))
            await asyncio.wait(late, timeout=1.0)

    def _spawn(self, task: Awaitable[None]) -> None:
        spawned = asyncio.ensure_future(_guarded(task))
        self._tasks.add(spawned)
        spawned.add_done_callback(self._tasks.discard)

    def _own_families(self) -> Iterator[Family]:
        by_metric: dict[Metric, list[Series]] = defaultdict(list)
        own = ((NOBODY, sample) for source in self._own for sample in source())
        for common, sample in (*own, *self._more()):
            assert isinstance(sample, Sample), "nothing here tells histograms"
            by_metric[sample.metric].append((tuple(map(printable, (*common, *sample.labels))), sample.value))
        for metric, series in by_metric.items():
            names = (*COMMON_LABELS, *metric.labels)
            yield Family(PREFIX + metric.name, metric.kind, metric.brief, names, series)


async def _guarded(task: Awaitable[None]) -> None:
    try:
        await task
    except Exception:  # what fails for one engine does not end the others
        logger.exception("a part of the sidecar failed; the others go on")
