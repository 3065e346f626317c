"""The load generator against servers that misbehave: it always ends, and says what was wrong."""

import contextlib
import json
import signal
import socket
import time
from pathlib import Path

import pytest
from bench_runs import bench, bench_process, run
from hand_made_server import (
    STREAM_HEAD,
    Answer,
    Request,
    answer_in_words,
    event,
    hand_made_server,
    piece,
    response,
    slow_words,
)

from kvwatch.bench import discovery
from kvwatch.errors import ConfigError

SIZED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 500\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
SHORT = ("--scenario", "short", "--num-requests", "6", "--concurrency", "2")


def sends(*parts: bytes) -> Answer:
    """Return an answer of these bytes."""
    return lambda connection, _request: connection.sendall(b"".join(parts))


def errors_of(capsys: pytest.CaptureFixture[str], answer: Answer, *words: str) -> dict[str, int]:
    """Run against a server that answers so; return the errors of the report by kind."""
    with hand_made_server(answer) as server:
        status, report = bench(capsys, "--url", server.url, *SHORT, *words)
    assert status == 0
    counts = report["requests"]
    assert counts["ok"] + counts["failed"] == 6
    return {kind: error["count"] for kind, error in report["errors"].items()}


# ---------------------------------------------------------------- not there at all


def test_nobody_listens(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert run(["--url", f"http://127.0.0.1:{port}"]) == 3
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "--wait-ready" in printed.err


@pytest.mark.parametrize(
    ("models", "words"),
    [
        (response("404 Not Found", b"nothing here"), "name one with --model"),
        (response("200 OK", b"<html><body>It works!</body></html>", content_type="text/html"), "is it the address"),
        (response("200 OK", b'{"data": []}'), "lists no model"),
        (response("200 OK", b'{"data": [{"id": 5}]}'), "is it the address"),
        (response("200 OK", b'{"x": ' + b"[" * 100_000), "is it the address"),
        (response("200 OK", b"\xff\xfe\x00"), "UTF-8"),
        (response("401 Unauthorized", b"who are you?"), "--api-key-file"),
        (response("503 Service Unavailable", b"loading", retry_after="1"), "--wait-ready"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "check --url"),
        (b"", "check --url"),
    ],
)
def test_what_answers_is_no_openai_api(capsys: pytest.CaptureFixture[str], models: bytes, words: str) -> None:
    with hand_made_server() as server:
        server.models = models
        assert run(["--url", server.url, *SHORT]) == 3
    printed = capsys.readouterr()
    assert words in printed.err
    assert printed.err.count("\n") == 1
    assert not server.posts


def test_a_page_without_end_is_not_read_to_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    with hand_made_server() as server:
        server.models = b"HTTP/1.1 200 OK\r\ncontent-length: 90000000\r\n\r\n" + b" " * 20_000_000
        assert run(["--url", server.url, *SHORT]) == 3
    assert "more than" in capsys.readouterr().err


def test_a_server_that_listens_and_does_not_answer_yet_may_be_waited_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "GET_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert run(["--url", url]) == 3
    printed = capsys.readouterr().err
    assert "--wait-ready" in printed
    assert printed.count(url) == 1


def test_a_server_that_lists_no_models_is_taken_at_the_users_word(capsys: pytest.CaptureFixture[str]) -> None:
    with hand_made_server() as server:
        server.models = response("404 Not Found", b"")
        status, report = bench(capsys, "--url", server.url + "/v1/", *SHORT, "--model", "my/model")
    assert status == 0
    assert report["requests"]["ok"] == 6
    assert report["target"]["is_limit_assumed"]
    assert {request.body["model"] for request in server.posts} == {"my/model"}


def test_a_model_that_is_not_served_is_a_usage_error() -> None:
    with hand_made_server() as server, pytest.raises(ConfigError, match="did you mean m"):
        run(["--url", server.url, *SHORT, "--model", "mm"])


def test_it_waits_for_a_server_that_is_starting() -> None:
    with hand_made_server() as server:
        ready, server.models = server.models, response("503 Service Unavailable", b"loading")

        def becomes_ready(_connection: socket.socket, _request: Request) -> None:
            raise AssertionError("asked before it was ready")

        server.answer = becomes_ready
        process = bench_process("--url", server.url, *SHORT, "--wait-ready", "60", "--json")
        deadline = time.monotonic() + 60
        while len(server.gets) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        server.answer, server.models = answer_in_words, ready
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert json.loads(out)["requests"]["ok"] == 6


def test_a_server_without_completions_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with hand_made_server() as server:
        server.prepare = sends(response("404 Not Found", b"no such path"))
        assert run(["--url", server.url, *SHORT]) == 3
    assert "--endpoint chat" in capsys.readouterr().err


# ---------------------------------------------------------------- bad answers


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (sends(response("404 Not Found", b"{}")), "http_404"),
        (sends(response("500 Internal Server Error", b"\xff\xff<html>")), "http_500"),
        (sends(response("429 Too Many Requests", b"later", retry_after="7")), "http_429"),
        (sends(response("503 Service Unavailable", b"draining", retry_after="soon")), "http_503"),
        (sends(response("302 Found", b"", location="http://127.0.0.1:9/")), "http_302"),
        (sends(response("200 OK", b"<html></html>", content_type="text/html")), "not_a_stream"),
        (sends(STREAM_HEAD, piece(" a")), "truncated"),
        (sends(STREAM_HEAD), "truncated"),
        (sends(b""), "truncated"),
        (sends(SIZED, piece(" a")), "truncated"),
        (sends(CHUNKED + b"9\r\ndata"), "truncated"),
        (sends(CHUNKED + b"zz\r\n"), "protocol"),
        (sends(b"\x16\x03\x01 this is no HTTP\r\n\r\n"), "protocol"),
        (sends(STREAM_HEAD, b'data: {"choices": [{"text": "\xff\xfe"}]}\n\n'), "bad_utf8"),
        (sends(STREAM_HEAD, b"data: {not json}\n\n"), "bad_json"),
        (sends(STREAM_HEAD, b'data: {"choices": 5}\n\n'), "bad_json"),
        (sends(STREAM_HEAD, b'data: {"x": ' + b"[" * 100_000 + b"\n\n"), "bad_json"),
        (sends(STREAM_HEAD, piece(" a", index=3)), "bad_json"),
        (sends(STREAM_HEAD, piece(" a", index=-1)), "bad_json"),
        (sends(STREAM_HEAD, piece(" a"), event(error={"message": "boom"})), "server_error"),
        (sends(STREAM_HEAD, b"data: " + b"x" * 5_000_000), "too_long"),
    ],
)  # fmt: skip
def test_every_bad_answer_is_an_error_of_its_kind(
    capsys: pytest.CaptureFixture[str], answer: Answer, kind: str
) -> None:
    assert errors_of(capsys, answer) == {kind: 6}


def test_a_reset_connection_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    def reset(connection: socket.socket, _request: Request) -> None:
        connection.sendall(STREAM_HEAD + piece(" a"))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        connection.close()

    assert errors_of(capsys, reset) == {"connection": 6}


def test_a_silent_server_times_out(capsys: pytest.CaptureFixture[str]) -> None:
    def silent(connection: socket.socket, _request: Request) -> None:
        connection.sendall(STREAM_HEAD + piece(" a"))
        connection.recv(1)  # until the client gives up

    assert errors_of(capsys, silent, "--request-timeout", "0.4") == {"timeout": 6}


def test_an_answer_shorter_than_it_was_fixed_to_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    def short(connection: socket.socket, request: Request) -> None:
        cut = request._replace(body={**request.body, "max_tokens": 3})
        answer_in_words(connection, cut)

    with hand_made_server(short) as server:
        server.metrics = response("200 OK", b"vllm:num_preemptions_total 0\n")
        status, report = bench(capsys, "--url", server.url, *SHORT[2:], "--scenario", "max-tokens")
    assert status == 0
    assert {kind: error["count"] for kind, error in report["errors"].items()} == {"wrong_length": 6}
    assert all(request.body["ignore_eos"] is True for request in server.loads)


def test_only_servers_that_are_known_get_more_than_openais_fields(capsys: pytest.CaptureFixture[str]) -> None:
    with hand_made_server() as server:
        status, _ = bench(capsys, "--url", server.url, "--num-requests", "60", "--scenario", "mixed")
    assert status == 0
    openai = {
        "model", "prompt", "max_tokens", "temperature", "seed", "stream", "stream_options", "n", "stop",
    }  # fmt: skip
    assert {name for request in server.posts for name in request.body} == openai


def test_retries_wait_as_long_as_the_server_asks_and_count_from_the_first_attempt(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full_at_first(connection: socket.socket, request: Request) -> None:
        if request.number < 2:
            connection.sendall(response("429 Too Many Requests", b"full", retry_after="1"))
        else:
            answer_in_words(connection, request)

    with hand_made_server(full_at_first) as server:
        status, report = bench(capsys, "--url", server.url, *SHORT, "--retries", "3")
    assert status == 0
    assert report["requests"]["ok"] == 6
    assert report["requests"]["retries"] == 2
    assert report["latency"]["e2e"]["max"] >= 1.0
    assert report["latency"]["e2e"]["p50"] < 1.0


# ---------------------------------------------------------------- times


def test_times_are_those_at_which_the_pieces_came(capsys: pytest.CaptureFixture[str]) -> None:
    with hand_made_server(slow_words(0.05)) as server:
        words = ("--scenario", "short", "--num-requests", "4", "--concurrency", "4", "--limit-tokens", "256")
        status, report = bench(capsys, "--url", server.url, *words)
    assert status == 0
    assert 0.05 <= report["latency"]["ttft"]["p50"] < report["latency"]["e2e"]["p50"] / 2
    assert 0.04 <= report["latency"]["itl"]["p50"] < 1
    assert report["peak_concurrency"] == 4
    assert report["throughput"]["output_tokens"] == sum(int(str(each.body["max_tokens"])) for each in server.loads)


def test_in_an_open_loop_waiting_for_a_free_client_counts(capsys: pytest.CaptureFixture[str]) -> None:
    """Ten requests are due at nearly the same time; one at a time is sent; each takes a tenth of a second at least."""

    def tenth(connection: socket.socket, _request: Request) -> None:
        time.sleep(0.1)
        connection.sendall(STREAM_HEAD + piece(" a", 0, "stop") + b"data: [DONE]\n\n")

    words = ("--scenario", "short", "--num-requests", "10", "--rate", "1000", "--concurrency", "1")
    with hand_made_server(tenth) as server:
        status, report = bench(capsys, "--url", server.url, *words)
    assert status == 0
    assert report["peak_concurrency"] == 1
    assert report["latency"]["e2e"]["max"] >= 0.95
    assert report["latency"]["e2e"]["p50"] >= 0.45


def test_hanging_up_is_no_error_and_closes_the_connection(capsys: pytest.CaptureFixture[str]) -> None:
    ends: list[float] = []

    def endless(connection: socket.socket, _request: Request) -> None:
        connection.sendall(STREAM_HEAD)
        begin = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - begin < 20:
                connection.sendall(piece(" a"))
                time.sleep(0.005)
        ends.append(time.monotonic() - begin)

    with hand_made_server(endless) as server:
        status, report = bench(capsys, "--url", server.url, "--scenario", "hang-up", "--num-requests", "8")
        deadline = time.monotonic() + 60
        while len(ends) < 8 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert status == 0
    assert report["requests"]["hung_up"] == 8
    assert report["errors"] == {}
    assert len(ends) == 8
    assert max(ends) < 10


# ---------------------------------------------------------------- interrupted


def test_sigint_ends_the_run_with_a_report_of_what_there_was(tmp_path: Path) -> None:
    saved = tmp_path / "run.json"
    with hand_made_server() as server:

        def first_ten_then_never(connection: socket.socket, request: Request) -> None:
            if request.number < 10:
                answer_in_words(connection, request)
            else:
                connection.sendall(STREAM_HEAD + piece(" half"))
                connection.recv(1)

        server.answer = first_ten_then_never
        process = bench_process(
            "--url", server.url, "--scenario", "short", "--num-requests", "50", "--concurrency", "5", "--json",
            "--save", str(saved), "--save-texts",
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while len(server.loads) < 15 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    report = json.loads(out)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert report["is_interrupted"]
    assert report["requests"] == {"ok": 10, "hung_up": 0, "failed": 0, "interrupted": 5, "not_sent": 35, "retries": 0}
    kept = json.loads(saved.read_text())["requests"]
    assert sum(request["texts"] == [" half"] for request in kept) == 5


def test_sigint_before_the_first_request_ends_quietly() -> None:
    with hand_made_server() as server:
        server.models = b""  # never ready
        process = bench_process("--url", server.url, "--wait-ready", "60")
        deadline = time.monotonic() + 60
        while not server.gets and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in err or err == ""  # `kvwatch` itself turns it into status 130


def test_after_max_seconds_nothing_new_begins(capsys: pytest.CaptureFixture[str]) -> None:
    with hand_made_server(slow_words(0.02)) as server:
        words = ("--scenario", "short", "--num-requests", "1000", "--concurrency", "2", "--max-seconds", "1")
        status, report = bench(capsys, "--url", server.url, *words)
    assert status == 0
    assert report["requests"]["failed"] == report["requests"]["interrupted"] == 0
    assert 0 < report["requests"]["ok"] < 1000
    assert report["requests"]["not_sent"] == 1000 - report["requests"]["ok"]
    assert not report["is_interrupted"]
