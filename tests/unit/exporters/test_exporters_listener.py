"""The read-only listener, over real sockets and in process."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
from naive_engine import ManualClock
from starlette.testclient import TestClient

from kvwatch import http_protocol
from kvwatch import listener as listener_module
from kvwatch.errors import ConfigError, ExporterError
from kvwatch.exporters.identity import EngineIdentity
from kvwatch.exporters.prometheus.asgi import MetricsApp, make_listener
from kvwatch.exporters.prometheus.families import ViewCollector
from kvwatch.exporters.prometheus.page import MetricsPage
from kvwatch.ledger.mirror import Mirror
from kvwatch.listener import Listener, bind, parse_address


def make_client(is_alive: Callable[[], bool] = lambda: True, is_ready: Callable[[], bool] = lambda: True) -> TestClient:
    clock = ManualClock()
    mirror = Mirror(clock)
    page = MetricsPage(ViewCollector(lambda: mirror.view, [], EngineIdentity("test")), clock)
    return TestClient(make_listener(MetricsApp(page), is_alive, is_ready), raise_server_exceptions=False)


def raise_error() -> bool:
    raise RuntimeError("secret path")


def test_metrics_health_and_ready_answer() -> None:
    client = make_client()

    metrics = client.get("/metrics")
    assert metrics.status_code == 200
    assert metrics.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "kvwatch_preemptions_total" in metrics.text
    assert (client.get("/health").status_code, client.get("/ready").status_code) == (200, 200)


def test_openmetrics_is_given_to_those_who_ask_for_it() -> None:
    response = make_client().get("/metrics", headers={"Accept": "application/openmetrics-text;version=1.0.0"})

    assert response.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert response.text.endswith("# EOF\n")


@pytest.mark.parametrize("path", ["/metrics", "/health", "/ready"])
def test_head_answers_without_a_body(path: str) -> None:
    response = make_client().head(path)

    assert (response.status_code, response.content) == (200, b"")


@pytest.mark.parametrize("path", ["/metrics", "/health", "/ready"])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_every_other_method_is_refused(path: str, method: str) -> None:
    response = make_client().request(method, path)

    assert response.status_code == 405
    assert "GET" in response.headers["allow"]


@pytest.mark.parametrize("path", ["/", "/metrics/", "/metrics/x", "/admin/v1", "/docs", "//metrics", "/..%2fmetrics"])
def test_every_other_path_is_not_there(path: str) -> None:
    assert make_client().get(path, follow_redirects=False).status_code == 404


@pytest.mark.parametrize("answer", [lambda: False, raise_error])
def test_an_engine_that_is_stuck_or_cannot_answer_is_not_healthy(answer: Callable[[], bool]) -> None:
    """vllm#45414: /health said 200 while nothing moved."""
    client = make_client(is_alive=answer, is_ready=answer)

    health, ready = client.get("/health"), client.get("/ready")

    assert (health.status_code, ready.status_code) == (503, 503)
    assert "secret" not in health.text
    assert client.get("/metrics").status_code == 200


def test_other_kinds_of_connection_are_ignored_by_the_metrics_app() -> None:
    async def call() -> list[object]:
        sent: list[object] = []

        async def send(message: object) -> None:
            sent.append(message)

        async def receive() -> dict[str, str]:
            return {}

        clock = ManualClock()
        page = MetricsPage(ViewCollector(lambda: Mirror(clock).view, [], EngineIdentity("x")), clock)
        await MetricsApp(page)({"type": "lifespan"}, receive, send)
        return sent

    assert asyncio.run(call()) == []


@pytest.mark.parametrize(
    ("listen", "expected"),
    [("127.0.0.1:9400", ("127.0.0.1", 9400)), ("[::1]:0", ("::1", 0)), ("localhost:80", ("localhost", 80))],
)
def test_addresses_are_host_and_port(listen: str, expected: tuple[str, int]) -> None:
    assert parse_address(listen, "--x") == expected


@pytest.mark.parametrize("listen", ["9400", ":9400", "host:", "host:port", "host:65536", "host:-1", "", "host:٣"])
def test_anything_else_is_a_configuration_error_with_a_remedy(listen: str) -> None:
    with pytest.raises(ConfigError, match=r"--x: .* is not HOST:PORT .* write for instance"):
        parse_address(listen, "--x")


def test_a_taken_port_is_an_error_that_says_what_to_do() -> None:
    with bind("127.0.0.1:0", "--x") as taken:
        port = taken.getsockname()[1]

        with pytest.raises(ExporterError, match=rf"--x: cannot listen on 127\.0\.0\.1:{port} .* choose another"):
            bind(f"127.0.0.1:{port}", "--x")


def test_a_host_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ExporterError, match="cannot resolve"):
        bind("no-such-host.invalid:0", "--x")


def test_an_address_of_another_machine_cannot_be_bound() -> None:
    with pytest.raises(ExporterError, match="cannot listen on"):
        bind("192.0.2.1:0", "--x")


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[str, int]]:
    clock = ManualClock()
    mirror = Mirror(clock)
    page = MetricsPage(ViewCollector(lambda: mirror.view, [], EngineIdentity("test")), clock)
    bound = bind("127.0.0.1:0", "--x")
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # so that who does not read is noticed
    host, port = bound.getsockname()
    stop = asyncio.Event()
    app = make_listener(MetricsApp(page), lambda: True, lambda: True)
    task = asyncio.create_task(Listener(app, bound).serve(stop))
    try:
        yield host, port
    finally:
        stop.set()
        await asyncio.wait_for(task, 60)


def test_a_served_listener_answers_and_closes_its_port_when_it_stops() -> None:
    async def run() -> int:
        async with serving() as (host, port):
            async with httpx.AsyncClient(trust_env=False) as client:
                response = await client.get(f"http://{host}:{port}/metrics")
            assert response.status_code == 200
            assert "server" not in response.headers
        return port

    port = asyncio.run(run())

    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.parametrize(
    "begin",
    [
        b"",
        b"GET /met",
        b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /met",
        b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 400,
        b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    ],
    ids=["silent", "half a request", "half a second request", "reads nothing of many", "reads nothing of one"],
)
def test_who_asks_or_reads_too_slowly_is_shown_out_and_others_are_served(
    begin: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than 512 connections with half a request each shut out every scraper and /health, for ever."""
    monkeypatch.setattr(http_protocol, "EXCHANGE_SECONDS", 0.3)
    monkeypatch.setattr(http_protocol, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(listener_module, "MAX_CONNECTIONS", 5)

    async def run() -> list[int]:
        async with serving() as (host, port):
            writers = []
            for _ in range(8):
                slow = socket.socket()
                slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
                slow.setblocking(False)
                await asyncio.get_running_loop().sock_connect(slow, (host, port))
                _, writer = await asyncio.open_connection(sock=slow, limit=16)
                writer.write(begin)
                writers.append(writer)
            await asyncio.sleep(1.2)
            async with httpx.AsyncClient(trust_env=False) as client:
                found = [(await client.get(f"http://{host}:{port}/{path}")).status_code for path in ("health", "ready")]
                await asyncio.sleep(0.5)  # between two requests a connection may rest
                found.append((await client.get(f"http://{host}:{port}/metrics")).status_code)
            for writer in writers:
                writer.close()
            return found

    assert asyncio.run(run()) == [200, 200, 200]


def test_more_connections_than_there_is_room_for_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "MAX_OPEN", 4)

    async def run() -> list[bytes]:
        async with serving() as (host, port):
            streams = [await asyncio.open_connection(host, port) for _ in range(6)]
            found = []
            for reader, writer in streams:
                writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                try:
                    found.append(await asyncio.wait_for(reader.read(12), 5))
                except ConnectionError:
                    found.append(b"")
            for _, writer in streams:
                writer.close()
            return found

    assert asyncio.run(run()) == [*[b"HTTP/1.1 200"] * 4, b"", b""]


def test_a_huge_header_is_refused() -> None:
    """CVE-2025-48956: headers without a bound exhaust the server."""

    async def run() -> bytes:
        async with serving() as (host, port):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 2_000_000 + b"\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            answer = b""
            with contextlib.suppress(ConnectionError):
                answer = await asyncio.wait_for(reader.read(100), 60)
            writer.close()
            return answer

    assert b"200" not in asyncio.run(run())
