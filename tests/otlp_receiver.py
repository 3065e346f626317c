"""OTLP collectors for tests: real services over gRPC and HTTP, and ones that are dead, slow, refusing or half open."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2 as logs_pb
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2_grpc as logs_grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_pb
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collected:
    """What a collector was sent, in the order of arrival."""

    def __init__(self) -> None:
        self.trace_requests: list[trace_pb.ExportTraceServiceRequest] = []
        self.metrics_requests: list[metrics_pb.ExportMetricsServiceRequest] = []
        self.log_requests: list[logs_pb.ExportLogsServiceRequest] = []
        self.headers: dict[str, str] = {}
        self.endpoint = ""

    def take(self, request: object, headers: dict[str, str]) -> None:
        self.headers = headers
        if isinstance(request, trace_pb.ExportTraceServiceRequest):
            self.trace_requests.append(request)
        elif isinstance(request, metrics_pb.ExportMetricsServiceRequest):
            self.metrics_requests.append(request)
        else:
            assert isinstance(request, logs_pb.ExportLogsServiceRequest)
            self.log_requests.append(request)

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for request in list(self.trace_requests)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    @property
    def roots(self) -> list[Span]:
        """SERVER spans, one for each request."""
        return [span for span in self.spans if span.kind == Span.SPAN_KIND_SERVER]

    def children(self, parent: Span) -> list[Span]:
        found = [span for span in self.spans if span.parent_span_id == parent.span_id]
        return sorted(found, key=lambda span: span.start_time_unix_nano)

    @property
    def metrics(self) -> dict[str, Metric]:
        """The newest state of each metric."""
        return {
            metric.name: metric
            for request in list(self.metrics_requests)
            for resource in request.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    @property
    def log_records(self) -> list[LogRecord]:
        return [
            record
            for request in list(self.log_requests)
            for resource in request.resource_logs
            for scope in resource.scope_logs
            for record in scope.log_records
        ]


def attributes(pairs: Any) -> dict[str, Any]:
    """Return OTLP attributes as a dictionary."""
    return {pair.key: _value(pair.value) for pair in pairs if isinstance(pair, KeyValue)}


def seconds(span: Span) -> float:
    return float(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    found = getattr(value, kind)
    return [_value(each) for each in found.values] if kind == "array_value" else found


# ---------------------------------------------------------------- gRPC


class _Services(trace_grpc.TraceServiceServicer, metrics_grpc.MetricsServiceServicer, logs_grpc.LogsServiceServicer):
    def __init__(self, take: Callable[[object, dict[str, str]], None], behave: Callable[[Any], None]) -> None:
        self._take = take
        self._behave = behave
        self._responses: dict[type[Any], type[Any]] = {
            trace_pb.ExportTraceServiceRequest: trace_pb.ExportTraceServiceResponse,
            metrics_pb.ExportMetricsServiceRequest: metrics_pb.ExportMetricsServiceResponse,
            logs_pb.ExportLogsServiceRequest: logs_pb.ExportLogsServiceResponse,
        }

    def Export(self, request: Any, context: Any) -> Any:
        self._behave(context)
        self._take(request, {str(key): str(value) for key, value in context.invocation_metadata()})
        return self._responses[type(request)]()


@contextmanager
def grpc_collector(behave: Callable[[Any], None] = lambda _: None) -> Iterator[Collected]:
    """Collect over gRPC; `behave` may wait or end the call."""
    collected = Collected()
    services = _Services(collected.take, behave)
    server = grpc.server(ThreadPoolExecutor(8))
    trace_grpc.add_TraceServiceServicer_to_server(services, server)  # type: ignore[no-untyped-call]
    metrics_grpc.add_MetricsServiceServicer_to_server(services, server)  # type: ignore[no-untyped-call]
    logs_grpc.add_LogsServiceServicer_to_server(services, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    collected.endpoint = f"grpc://127.0.0.1:{port}"
    try:
        yield collected
    finally:
        server.stop(0).wait(5)


def slow(wait_seconds: float) -> Callable[[Any], None]:
    return lambda _: time.sleep(wait_seconds)


def refuse(context: Any) -> None:
    context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "enough")


# ---------------------------------------------------------------- HTTP


@contextmanager
def http_collector(status: int = 200) -> Iterator[Collected]:
    """Collect over HTTP; any other status than 200 is a collector that takes nothing."""
    collected = Collected()
    kinds: dict[str, Any] = {
        "/v1/traces": trace_pb.ExportTraceServiceRequest,
        "/v1/metrics": metrics_pb.ExportMetricsServiceRequest,
        "/v1/logs": logs_pb.ExportLogsServiceRequest,
    }

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if status == 200:
                request = kinds[self.path]()
                request.ParseFromString(body)
                collected.take(request, {key.lower(): value for key, value in self.headers.items()})
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    collected.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield collected
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


# ---------------------------------------------------------------- neither


@contextmanager
def half_open_collector(scheme: str) -> Iterator[str]:
    """Accept connections and never say a word; gives the endpoint."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepted: list[socket.socket] = []

        def accept() -> None:
            while True:
                try:
                    accepted.append(listener.accept()[0])
                except OSError:
                    return

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(5)
            for connection in accepted:
                connection.close()


def dead_endpoint(scheme: str) -> str:
    """Return the endpoint of a port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def babbling_collector(head: bytes, piece: bytes, pieces: int, pause_seconds: float) -> Iterator[str]:
    """Take each request, answer with `head`, then so many pieces with a pause after each; gives the endpoint."""

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(65_536)
            connection.sendall(head)
            for _ in range(pieces):
                connection.sendall(piece)
                time.sleep(pause_seconds)

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(5)
