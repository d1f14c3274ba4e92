"""What stand-ins for HTTP servers share: JSON in, JSON out, on a free port of this machine, until they are closed."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Answering(BaseHTTPRequestHandler):
    """A handler without a log; `get` and `post` answer."""

    def get(self) -> None:
        self.send_error(404)

    def post(self, body: Any) -> None:
        """Answer to JSON."""
        self.send_error(404)

    def do_GET(self) -> None:
        self.get()

    def do_POST(self) -> None:
        self.post(json.loads(self.rfile.read(int(self.headers["content-length"]))))

    def reply(self, content: Any, code: int = 200) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, *args: Any) -> None:
        pass


class HttpStub:
    """A server of threads, each of whose requests `handler` answers."""

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
