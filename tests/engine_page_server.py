"""An HTTP server on loopback that answers as an engine is told to. A context manager."""

import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self


class EnginePages:
    """Pages by path; others answer 404. `requests` are path and authorization of each request.

    Args:
        pages: Body by path; may be changed at any time. A number is a status without a body.
        port: To listen on; 0 for a free one.
        host: Address to listen on, of IPv4 or IPv6.
    """

    def __init__(self, pages: dict[str, bytes | int], port: int = 0, host: str = "127.0.0.1") -> None:
        self.pages = pages
        self.requests: list[tuple[str, str | None]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.requests.append((self.path, self.headers.get("Authorization")))
                page = outer.pages.get(self.path, 404)
                body = page if isinstance(page, bytes) else b""
                self.send_response(200 if isinstance(page, bytes) else page)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            daemon_threads = True

        self._server = Server((host, port), Handler)
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.server_port

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
