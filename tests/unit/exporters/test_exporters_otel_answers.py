"""What a collector answers over HTTP costs neither memory nor time, and only what was taken counts as taken."""

import logging
import threading
import time
import tracemalloc

import pytest
from otlp_receiver import babbling_collector, http_collector

from kvwatch.exporters.otel.settings import parse_endpoint
from kvwatch.exporters.otel.transport import FailureReasons, Transport, make_transport

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-protobuf\r\n"


def transport(endpoint: str) -> Transport:
    return make_transport(parse_endpoint(endpoint), {}, 1.0)


def test_an_answer_that_does_not_end_is_not_kept() -> None:
    with babbling_collector(OK + b"\r\n", b"x" * 65_536, 512, 0.0) as endpoint:
        tracemalloc.start()
        try:
            assert transport(endpoint).send_spans(())
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

    assert peak < 4 << 20, "the answer has 32 MB"


def test_an_answer_that_comes_byte_by_byte_is_not_waited_for() -> None:
    with babbling_collector(OK + b"Content-Length: 1000000\r\n\r\n", b"x", 300, 0.1) as endpoint:
        begin = time.monotonic()
        assert transport(endpoint).send_spans(())

        assert time.monotonic() - begin < 15


def test_headers_that_come_byte_by_byte_are_not_waited_for_and_nothing_counts_as_taken() -> None:
    with babbling_collector(b"HTTP/1.1 200 OK\r\nX-Slow: ", b"x", 300, 0.1) as endpoint:
        begin = time.monotonic()
        assert not transport(endpoint).send_spans(())

        assert time.monotonic() - begin < 15


def test_interim_answers_without_end_are_not_waited_for() -> None:
    with babbling_collector(b"", b"HTTP/1.1 100 Continue\r\n\r\n", 300, 0.1) as endpoint:
        begin = time.monotonic()
        assert not transport(endpoint).send_spans(())

        assert time.monotonic() - begin < 15


def test_a_chunked_answer_is_read_as_well(caplog: pytest.LogCaptureFixture) -> None:
    with babbling_collector(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n0\r\n\r\n", 1, 0.0) as endpoint:
        assert transport(endpoint).send_spans(())

    assert not caplog.records


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_takes_nothing_and_the_log_says_so(status: int, caplog: pytest.LogCaptureFixture) -> None:
    head = f"HTTP/1.1 {status} Elsewhere\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n".encode()
    with babbling_collector(head, b"", 0, 0.0) as endpoint:
        assert not transport(endpoint).send_spans(())

    assert f"answers {status}, a redirect" in caplog.text


def test_exports_in_a_row_are_all_taken() -> None:
    with http_collector() as collected:
        sending = transport(collected.endpoint)
        for _ in range(5):
            assert sending.send_spans(())

        assert len(collected.trace_requests) == 5


def test_each_sender_says_why_it_failed_itself() -> None:
    reasons = FailureReasons()
    detach = reasons.attach()
    exporter = logging.getLogger("opentelemetry.exporter.otlp")
    told: dict[str, str] = {}
    both_have_failed = threading.Barrier(2, timeout=10)

    def fail(signal: str) -> None:
        exporter.warning("no %s", signal)
        both_have_failed.wait()
        told[signal] = reasons.last

    threads = [threading.Thread(target=fail, args=(signal,), name=signal) for signal in ("spans", "metrics")]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    finally:
        detach()

    assert told == {"spans": "no spans", "metrics": "no metrics"}
