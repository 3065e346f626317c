"""The HTTP session of the SDK's exporters, for collectors that answer anything.

Owns that an answer costs neither memory nor time: its status decides, its body is thrown away and no longer than the
export's time is spent on it, headers included. A redirect is an error: nobody has taken what was sent. Does not know
what is sent.
"""

import http.client
import io
import socket
import time
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool, PoolManager
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError
from urllib3.response import BaseHTTPResponse

MAX_BODY_BYTES = 64 * 1024
"""A longer answer is not read to its end; its connection is closed instead of being used again."""

DEFAULT_SECONDS = 5.0
_READ_BYTES = 4096


class DeadlineReader(io.RawIOBase):
    """Reads a socket until a moment, however many reads that takes.

    A socket's own timeout begins anew with every byte that comes.
    """

    def __init__(self, source: socket.SocketIO, connection: socket.socket, deadline: float) -> None:
        self._source = source
        self._connection = connection
        self._deadline = deadline

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Read what is there, waiting for the first byte until the deadline.

        Raises:
            TimeoutError: the deadline has passed.
        """
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("timed out")
        self._connection.settimeout(remaining)
        return self._source.readinto(buffer)

    def close(self) -> None:
        """Let go of the socket. Safe twice."""
        self._source.close()
        super().close()


class DeadlineResponse(http.client.HTTPResponse):
    """An answer that has to be complete, from its first byte to its last, within the socket's timeout."""

    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        deadline = time.monotonic() + (sock.gettimeout() or DEFAULT_SECONDS)
        # The raw file counts as a user of the socket, which the connection may close before the answer is read.
        reader = DeadlineReader(sock.makefile("rb", buffering=0), sock, deadline)
        self.fp.close()
        self.fp = io.BufferedReader(reader)


class _Connection(HTTPConnection):
    response_class = DeadlineResponse


class _SecureConnection(HTTPSConnection):
    response_class = DeadlineResponse


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Connection


class _SecurePool(HTTPSConnectionPool):
    ConnectionCls = _SecureConnection


class BoundedAdapter(HTTPAdapter):
    """Sends requests; gives answers without their bodies. Sender's thread only."""

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        """Make the pools, direct ones."""
        super().init_poolmanager(*args, **kwargs)
        _bound(self.poolmanager)

    def proxy_manager_for(self, *args: Any, **kwargs: Any) -> Any:
        """Return the pools of a proxy."""
        return _bound(super().proxy_manager_for(*args, **kwargs))

    def send(self, request: requests.PreparedRequest, *args: object, **kwargs: object) -> requests.Response:
        """Send one request.

        Raises:
            requests.RequestException: no answer came, or the answer sends us elsewhere.
        """
        timeout = kwargs.get("timeout")
        seconds = float(timeout) if isinstance(timeout, int | float) else DEFAULT_SECONDS
        deadline = time.monotonic() + seconds
        response = super().send(request, *args, **kwargs | {"stream": True})  # type: ignore[arg-type]  # passed on
        _throw_away(response.raw, deadline)
        response.raw = io.BytesIO()  # requests reads the body anyway
        if 300 <= response.status_code < 400:
            raise requests.RequestException(
                f"the collector answers {response.status_code}, a redirect, which is not followed: give the address "
                "that it leads to"
            )
        return response


def bounded_session() -> requests.Session:
    """Return a session that sends everything through a `BoundedAdapter`."""
    session = requests.Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, BoundedAdapter())
    return session


def _bound(manager: PoolManager) -> PoolManager:
    """Have a manager's connections read with a deadline."""
    manager.pool_classes_by_scheme = {"http": _Pool, "https": _SecurePool}
    return manager


def _throw_away(body: BaseHTTPResponse, deadline: float) -> None:
    """Read a body to its end, so that the connection can be used again, or close the connection."""
    num_bytes = 0
    try:
        while chunk := body.read1(_READ_BYTES, decode_content=False):
            num_bytes += len(chunk)
            if num_bytes > MAX_BODY_BYTES or time.monotonic() > deadline:
                break
        else:
            return
    except (HTTPError, OSError):
        pass  # the status has come, and says all that there is to know
    body.close()
