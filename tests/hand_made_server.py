"""A server of a few lines that answers with exactly the bytes that a test wants, at the times that it wants."""

import contextlib
import json
import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
"""Head of a stream that ends with the connection."""


class Request(NamedTuple):
    """What came."""

    number: int
    """Counts completions, from 0."""
    path: str
    body: dict[str, object]
    head: str
    """Request line and headers, in lower case."""


Answer = Callable[[socket.socket, Request], None]


def response(status: str, body: bytes, **headers: str) -> bytes:
    """Return a whole response of HTTP, after which the connection closes."""
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", "connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def event(**fields: object) -> bytes:
    """Return one event of a stream."""
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def piece(text: str, index: int = 0, finish_reason: str | None = None) -> bytes:
    """Return the event that adds text to a completion."""
    return event(choices=[{"index": index, "text": text, "finish_reason": finish_reason}])


def usage(prompt_tokens: int, completion_tokens: int) -> bytes:
    return event(choices=[], usage={"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens})


def answer_in_words(connection: socket.socket, request: Request) -> None:
    """Answer as a good server does: as many words as asked for, one token each."""
    num_prompt, wanted = len(str(request.body["prompt"]).split()), int(str(request.body["max_tokens"]))
    choices = int(str(request.body.get("n", 1)))
    words = b"".join(piece(f" w{i}", index) for i in range(wanted) for index in range(choices))
    ends = b"".join(piece("", index, "length") for index in range(choices))
    connection.sendall(STREAM_HEAD + words + ends + usage(num_prompt, wanted * choices) + b"data: [DONE]\n\n")


class HandMadeServer:
    """A running server; every setting may be changed while it runs."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        """Answers what is posted."""
        self.prepare: Answer = answer_in_words
        """Answers requests for one token, with which a run prepares itself."""
        self.models = response(
            "200 OK", b'{"data": [{"id": "m", "max_model_len": 1024}]}', content_type="application/json"
        )
        self.metrics = response("404 Not Found", b"")
        self.posts: list[Request] = []
        self.gets: list[str] = []
        self.resets: list[str] = []
        """Paths beside the API's that something was posted to."""
        self.url = ""

    @property
    def loads(self) -> list[Request]:
        """What was posted beside the preparation, whose requests ask for one token."""
        return [each for each in self.posts if each.body.get("max_tokens") != 1]


@contextlib.contextmanager
def hand_made_server(
    answer: Answer = answer_in_words, context: ssl.SSLContext | None = None
) -> Iterator[HandMadeServer]:
    """Serve on a free port, over TLS if there is a context for it."""
    server = HandMadeServer(answer)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                self._handle()

        def _handle(self) -> None:
            connection: socket.socket = self.request
            connection.settimeout(30)
            if context is None:
                self._serve(connection)
                return
            with context.wrap_socket(connection, server_side=True) as encrypted:
                self._serve(encrypted)

        def _serve(self, connection: socket.socket) -> None:
            head, _, rest = _read_head(connection)
            if not head:
                return
            method, path = head.split(b" ")[:2]
            if method == b"GET":
                server.gets.append(path.decode())
                connection.sendall(server.models if path == b"/v1/models" else server.metrics)
                return
            body = json.loads(_read_body(connection, head, rest) or b"{}")
            if not path.startswith(b"/v1/"):
                server.resets.append(path.decode())
                connection.sendall(response("200 OK", b""))
                return
            request = Request(len(server.loads), path.decode(), body, head.decode().lower())
            server.posts.append(request)
            (server.prepare if body.get("max_tokens") == 1 else server.answer)(connection, request)

    class Listener(socketserver.ThreadingTCPServer):
        daemon_threads = True
        allow_reuse_address = True
        request_queue_size = 128

    with Listener(("127.0.0.1", 0), Handler) as listener:
        server.url = f"{'http' if context is None else 'https'}://127.0.0.1:{listener.server_address[1]}"
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            listener.shutdown()
            thread.join(5)


def slow_words(seconds: float) -> Answer:
    """Answer with one word each so many seconds."""

    def answer(connection: socket.socket, request: Request) -> None:
        connection.sendall(STREAM_HEAD)
        wanted = int(str(request.body["max_tokens"]))
        for place in range(wanted):
            time.sleep(seconds)
            connection.sendall(piece(f" w{place}"))
        connection.sendall(piece("", 0, "length") + usage(1, wanted) + b"data: [DONE]\n\n")

    return answer


def _read_head(connection: socket.socket) -> tuple[bytes, bytes, bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(65536)
        if not more:
            return b"", b"", b""
        data += more
    return data.partition(b"\r\n\r\n")


def _read_body(connection: socket.socket, head: bytes, begin: bytes) -> bytes:
    fields = [line.partition(b":") for line in head.lower().split(b"\r\n")]
    length = next((int(value) for name, _, value in fields if name == b"content-length"), 0)
    while len(begin) < length:
        begin += connection.recv(65536)
    return begin
