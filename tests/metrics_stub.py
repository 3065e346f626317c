"""A page on a free loopback port: what a program that is not here would answer."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def one_page(text: str, path: str = "/metrics", tokens: list[str] | None = None) -> Iterator[str]:
    """Serve one page at one path, and 404 elsewhere; give the root's address, and note which tokens are sent."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if tokens is not None:
                tokens.extend(self.headers.get_all("Authorization", []))
            body = text.encode() if self.path == path else b"not here"
            self.send_response(200 if self.path == path else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, name="one-page")
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
