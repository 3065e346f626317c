"""Engines whose HTTP side does not behave: what they send is bounded in time and size, and nobody else is asked."""

import asyncio
import contextlib
import gzip
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from certificates import make_certificate, server_context

from kvwatch.sources import engine_http
from kvwatch.sources.engine_http import MAX_ANSWER_BYTES, EngineHTTP, EngineUnreachableError
from kvwatch.sources.engines import parse_engine

SECONDS = 0.4
"""What an answer may take in these tests."""

Answer = Callable[[socket.socket], None]


class RawServer:
    """Gives each connection to a function. A context manager."""

    def __init__(self, answer: Answer, context: ssl.SSLContext | None = None) -> None:
        self._answer = answer
        self._context = context
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.num_connections = 0
        self.num_sent = 0
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    def __enter__(self) -> "RawServer":
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)
        self._listener.close()

    def send(self, connection: socket.socket, data: bytes) -> None:
        connection.sendall(data)
        self.num_sent += len(data)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.num_connections += 1
                self._threads.append(threading.Thread(target=self._serve, args=(connection,), daemon=True))
                self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            if self._context is None:
                self._answer(connection)
                return
            with self._context.wrap_socket(connection, server_side=True) as encrypted:
                self._answer(encrypted)


def head(*lines: str, status: str = "200 OK") -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode()


def say_nothing(connection: socket.socket) -> None:
    while connection.recv(1 << 16):
        pass


def dribble_a_head(connection: socket.socket) -> None:
    for byte in head("X-Much: " + "x" * 10_000):
        connection.sendall(bytes([byte]))
        time.sleep(0.05)


def dribble_a_body(connection: socket.socket) -> None:
    connection.sendall(head("Content-Length: 100000"))
    for _ in range(100_000):
        connection.sendall(b"#")
        time.sleep(0.05)


def speak_no_http(connection: socket.socket) -> None:
    connection.sendall(b"220 mail.example ESMTP\r\n")


PACKED = gzip.compress(bytes(16 << 20))


def pack(connection: socket.socket) -> None:
    connection.sendall(head("Content-Encoding: gzip", f"Content-Length: {len(PACKED)}") + PACKED)


def promise_more(connection: socket.socket) -> None:
    connection.recv(1 << 16)
    connection.sendall(head("Content-Length: 100") + b"short")


def get(spec_text: str) -> bytes | None:
    async def ask() -> bytes | None:
        http = EngineHTTP(parse_engine(spec_text))
        try:
            return await http.get("/metrics")
        finally:
            await http.close()

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (say_nothing, "takes more than"), (dribble_a_head, "takes more than"), (dribble_a_body, "takes more than"),
        (speak_no_http, "cannot be asked"), (pack, "encoding 'gzip'"), (promise_more, "cannot be asked"),
    ],
)  # fmt: skip
def test_an_answer_that_is_none_costs_its_time_limit_at_most(
    answer: Answer, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_http, "TIMEOUT_SECONDS", SECONDS)
    with RawServer(answer) as server:
        began = time.monotonic()
        with pytest.raises(EngineUnreachableError, match=message):
            get(f"a=vllm+http://127.0.0.1:{server.port}")
        assert time.monotonic() - began < 40 * SECONDS


def test_a_page_of_fifty_megabytes_is_left_after_four() -> None:
    def flood(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        server.send(connection, head(f"Content-Length: {50 << 20}"))
        for _ in range(50 * 16):
            server.send(connection, b"vllm:x 1\n" * (7282))

    with RawServer(flood) as server, pytest.raises(EngineUnreachableError, match="more than"):
        get(f"a=vllm+http://127.0.0.1:{server.port}")
    assert server.num_sent < MAX_ANSWER_BYTES + (16 << 20), "beyond the limit and buffers nothing is read"


def test_a_redirect_is_not_followed() -> None:
    def be_asked(connection: socket.socket) -> None:
        connection.sendall(head("Content-Length: 0"))

    with RawServer(be_asked) as elsewhere:

        def redirect(connection: socket.socket) -> None:
            connection.recv(1 << 16)
            connection.sendall(
                head(f"Location: http://127.0.0.1:{elsewhere.port}/", "Content-Length: 0", status="302 Found")
            )

        with RawServer(redirect) as server, pytest.raises(EngineUnreachableError, match="status 302"):
            get(f"a=vllm+http://127.0.0.1:{server.port}")
        assert elsewhere.num_connections == 0


def fine(connection: socket.socket) -> None:
    connection.recv(1 << 16)
    connection.sendall(head("Content-Length: 2") + b"ok")


def test_over_tls_only_who_is_trusted_is_asked_and_the_file_is_read_again(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    trusted = tmp_path / "trusted.pem"
    with RawServer(fine, server_context(certificate, key)) as server:
        url = f"a=vllm+https://127.0.0.1:{server.port}"
        with pytest.raises(EngineUnreachableError, match="CERTIFICATE_VERIFY_FAILED"):
            get(url)  # the system's certificates do not have it

        async def ask_and_mend() -> None:
            http = EngineHTTP(parse_engine(f"{url}?ca_file={trusted}"))
            for wrong in ("", "none", "# né\n"):
                trusted.write_text(wrong, encoding="utf-8")
                with pytest.raises(EngineUnreachableError):
                    await http.get("/")
            trusted.write_text("# a name that is not ASCII: Müller\n" + Path(certificate).read_text(), encoding="utf-8")
            assert await http.get("/") == b"ok"
            await http.close()

        asyncio.run(ask_and_mend())


def test_an_expired_certificate_is_refused(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, days=-1)
    context = server_context(certificate, key)
    with RawServer(fine, context) as server, pytest.raises(EngineUnreachableError, match="expired"):
        get(f"a=vllm+https://127.0.0.1:{server.port}?ca_file={certificate}")
