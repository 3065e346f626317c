"""Log lines as OTLP records."""

import io
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import structlog
from opentelemetry.exporter.otlp.proto.common._log_encoder import encode_logs
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, SeverityNumber
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk.resources import Resource
from otlp_receiver import attributes

from kvwatch.exporters.otel.log_lines import MAX_LINE, LineHandler, LogEncoder
from kvwatch.exporters.otel.request_trace import RequestTrace
from kvwatch.exporters.otel.sender import Sender
from kvwatch.logs import bind_request, configure_logs
from kvwatch.telemetry.trace_context import begin_trace

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
def shipped() -> Iterator[list[ReadableLogRecord]]:
    """What the handler hands on; the process's logging is left as it was."""
    root = logging.getLogger()
    handlers, level, before = list(root.handlers), root.level, structlog.get_config()
    names = ("uvicorn", "uvicorn.error", "uvicorn.access", "httpx", "httpcore")
    levels = {name: logging.getLogger(name).level for name in names}
    configure_logs("json", stream=io.StringIO())
    records: list[ReadableLogRecord] = []
    root.addHandler(LineHandler(LogEncoder(Resource({})), records.append))
    yield records
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, old in levels.items():
        logging.getLogger(name).setLevel(old)
    structlog.configure(**before)


def sent(records: list[ReadableLogRecord]) -> list[LogRecord]:
    """The records as a collector gets them."""
    return [
        record
        for resource in encode_logs(records).resource_logs
        for scope in resource.scope_logs
        for record in scope.log_records
    ]


def test_a_line_of_a_request_carries_its_trace_and_its_fields(shipped: list[ReadableLogRecord]) -> None:
    with bind_request("req_1", TRACE_ID):
        structlog.get_logger("kvwatch.server").warning(
            "request", status=200, seconds=0.5, is_stream=True, finish=["stop"]
        )

    (record,) = sent(shipped)
    assert record.body.string_value == "request"
    assert record.trace_id.hex() == TRACE_ID
    assert record.severity_number == SeverityNumber.SEVERITY_NUMBER_WARN
    assert attributes(record.attributes) == {
        "request_id": "req_1",
        "status": 200,
        "seconds": 0.5,
        "is_stream": True,
        "finish": "['stop']",
        "kvwatch.logger": "kvwatch.server",
    }


def test_lines_of_libraries_are_shipped_too_with_the_ids_of_the_request(shipped: list[ReadableLogRecord]) -> None:
    with bind_request("req_1", TRACE_ID):
        logging.getLogger("some.library").error("two %s", "words")

    (record,) = sent(shipped)
    assert record.body.string_value == "two words"
    assert record.trace_id.hex() == TRACE_ID
    assert attributes(record.attributes)["request_id"] == "req_1"


def test_what_users_wrote_is_not_shipped(shipped: list[ReadableLogRecord]) -> None:
    structlog.get_logger("kvwatch").info("prompt", text="my secret", prompt_token_ids=[4711])

    assert b"my secret" not in encode_logs(shipped).SerializeToString()
    assert b"4711" not in encode_logs(shipped).SerializeToString()


def test_an_exception_is_shipped_in_the_conventions_words(shipped: list[ReadableLogRecord]) -> None:
    structlog.get_logger("kvwatch").error("failed", exc_info=RuntimeError("wrong \ud800"))
    try:
        int("x")
    except ValueError:
        logging.getLogger("library").exception("failed too")

    record, other = sent(shipped)
    found = attributes(record.attributes)
    assert (found["exception.type"], found["exception.message"]) == ("RuntimeError", "wrong ?")
    found = attributes(other.attributes)
    assert found["exception.type"] == "ValueError"
    assert "test_exporters_otel_logs" in found["exception.stacktrace"]


def test_lines_about_exporting_are_not_exported(shipped: list[ReadableLogRecord]) -> None:
    structlog.get_logger("kvwatch.exporters.otel.sender").warning("the collector does not take telemetry")
    logging.getLogger("opentelemetry.exporter.otlp").error("failed")

    assert shipped == []


def test_what_libraries_say_while_they_export_is_not_exported(shipped: list[ReadableLogRecord]) -> None:
    logging.getLogger().setLevel("DEBUG")

    def export(batch: Sequence[int]) -> bool:
        logging.getLogger("urllib3.connectionpool").debug("POST /v1/logs %s", batch)
        return True

    sender = Sender("otlp_logs", export, lambda: None, max_queued=1, max_batch=1)
    sender.start()
    sender.put(1)
    sender.stop(10)

    assert sender.num_sent == 1
    assert not shipped


def test_a_line_is_bounded_and_survives_hostile_text(shipped: list[ReadableLogRecord]) -> None:
    hostile: dict[str, Any] = {f"field{number}": "\ud800" * 100_000 for number in range(200)}
    structlog.get_logger("kvwatch").info("x" * 100_000, trace_id="no trace id", **hostile)

    (record,) = sent(shipped)
    assert len(record.body.string_value) == MAX_LINE
    assert record.trace_id == b""
    assert len(record.attributes) <= 66


def test_a_long_running_request_is_reported_with_its_state() -> None:
    context = begin_trace()
    trace = RequestTrace("r", 1_000_000_000, context, None)
    trace.enter("queue", 1_000_000_000)
    trace.enter("prefill", 3_000_000_000)

    (record,) = sent([LogEncoder(Resource({})).long_running(trace, 31_000_000_000, 77)])

    found = attributes(record.attributes)
    assert record.event_name == "kvwatch.request.running"
    assert (record.trace_id.hex(), record.span_id.hex()) == (context.trace_id, trace.span_id)
    assert found["kvwatch.request.state"] == "prefill"
    assert found["kvwatch.request.age_seconds"] == 30.0
    assert (found["kvwatch.queue.seconds"], found["kvwatch.prefill.seconds"]) == (2.0, 28.0)
