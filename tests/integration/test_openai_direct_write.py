"""Pieces of a stream that need not wait go past ASGI and h11: the bytes are what they would have been."""

import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h11
import pytest
from builders import NullModel
from openai_server import MODEL, RunningServer, arithmetic_server, byte_level_tokenizer, save_tokenizer
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

NUM_TOKENS = 40


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Types of the messages that took the whole way."""
    types: list[str] = []
    send = RequestResponseCycle.send

    async def noted(cycle: RequestResponseCycle, message: Any) -> None:
        types.append(message["type"])
        await send(cycle, message)

    monkeypatch.setattr(RequestResponseCycle, "send", noted)
    return types


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    tokenizer = byte_level_tokenizer()
    model = NullModel(tokenizer.get_vocab_size())
    model.on_step = lambda _step: time.sleep(0.002)
    with arithmetic_server(save_tokenizer(tmp_path, tokenizer), model, send_buffer_bytes=4096) as running:
        yield running


def request(path: str, body: dict[str, object], version: str = "1.1") -> bytes:
    fields = {"model": MODEL, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True, "seed": 3, **body}
    content = json.dumps(fields).encode()
    head = f"POST {path} HTTP/{version}\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
    return f"{head}\r\n\r\n".encode() + content


def body_of(connection: socket.socket, asked: bytes) -> bytes:
    """Ask, and read one whole answer of HTTP/1.1 by the rules of HTTP."""
    connection.sendall(asked)
    reader = h11.Connection(h11.CLIENT)
    reader.send(h11.Request(method="POST", target="/", headers=[("host", "x"), ("content-length", "0")]))
    reader.send(h11.EndOfMessage())
    body = b""
    while True:
        event = reader.next_event()
        if event is h11.NEED_DATA:
            reader.receive_data(connection.recv(65536))
        elif isinstance(event, h11.Response):
            assert event.status_code == 200
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            return body


def without_names(body: bytes) -> bytes:
    """Return events without what differs from answer to answer."""
    return re.sub(rb'"id":"[^"]*"|"created":\d+', b"", body)


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": "one two", "n": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "one two"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "one"}], "logprobs": True}),
    ],
    ids=["completions", "chat", "logprobs"],
)
def test_a_stream_is_the_same_whichever_way_it_takes(
    server: RunningServer, sent: list[str], path: str, prompt: dict[str, object]
) -> None:
    asked = {**prompt, "stream_options": {"include_usage": True}}
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        direct = body_of(connection, request(path, asked))
        num_messages = len(sent)
        again = body_of(connection, request(path, asked))  # the connection is fit for another request
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(request(path, asked, "1.0"))
        _, _, plain = b"".join(iter(lambda: connection.recv(65536), b"")).partition(b"\r\n\r\n")

    assert direct.count(b"data: ") > NUM_TOKENS / 2
    assert direct.endswith(b"data: [DONE]\n\n")
    assert num_messages < 10, "one for each token would be many more"
    assert len(sent) > NUM_TOKENS / 2, "the old protocol has no chunks: all of it went the usual way"
    assert without_names(direct).split(b"\n\n")[:-3] == without_names(plain).split(b"\n\n")[:-3]
    assert without_names(again) == without_names(plain), "usage too, now that the prompt is cached for both"


def test_who_reads_late_gets_everything(server: RunningServer, sent: list[str]) -> None:
    """The kernel's buffers and the transport's fill up; what comes then waits, and nothing is lost or out of order."""
    asked = request("/v1/completions", {"prompt": "one two", "max_tokens": 480})
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(asked)
        server.wait_idle()
        late = body_of(connection, b"")
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        prompt = body_of(connection, asked)

    texts = [
        "".join(json.loads(event[6:])["choices"][0]["text"] for event in body.split(b"\n\n")[:-2])
        for body in (late, prompt)
    ]
    assert texts[0] == texts[1]
    assert late.endswith(b"data: [DONE]\n\n")
    assert sent.count("http.response.start") == 2
