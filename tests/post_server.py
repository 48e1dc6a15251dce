"""A server on loopback that keeps what it receives by POST, such as OpenLineage's events or OpenTelemetry's spans."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class PostServer(ThreadingHTTPServer):
    """The address is `url`; `received` has the path and the body of each request, `headers` their headers. `answer` may
    be set to another status, and `silent` lets requests wait for ever."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.received: list[tuple[str, bytes]] = []
        self.headers: list[dict[str, str]] = []
        self.answer = 200
        self.silent = threading.Event()


class _Handler(BaseHTTPRequestHandler):
    server: PostServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append((self.path, body))
        self.server.headers.append(dict(self.headers))
        if self.server.silent.is_set():
            threading.Event().wait()
        self.send_response(self.server.answer)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def post_server() -> Iterator[PostServer]:
    """Serves in a thread while the block runs."""
    with PostServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()
