"""The exporter as the observatory runs it: assembler, senders and transport put together.

Threads:

    observatory           events -> traces -> spans, long-running requests; never waits for the collector
    kvwatch-otlp_spans    spans to the collector; offers exemplars of what was taken
    kvwatch-otlp_metrics  every metric to the collector, every `metrics_interval_seconds`
    kvwatch-otlp_logs     log records to the collector

Knows neither how spans look nor what a collector speaks.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk.resources import Resource
from opentelemetry.util.types import AttributeValue

from kvwatch import __version__
from kvwatch.exporters.exemplars import ExemplarStore
from kvwatch.exporters.identity import EngineIdentity
from kvwatch.exporters.otel.assembler import TraceAssembler
from kvwatch.exporters.otel.genai import GenAiHistograms
from kvwatch.exporters.otel.log_lines import LineHandler, LogEncoder
from kvwatch.exporters.otel.metrics import MetricsEncoder, Reading
from kvwatch.exporters.otel.request_trace import RefusedTrace, RequestTrace
from kvwatch.exporters.otel.sampling import Sampler
from kvwatch.exporters.otel.sender import Sender
from kvwatch.exporters.otel.settings import Endpoint, OtelSettings, parse_endpoint, parse_headers
from kvwatch.exporters.otel.spans import FinishedTrace, SpanBuilder
from kvwatch.exporters.otel.text import clean
from kvwatch.exporters.otel.transport import FailureReasons, Transport, make_transport
from kvwatch.ledger.pace import POLL_SECONDS, pause
from kvwatch.ledger.view import HistogramSample, Sample
from kvwatch.telemetry.clock import Clock

SERVICE_NAME = "kvwatch"
"""`service.name`, unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES says otherwise."""

CLOSE_SECONDS = 1.5
"""What all three senders together get to send the rest at the end."""

MAX_REPORTS_PER_ROUND = 32
"""Long-running requests reported at once; the others follow."""

Samples = Callable[[], Iterable[Sample | HistogramSample]]


class OtelPart:
    """A part of the observatory. `open` before `run`, `close` after it; `samples` on any thread.

    Args:
        settings: Where to send, what to sample.
        identity: Who is watched.
        clock: The clock that stamps events.
        readings: Returns everything that the metrics page shows. Called on the metrics sender's thread.
        exemplars: Is offered the traces that the collector has taken.

    Raises:
        ConfigError: endpoint or headers cannot be read.
    """

    name = "otel"
    period_seconds = POLL_SECONDS

    def __init__(
        self,
        settings: OtelSettings,
        identity: EngineIdentity,
        clock: Clock,
        readings: Samples,
        exemplars: ExemplarStore | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._readings = readings
        self._exemplars = exemplars
        self._endpoint: Endpoint = parse_endpoint(settings.endpoint, settings.protocol)
        self._headers = parse_headers(settings.headers)
        resource = make_resource(identity)
        server: dict[str, AttributeValue] = {}
        if settings.server_address:
            server["server.address"] = clean(settings.server_address)
        if settings.server_port is not None:
            server["server.port"] = settings.server_port
        self._builder = SpanBuilder(resource, identity.model_name, server)
        self._histograms = GenAiHistograms(identity.model_name, server)
        self._metrics_encoder = MetricsEncoder(resource, identity, clock.wall_ns())
        self._log_encoder = LogEncoder(resource)
        self.sampler = Sampler(settings.trace_ratio, settings.slow_seconds)
        self._assembler = TraceAssembler(self.sampler, self._finish, self._refuse)
        self._begin_unix_ns = clock.wall_ns()
        self._reasons = FailureReasons()
        self._transport = self._make_transport()
        self._spans = self._make_span_sender()
        self._metrics = self._make_metrics_sender()
        self._logs = self._make_log_sender()
        self._undo: list[Callable[[], None]] = []

    # ------------------------------------------------------------ Part

    @property
    def follower(self) -> TraceAssembler:
        """What turns events into traces."""
        return self._assembler

    def open(self) -> None:
        """Start the senders. A collector need not be there: it is tried again and again."""
        self._undo.append(self._reasons.attach())
        for sender in self._senders:
            sender.start()
        if self._settings.export_logs:
            handler = LineHandler(self._log_encoder, self._logs.put)
            root = logging.getLogger()
            root.addHandler(handler)
            self._undo.append(lambda: root.removeHandler(handler))

    def samples(self) -> Iterable[Sample]:
        """Return how much each sender has queued, lost and failed to send."""
        for sender in self._senders:
            yield from sender.samples()

    async def run(self, stop: asyncio.Event) -> None:
        """Report long-running requests and have the metrics exported, until `stop` is set."""
        next_export = time.monotonic() + self._settings.metrics_interval_seconds
        period_seconds = min(POLL_SECONDS, self._settings.metrics_interval_seconds)
        while not stop.is_set():
            await pause(stop, period_seconds)
            self._report_long_running()
            if time.monotonic() >= next_export:
                next_export += self._settings.metrics_interval_seconds
                self._export_metrics()

    def close(self) -> None:
        """Send what is left, in bounded time, and end the threads."""
        self._export_metrics()
        for sender in self._senders:
            sender.begin_stop()
        deadline = time.monotonic() + CLOSE_SECONDS
        for sender in self._senders:
            sender.stop(max(0.0, deadline - time.monotonic()))
        while self._undo:
            self._undo.pop()()

    # ------------------------------------------------------------ observatory thread

    def _finish(self, trace: RequestTrace) -> None:
        self._histograms.count(trace)
        if trace.chosen is not None:
            self._spans.put(self._builder.build(trace, self._offset_ns()))

    def _refuse(self, trace: RefusedTrace) -> None:
        self._spans.put(self._builder.build_refused(trace, self._offset_ns()))

    def _report_long_running(self) -> None:
        now_ns, threshold_ns = self._clock.monotonic_ns(), round(self._settings.long_running_seconds * 1e9)
        num_reports = 0
        for trace in self._assembler.live:
            age_ns = now_ns - trace.queued_ns
            if age_ns < threshold_ns or num_reports == MAX_REPORTS_PER_ROUND:
                break  # the others came later
            if now_ns >= trace.report_ns:
                # At the threshold, then at twice the age each time.
                trace.report_ns = now_ns + age_ns
                num_reports += 1
                self._logs.put(self._log_encoder.long_running(trace, now_ns, now_ns + self._offset_ns()))

    def _export_metrics(self) -> None:
        if not self._metrics.num_queued:  # else the collector is behind, and will get the newest state when it comes
            self._metrics.put(None)

    def _offset_ns(self) -> int:
        return self._clock.wall_ns() - self._clock.monotonic_ns()

    # ------------------------------------------------------------ senders' threads

    def _send_traces(self, traces: Sequence[FinishedTrace]) -> bool:
        return self._transport.send_spans([span for trace in traces for span in trace.spans])

    def _send_reading(self, _: Sequence[None]) -> bool:
        now_ns = self._clock.wall_ns()
        extra = tuple(self._histograms.to_metrics(self._begin_unix_ns, now_ns))
        reading = Reading(tuple(self._readings()), extra, now_ns)
        return self._transport.send_metrics(self._metrics_encoder.encode(reading))

    def _offer(self, traces: Sequence[FinishedTrace]) -> None:
        if self._exemplars is None:
            return
        for trace in traces:
            for metric, seconds in trace.observations:
                self._exemplars.offer(metric, seconds, trace.trace_id, trace.span_id, trace.unix_seconds)

    # ------------------------------------------------------------ making

    @property
    def _senders(self) -> tuple[Sender[Any], ...]:
        return (self._spans, self._metrics, self._logs)

    def _make_transport(self) -> Transport:
        return make_transport(self._endpoint, self._headers, self._settings.export_timeout_seconds)

    def _make_span_sender(self) -> Sender[FinishedTrace]:
        return Sender(
            "otlp_spans",
            self._send_traces,
            self._transport.traces.shutdown,
            weigh=lambda trace: len(trace.spans),
            max_queued=self._settings.max_queued_spans,
            delay_seconds=self._settings.batch_seconds,
            on_sent=self._offer,
            why=lambda: self._reasons.last,
        )

    def _make_metrics_sender(self) -> Sender[None]:
        return Sender(
            "otlp_metrics",
            self._send_reading,
            self._transport.metrics.shutdown,
            max_queued=1,
            max_batch=1,
            why=lambda: self._reasons.last,
        )

    def _make_log_sender(self) -> Sender[ReadableLogRecord]:
        return Sender(
            "otlp_logs",
            self._transport.send_logs,
            self._transport.logs.shutdown,
            max_queued=self._settings.max_queued_logs,
            delay_seconds=self._settings.batch_seconds,
            why=lambda: self._reasons.last,
        )


def make_resource(identity: EngineIdentity) -> Resource:
    """Return who sends: the engine, and what the OTEL_RESOURCE_ATTRIBUTES say."""
    resource = Resource.create(
        {
            "service.version": __version__,
            "service.instance.id": clean(f"{identity.engine}-{identity.dp_rank}"),
        }
    )
    if str(resource.attributes.get("service.name", "unknown_service")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": SERVICE_NAME}))
    return resource
