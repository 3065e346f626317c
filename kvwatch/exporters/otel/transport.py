"""The SDK's OTLP exporters, made for an endpoint. Knows what is sent only by its type.

An exporter is called from one thread, that of its sender; `shutdown` may come from another one.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter as GrpcLogExporter
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcSpanExporter
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter as HttpLogExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpSpanExporter
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk._logs.export import LogRecordExporter, LogRecordExportResult
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from kvwatch.exporters.otel.http_session import bounded_session
from kvwatch.exporters.otel.settings import Endpoint

SDK_LOGGER, EXPORTER_LOGGER = "opentelemetry", "opentelemetry.exporter"
"""The SDK tells only its log why an export failed."""


@dataclass(frozen=True, slots=True)
class Transport:
    """One exporter for each signal. What they return is whether the collector took it."""

    traces: SpanExporter
    metrics: MetricExporter
    logs: LogRecordExporter

    def send_spans(self, spans: Sequence[ReadableSpan]) -> bool:
        """Send spans. Sender's thread only."""
        return self.traces.export(spans) is SpanExportResult.SUCCESS

    def send_metrics(self, data: MetricsData) -> bool:
        """Send metrics. Sender's thread only."""
        return self.metrics.export(data) is MetricExportResult.SUCCESS

    def send_logs(self, records: Sequence[ReadableLogRecord]) -> bool:
        """Send log records. Sender's thread only."""
        return self.logs.export(records) is LogRecordExportResult.SUCCESS


def make_transport(endpoint: Endpoint, headers: dict[str, str], timeout_seconds: float) -> Transport:
    """Make the exporters; nothing is connected yet.

    What neither endpoint nor headers say (certificates, compression) is read from the `OTEL_EXPORTER_OTLP_*` variables.
    """
    if endpoint.protocol == "grpc":
        target = f"{'https' if endpoint.is_secure else 'http'}://{endpoint.address}"
        is_insecure = not endpoint.is_secure
        pairs = tuple(headers.items()) or None
        return Transport(
            GrpcSpanExporter(endpoint=target, insecure=is_insecure, headers=pairs, timeout=timeout_seconds),
            GrpcMetricExporter(endpoint=target, insecure=is_insecure, headers=pairs, timeout=timeout_seconds),
            GrpcLogExporter(endpoint=target, insecure=is_insecure, headers=pairs, timeout=timeout_seconds),
        )
    return Transport(
        HttpSpanExporter(endpoint.url("traces"), headers=headers, timeout=timeout_seconds, session=bounded_session()),
        HttpMetricExporter(
            endpoint.url("metrics"), headers=headers, timeout=timeout_seconds, session=bounded_session()
        ),
        HttpLogExporter(endpoint.url("logs"), headers=headers, timeout=timeout_seconds, session=bounded_session()),
    )


class FailureReasons(logging.Handler):
    """Keeps the SDK's last complaint on each thread instead of printing it.

    Senders say theirs once a minute, with what was lost.

    The SDK writes a line for every attempt, and for every malformed header that a caller sends.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._last: dict[str, str] = {}

    @property
    def last(self) -> str:
        """The last complaint on the thread that asks; empty if there was none."""
        return self._last.get(threading.current_thread().name, "")

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message if an exporter wrote it."""
        if record.name.startswith(EXPORTER_LOGGER):
            self._last[record.threadName or ""] = record.getMessage()

    def attach(self) -> Callable[[], None]:
        """Take the SDK's lines from now on; return what gives them back."""
        sdk = logging.getLogger(SDK_LOGGER)
        was_propagating, sdk.propagate = sdk.propagate, False
        sdk.addHandler(self)

        def detach() -> None:
            sdk.removeHandler(self)
            sdk.propagate = was_propagating

        return detach
