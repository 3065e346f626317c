"""All connections to one target: as many as there are requests at once, each used again while it is fresh."""

import asyncio
import base64
import errno
import ssl
import time
from types import TracebackType

import h11
import httpx

from kvwatch.bench.connection import Connection, Reader
from kvwatch.bench.errors import RequestFailed
from kvwatch.errors import ConfigError

CONNECT_SECONDS = 10.0
KEEP_ALIVE_SECONDS = 2.0
"""Shorter than any server's: a connection must not be closed by the server at the moment in which it is used again."""


def request_headers(api_key: str | None) -> dict[str, str]:
    """Return the headers of every request: no compression, which would make pieces wait for each other."""
    headers = {"accept-encoding": "identity", "content-type": "application/json", "user-agent": "kvwatch-bench"}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    return headers


def trusted_authorities(ca_file: str | None) -> ssl.SSLContext:
    """Return whom to trust: the system's authorities, or only those of a file in PEM.

    Raises:
        ConfigError: the file holds none, or cannot be read.
    """
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # what ssl raises is one, too
        reason = error.strerror or str(error)
        raise ConfigError(f"--ca-file: {ca_file} cannot be used ({reason}); give certificates in PEM") from error


class Connections:
    """Connections to one target, without proxies and redirects. Event loop only."""

    def __init__(self, url: str, api_key: str | None = None, ca_file: str | None = None) -> None:
        """Open none yet.

        Args:
            url: Root of the target, http or https.
            api_key: Sent with every request.
            ca_file: Authorities to trust instead of the system's.

        Raises:
            ConfigError: the file holds none, or cannot be read.
        """
        self._url = httpx.URL(url)
        self._ssl = trusted_authorities(ca_file) if self._url.scheme == "https" else None
        self._port = self._url.port or (443 if self._ssl else 80)
        headers = {"host": self._url.netloc.decode(), "accept": "*/*", **request_headers(api_key)}
        if self._url.userinfo and not api_key:
            named = f"{self._url.username}:{self._url.password}".encode()
            headers["authorization"] = f"Basic {base64.b64encode(named).decode()}"
        self._headers = list(headers.items())
        self._idle: list[Connection] = []

    async def __aenter__(self) -> "Connections":
        """Return itself."""
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Close those that rest; the others belong to who uses them."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def post(self, path: str, content: bytes, reader: Reader) -> None:
        """Post `content` to `path` below the root, and give the answer to `reader`.

        Raises:
            RequestFailed: there is no connection, the answer is no HTTP or incomplete; or as `reader` raises it.
        """
        target = self._url.raw_path.rstrip(b"/") + path.encode()
        headers = [*self._headers, ("content-length", str(len(content)))]
        request = h11.Request(method="POST", target=target, headers=headers)
        connection = self._rested() or await self._opened()
        may_stay = False
        try:
            may_stay = await connection.ask(request, content, reader)
        finally:
            if may_stay:
                connection.idle_since = time.monotonic()
                self._idle.append(connection)
            else:
                connection.close()

    def _rested(self) -> Connection | None:
        now = time.monotonic()
        while self._idle:
            connection = self._idle.pop()
            if now - connection.idle_since < KEEP_ALIVE_SECONDS and connection.is_quiet():
                return connection
            connection.close()
        return None

    async def _opened(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await loop.create_connection(Connection, self._url.host, self._port, ssl=self._ssl)
        except TimeoutError as error:
            raise RequestFailed("timeout", f"no connection within {CONNECT_SECONDS:g} s") from error
        except OSError as error:
            if isinstance(error, ConnectionRefusedError) or f"[Errno {errno.ECONNREFUSED}]" in str(error):
                raise RequestFailed("refused", "the connection was refused") from error
            raise RequestFailed("connection", str(error) or type(error).__name__) from error
        return connection
