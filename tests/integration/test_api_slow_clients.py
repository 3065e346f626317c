"""Who sends half a request to the API loses the connection; who reads a long answer keeps it."""

import contextlib
import socket
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest
from builders import NullModel
from openai_server import RunningServer, arithmetic_server, byte_level_tokenizer, save_tokenizer

from kvwatch import http_protocol

LIMIT_SECONDS = 0.5


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    monkeypatch.setattr(http_protocol, "EXCHANGE_SECONDS", LIMIT_SECONDS)
    monkeypatch.setattr(http_protocol, "LOOK_SECONDS", 0.1)
    tokenizer = byte_level_tokenizer()
    model = NullModel(tokenizer.get_vocab_size())
    model.on_step = lambda _step: time.sleep(0.02)
    with arithmetic_server(save_tokenizer(tmp_path, tokenizer), model) as running:
        yield running


def seconds_until_closed(server: RunningServer, begin: bytes) -> float:
    """Send the begin of something; return after how long the server hangs up."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(begin)
        sent = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while connection.recv(65536):
                pass
        return time.monotonic() - sent


@pytest.mark.parametrize(
    "begin",
    [
        b"",
        b"POST /v1/comp",
        b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /hea",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: ",
    ],
    ids=["silent", "half a request", "half a second request", "half a header"],
)
def test_half_a_request_does_not_keep_its_connection(server: RunningServer, begin: bytes) -> None:
    assert LIMIT_SECONDS * 0.9 < seconds_until_closed(server, begin) < 15


def test_a_connection_may_rest_between_two_requests(server: RunningServer) -> None:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.connect()
    own = connection.sock
    for _ in range(2):
        connection.request("GET", "/health")
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (200, b'{"status":"ok"}')
        time.sleep(3 * LIMIT_SECONDS)
    assert connection.sock is own
    connection.close()


@pytest.mark.parametrize("is_stream", [True, False])
def test_an_answer_may_take_longer_than_a_request(server: RunningServer, is_stream: bool) -> None:
    begin = time.monotonic()
    answer = server.post("/v1/completions", prompt="one two", max_tokens=60, stream=is_stream, ignore_eos=True)

    assert answer.status_code == 200
    assert answer.text.endswith("data: [DONE]\n\n") if is_stream else answer.json()["usage"]["completion_tokens"] == 60
    assert time.monotonic() - begin > 2 * LIMIT_SECONDS
