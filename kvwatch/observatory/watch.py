"""One engine that is watched: its ledger and counters, and the parts that follow its log beside them.

Owns the cursors. Does not know on which thread it lives, nor who else is watched there.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from kvwatch.control import EngineControl
from kvwatch.exporters.exemplars import ExemplarStore
from kvwatch.exporters.identity import EngineIdentity
from kvwatch.exporters.prometheus.families import Family, SampleSource, ViewCollector
from kvwatch.exporters.prometheus.gateway import gateway_samples
from kvwatch.ledger.collector import Collector
from kvwatch.ledger.mirror import Mirror
from kvwatch.ledger.pace import POLL_SECONDS
from kvwatch.ledger.series import SeriesSettings
from kvwatch.ledger.view import HistogramSample, Sample, View
from kvwatch.observatory.part import FollowingPart, Part
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.schema import Metric, MetricKind

SOURCE_PREFIX = "source_"
"""Begins the names of metrics that tell how a source reads, whatever it reads."""

logger = structlog.get_logger(__name__)


def always() -> bool:
    """Return true: an engine in this process is always reached."""
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    """How an engine is watched."""

    parts: Sequence[Part] = ()
    """What else follows the log."""
    series: SeriesSettings | None = None
    exemplars: ExemplarStore | None = None
    has_vllm_aliases: bool = False
    view_interval_seconds: float = 0.5
    period_seconds: float = POLL_SECONDS
    """How often its log is looked at; parts that want it oftener get it oftener."""
    feeds: frozenset[Metric] | None = None
    """For a foreign engine the metrics that its events can feed; the others are absent."""
    samples: Callable[[], Iterable[Sample | HistogramSample]] = tuple
    """What is known of the engine beside its events."""
    is_up: Callable[[], bool] = always
    """Whether the engine is reached; while it is not, nobody knows its state, so its gauges are absent."""


class Watch:
    """Everything about one engine. On the observatory's thread, except what reads views.

    Args:
        log: The engine's event log.
        control: Gives snapshots.
        identity: Returns the labels of every series, as they are now.
        options: How it is watched.
    """

    def __init__(
        self, log: EventLog, control: EngineControl, identity: Callable[[], EngineIdentity], options: WatchOptions
    ) -> None:
        self.log = log
        self.control = control
        self.identity = identity
        self._options = options
        self.mirror = Mirror(log.clock, options.view_interval_seconds, series=options.series, foreign=options.feeds)
        """Ledger and counters."""
        self.collectors: list[Collector] = []
        """One for each follower of the log."""
        self._sources: list[SampleSource] = []
        self._page = ViewCollector(
            self.shown_view,
            self._sources,
            identity(),
            exemplars=options.exemplars,
            has_vllm_aliases=options.has_vllm_aliases,
        )

    def add_sources(self, process: SampleSource) -> None:
        """Say what is shown beside the view: of the process, for gateways, of the parts, and what the options give."""
        options = self._options
        parts = [part.samples for part in options.parts]
        self._sources += [process, lambda: gateway_samples(self.shown_view()), *parts, self._more_samples]

    # ------------------------------------------------------------ reading, on any thread

    def shown_view(self) -> View:
        """Return the newest view, without its gauges while the engine is not reached."""
        view = self.mirror.view
        if self._options.is_up():
            return view
        return View(view.seq, view.step, view.time_ns, (), view.counters, view.histograms)

    def samples(self) -> Iterator[Sample | HistogramSample]:
        """Give everything that the metrics page shows of this engine, as it is now."""
        view = self.shown_view()
        yield from view.gauges
        yield from view.counters
        yield from view.histograms
        for source in self._sources:
            yield from source()

    def families(self) -> Iterable[Family]:
        """Return the same as families."""
        self._page.identity = self.identity()
        return self._page.families()

    def _more_samples(self) -> Iterator[Sample | HistogramSample]:
        """Give what the options give; while the engine is not reached no gauges but those of the source itself."""
        is_up = self._options.is_up()
        for sample in self._options.samples():
            metric = sample.metric
            if is_up or metric.kind is not MetricKind.GAUGE or metric.name.startswith(SOURCE_PREFIX):
                yield sample

    # ------------------------------------------------------------ living

    def open(self) -> None:
        """Open all parts, or none: what was opened is closed again when a later one is refused.

        Raises:
            ExporterError: a part cannot open.
        """
        with contextlib.ExitStack() as opened:
            for part in self._options.parts:
                part.open()
                opened.callback(part.close)
            opened.pop_all()

    def attach(self) -> None:
        """Subscribe all followers to the log."""
        parts = self._options.parts
        take = self.control.snapshot
        period = self._options.period_seconds
        self.collectors.append(Collector(self.log, take, self.mirror, period_seconds=period))
        self.collectors += [
            Collector(self.log, take, part.follower, part.name, min(part.period_seconds, period))
            for part in parts
            if isinstance(part, FollowingPart)
        ]

    def tasks(self, stop: asyncio.Event) -> list[Coroutine[Any, Any, None]]:
        """Return what is to run until `stop` is set."""
        return [
            *(collector.run(stop) for collector in self.collectors),
            *(part.run(stop) for part in self._options.parts),
        ]

    def finish(self) -> None:
        """Apply what the log still holds, and close the parts."""
        ends = [each.finish for each in self.collectors] + [part.close for part in self._options.parts]
        for end in ends:
            try:
                end()
            except Exception as error:  # the others must still write what they have
                logger.warning("a part of the observatory did not end well", error=repr(error))
