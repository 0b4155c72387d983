"""HTTP servers in a tracking server's place: up, but no help."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ANSWERS = {
    "works": (200, b"OK"),
    "wants a password": (401, b"You are not authenticated."),
    "forbids": (403, b"<html><h1>Forbidden</h1></html>"),
    "is down": (503, b"upstream"),
    "sends elsewhere": (302, b""),
}


@contextmanager
def fake_server(mode: str) -> Iterator[str]:
    """The URI of a server of one of the kinds of ``ANSWERS``, or one that ``hangs``."""
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if mode == "hangs":
                ended.wait(60)
                return
            code, body = ANSWERS[mode]
            self.send_response(code)
            self.send_header("Location", "http://127.0.0.1:9/login")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = answer

        def log_message(self, *words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
