"""Log records over OTLP: requests that run for long, and, if asked for, every log line of the process.

Owns the translation. Redaction has happened before: what `--log-prompts` keeps out of the log is not in here either.
"""

import logging
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import structlog
from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.context import Context
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk.resources import Resource
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context
from opentelemetry.util.types import AttributeValue

from kvwatch.exporters.otel.request_trace import RequestTrace
from kvwatch.exporters.otel.spans import SCOPE
from kvwatch.exporters.otel.text import clean
from kvwatch.telemetry.trace_context import is_trace_id

OWN_LOGGERS = ("opentelemetry", "kvwatch.exporters.otel")
OWN_THREADS = "kvwatch-otlp_"
"""Lines about exporting are not exported: each would cause the next one. That also concerns what the libraries below
say on the senders' threads, such as a line for every connection at debug level."""

LONG_RUNNING_EVENT = "kvwatch.request.running"

MAX_LINE = 4096
MAX_STACK = 16_384
"""Characters kept of each text in a line, and of a traceback."""

MAX_FIELDS = 64
"""Fields kept of a line."""

_SEVERITIES = {
    logging.DEBUG: SeverityNumber.DEBUG,
    logging.INFO: SeverityNumber.INFO,
    logging.WARNING: SeverityNumber.WARN,
    logging.ERROR: SeverityNumber.ERROR,
    logging.CRITICAL: SeverityNumber.FATAL,
}
_NOT_FIELDS = frozenset({"event", "timestamp", "level", "logger", "exc_info", "trace_id"})


class LogEncoder:
    """Makes log records. Any thread.

    Args:
        resource: Who sends them.
    """

    def __init__(self, resource: Resource) -> None:
        self._resource = resource

    def long_running(self, trace: RequestTrace, now_ns: int, unix_ns: int) -> ReadableLogRecord:
        """Return the report of a request that is still in the engine, with its state.

        Args:
            trace: The request.
            now_ns: Monotonic time in ns, as its events have.
            unix_ns: The same time on the wall.
        """
        attributes: dict[str, AttributeValue] = {
            "kvwatch.request.id": clean(trace.request),
            "kvwatch.request.state": trace.phase or "unknown",
            "kvwatch.request.age_seconds": (now_ns - trace.queued_ns) / 1e9,
            "kvwatch.kv.preemptions": trace.num_preemptions,
            "kvwatch.kv.recomputed_tokens": trace.recompute_tokens,
            "kvwatch.kv.evicted_blocks": trace.num_evicted_blocks,
            **{f"kvwatch.{phase}.seconds": total / 1e9 for phase, total in trace.sums_at(now_ns).items()},
        }
        if trace.queued is not None:
            attributes["gen_ai.usage.input_tokens"] = trace.queued.prompt_tokens
            attributes["gen_ai.request.max_tokens"] = trace.queued.max_tokens
        return self._record(
            LogRecord(
                timestamp=unix_ns,
                observed_timestamp=unix_ns,
                context=_context(trace.context.trace_id, trace.span_id),
                severity_number=SeverityNumber.WARN,
                severity_text="WARN",
                body="a request is still running",
                attributes=attributes,
                event_name=LONG_RUNNING_EVENT,
            )
        )

    def line(self, record: logging.LogRecord) -> ReadableLogRecord:
        """Return a line of the standard library's logging, through which structlog's go too."""
        fields: dict[str, Any] = dict(structlog.contextvars.get_contextvars())
        if isinstance(record.msg, dict):
            fields |= record.msg
        message = fields.get("event", "") if isinstance(record.msg, dict) else record.getMessage()
        unix_ns = int(record.created * 1e9)
        attributes = _fields(fields) | {"kvwatch.logger": record.name} | _exception(record, fields)
        return self._record(
            LogRecord(
                timestamp=unix_ns,
                observed_timestamp=unix_ns,
                context=_context(str(fields.get("trace_id", ""))),
                severity_number=_SEVERITIES.get(record.levelno, SeverityNumber.UNSPECIFIED),
                severity_text=record.levelname,
                body=clean(str(message), MAX_LINE),
                attributes=attributes,
            )
        )

    def _record(self, record: LogRecord) -> ReadableLogRecord:
        return ReadableLogRecord(record, self._resource, SCOPE)


class LineHandler(logging.Handler):
    """Hands every line of the process on. Any thread; never waits.

    Args:
        encoder: Makes records.
        put: Takes them.
    """

    def __init__(self, encoder: LogEncoder, put: Callable[[ReadableLogRecord], object]) -> None:
        super().__init__()
        self._encoder = encoder
        self._put = put

    def emit(self, record: logging.LogRecord) -> None:
        """Hand a line on, unless it is about exporting."""
        if record.name.startswith(OWN_LOGGERS) or (record.threadName or "").startswith(OWN_THREADS):
            return
        try:
            self._put(self._encoder.line(record))
        except Exception:  # a line that cannot be translated must not fail whoever logs
            self.handleError(record)


def _context(trace_id: str, span_id: str = "") -> Context | None:
    if not is_trace_id(trace_id):
        return None
    span = SpanContext(int(trace_id, 16), int(span_id, 16) if span_id else 0, is_remote=False, trace_flags=TraceFlags())
    return set_span_in_context(NonRecordingSpan(span))


def _fields(fields: Mapping[str, Any]) -> dict[str, AttributeValue]:
    kept = [(name, value) for name, value in fields.items() if name not in _NOT_FIELDS and not name.startswith("_")]
    return {
        clean(str(name)): value if isinstance(value, bool | int | float) else clean(str(value), MAX_LINE)
        for name, value in kept[:MAX_FIELDS]
        if value is not None
    }


def _exception(record: logging.LogRecord, fields: Mapping[str, Any]) -> dict[str, AttributeValue]:
    """Return the exception that a line was logged with, in the conventions' words."""
    given = fields.get("exc_info") or record.exc_info
    if given is True:  # structlog means the one that is being handled
        given = sys.exc_info()
    error = given[1] if isinstance(given, tuple) else given
    if not isinstance(error, BaseException):
        return {}
    text = "".join(traceback.format_exception(error))
    return {
        "exception.type": type(error).__name__,
        "exception.message": clean(str(error), MAX_LINE),
        "exception.stacktrace": clean(text[-MAX_STACK:], MAX_STACK),
    }
