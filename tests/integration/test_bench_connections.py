"""The load generator's own way over HTTP/1.1: what it sends, when it uses a connection again, how answers end."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from builders import NullModel
from openai_server import MODEL, arithmetic_server, byte_level_tokenizer, save_tokenizer

from kvwatch.bench import connections
from kvwatch.bench.client import Client
from kvwatch.bench.connections import Connections
from kvwatch.bench.dialect import Dialect
from kvwatch.bench.errors import RequestFailed
from kvwatch.bench.outcome import RequestOutcome
from kvwatch.bench.runner import Run
from kvwatch.bench.scenarios import RequestSpec

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


class Kept:
    """A reader that keeps everything."""

    def __init__(self, enough: int | None = None) -> None:
        self.status = 0
        self.body = b""
        self._enough = enough

    def head(self, status: int, headers: dict[str, str]) -> bool:
        assert headers["content-type"] == "text/event-stream"
        self.status = status
        return False

    def piece(self, data: bytes) -> bool:
        self.body += data
        return self._enough is not None and len(self.body) >= self._enough


@contextlib.contextmanager
def answering(*answers: bytes | Callable[[socket.socket], None]) -> Iterator[tuple[str, list[tuple[int, bytes]]]]:
    """Give the address of a server that gives these answers, and what it was asked: (connection, request)."""
    asked: list[tuple[int, bytes]] = []
    left = list(answers)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for number in range(len(answers)):
                with contextlib.suppress(OSError):
                    connection, _ = listener.accept()
                    connection.settimeout(60)
                    with connection:
                        while left and (request := received(connection)):
                            asked.append((number, request))
                            answer = left.pop(0)
                            connection.sendall(answer) if isinstance(answer, bytes) else answer(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", asked


def received(connection: socket.socket) -> bytes:
    """Return the next request, whose body ends with `!`."""
    found = b""
    while not found.endswith(b"!"):
        piece = connection.recv(65536)
        if not piece:
            return b""
        found += piece
    return found


def sized(content: bytes, *headers: bytes) -> bytes:
    return b"".join([HEAD, *headers, b"content-length: %d\r\n\r\n" % len(content), content])


def posts(url: str, count: int, **keywords: str) -> list[Kept]:
    async def ask() -> list[Kept]:
        readers = [Kept() for _ in range(count)]
        async with Connections(url, **keywords) as target:
            for reader in readers:
                await target.post("/v1/completions", b"hello!", reader)
        return readers

    return asyncio.run(ask())


def test_answers_of_all_kinds_come_over_one_connection() -> None:
    chunked = HEAD + b"transfer-encoding: chunked\r\n\r\n3\r\none\r\n3;x\r\ntwo\r\n0\r\n\r\n"
    waiting = b"HTTP/1.1 102 Processing\r\n\r\n" + sized(b"three")
    with answering(sized(b""), chunked, waiting, sized(b"four")) as (url, asked):
        readers = posts(url, 4)

    assert [reader.body for reader in readers] == [b"", b"onetwo", b"three", b"four"]
    assert {number for number, _ in asked} == {0}


@pytest.mark.parametrize(
    "first",
    [
        sized(b"one", b"Connection: Close\r\n"),
        sized(b"one", b"Connection: Close\r\n", b"Connection: x\r\n"),
        sized(b"one").replace(b"HTTP/1.1", b"HTTP/1.0"),
        lambda connection: (connection.sendall(HEAD + b"\r\none"), connection.shutdown(socket.SHUT_RDWR)),
    ],
    ids=["close", "listed", "old", "endless"],
)
def test_a_connection_that_may_not_stay_is_not_used_again(first: bytes | Callable[[socket.socket], None]) -> None:
    with answering(first, sized(b"two")) as (url, asked):
        readers = posts(url, 2)

    assert [reader.body for reader in readers] == [b"one", b"two"]
    assert [number for number, _ in asked] == [0, 1]


def test_a_connection_that_rested_too_long_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "KEEP_ALIVE_SECONDS", 0.0)
    with answering(sized(b"one"), sized(b"two")) as (url, asked):
        posts(url, 2)

    assert [number for number, _ in asked] == [0, 1]


def test_a_connection_that_the_server_closed_meanwhile_is_not_used_again() -> None:
    def one_and_close(connection: socket.socket) -> None:
        connection.sendall(sized(b"one"))
        connection.shutdown(socket.SHUT_RDWR)

    async def ask(url: str) -> None:
        async with Connections(url) as target:
            await target.post("/", b"!", Kept())
            await asyncio.sleep(0.3)
            await target.post("/", b"!", Kept())

    with answering(one_and_close, sized(b"two")) as (url, asked):
        asyncio.run(ask(url))
    assert [number for number, _ in asked] == [0, 1]


@pytest.mark.skipif(not hasattr(socket, "TCP_CORK"), reason="an answer and its end cannot be sent as one here")
def test_a_connection_that_ends_with_its_answer_is_not_used_again_at_once() -> None:
    """The server does not say that it will close; when the client asks again, its loop has not seen the end yet."""

    def one_and_end(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
        connection.sendall(sized(b"one"))
        connection.shutdown(socket.SHUT_RDWR)

    with answering(*[one_and_end] * 5) as (url, asked):
        readers = posts(url, 5)

    assert [reader.body for reader in readers] == [b"one"] * 5
    assert [number for number, _ in asked] == [0, 1, 2, 3, 4]


def test_what_is_sent_is_one_request_below_the_root() -> None:
    with answering(sized(b"")) as (url, asked):
        posts(f"{url}/below/", 1, api_key="secret")

    head, _, body = asked[0][1].partition(b"\r\n\r\n")
    line, *headers = head.decode().lower().split("\r\n")
    assert line == "post /below/v1/completions http/1.1"
    assert body == b"hello!"
    assert {f"host: {url.removeprefix('http://')}", "content-length: 6", "authorization: bearer secret"} <= set(headers)
    assert "accept-encoding: identity" in headers


def test_a_name_and_a_password_in_the_address_are_sent() -> None:
    with answering(sized(b"")) as (url, asked):
        posts(url.replace("//", "//me:pw@"), 1)
    assert b"authorization: basic bwu6chc=" in asked[0][1].lower()


def test_who_has_enough_hangs_up() -> None:
    ends: list[bool] = []

    def endless(connection: socket.socket) -> None:
        connection.sendall(HEAD + b"\r\n")
        with contextlib.suppress(OSError):
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                connection.sendall(b"word ")
                time.sleep(0.002)
            return
        ends.append(True)

    async def ask(url: str) -> Kept:
        reader = Kept(enough=50)
        async with Connections(url) as target:
            await target.post("/", b"!", reader)
        return reader

    with answering(endless) as (url, _):
        reader = asyncio.run(ask(url))
        deadline = time.monotonic() + 30
        while not ends and time.monotonic() < deadline:
            time.sleep(0.01)
    assert 50 <= len(reader.body) < 5000
    assert ends == [True]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (HEAD + b"content-length: x\r\n\r\n", "protocol"),
        (HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n", "protocol"),
        (sized(b"one") + b"HTTP/1.1 200", "protocol"),
        (HEAD + b"x: " + b"y" * 400_000, "protocol"),
        (lambda connection: connection.close(), "truncated"),
    ],
)
def test_what_is_no_answer_is_an_error(answer: bytes | Callable[[socket.socket], None], kind: str) -> None:
    with answering(answer) as (url, _), pytest.raises(RequestFailed) as caught:
        posts(url, 1)
    assert caught.value.kind == kind


def test_a_name_that_does_not_exist_and_a_port_where_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for url, kind in ((f"http://127.0.0.1:{port}", "refused"), ("http://no-such-name.invalid", "connection")):
        with pytest.raises(RequestFailed) as caught:
            posts(url, 1)
        assert caught.value.kind == kind


def test_what_it_counts_is_what_a_server_sent(tmp_path: Path) -> None:
    """As many pieces, gaps and tokens as there were, for many requests at once over connections that are used again."""
    tokenizer = byte_level_tokenizer()
    model = NullModel(tokenizer.get_vocab_size())
    model.on_step = lambda _step: time.sleep(0.001)
    specs = [
        RequestSpec(scenario="s", prompt=f"one {index}", max_tokens=30, index=index, is_fixed_length=True)
        for index in range(24)
    ]

    async def load(url: str) -> list[RequestOutcome]:
        async with Connections(url) as target:
            run = Run(Client(target, Dialect("kvwatch", MODEL, "completions")), specs, concurrency=6)
            await run.run()
            return run.outcomes

    with arithmetic_server(save_tokenizer(tmp_path, tokenizer), model) as server:
        outcomes = asyncio.run(load(server.url))
        for outcome in outcomes:
            assert (outcome.status, outcome.output_tokens, outcome.error) == ("ok", 30, "")
            spec = specs[outcome.index]
            fields = {"max_tokens": 30, "seed": spec.seed, "temperature": spec.temperature, "ignore_eos": True}
            answer = server.post("/v1/completions", prompt=spec.prompt, **fields).json()
            assert outcome.texts == [answer["choices"][0]["text"]]
            assert outcome.prompt_tokens == answer["usage"]["prompt_tokens"]
            assert len(outcome.gaps) == outcome.num_pieces - 1
            assert outcome.first_token_seconds is not None
            spread = outcome.first_token_seconds + sum(outcome.gaps)
            assert outcome.sent_seconds <= spread <= outcome.end_seconds + 1e-6
