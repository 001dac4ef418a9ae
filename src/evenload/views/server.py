"""`PageServer`: shows a page of this machine to its own browsers, and sends new sections as they come.

Server-Sent Events over the standard library: one direction, text, and a browser that reconnects by itself. A web framework
would add two packages for two addresses (docs/decisions/page-without-a-framework.md).
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

from evenload.errors import ConfigError
from evenload.views.page import document

HOST = "127.0.0.1"
_HOST_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})
"""Names by which a browser on this machine (or at the end of an ssh tunnel) may call the server."""
_ALIVE_S = 15.0
"""An idle viewer receives a comment this often, so that a closed one is noticed."""
_FRESH_S = 5.0
"""A page waits at most so long for the newest records."""
_MAX_LOAD = 0.05
"""Largest part of a core for drawing, so that a page does not slow the training beside it."""


class PageServer:
    """Serves one page on the loopback address, below a random token; anything else is answered with 404.

    Raises:
        ConfigError: the port is taken or not permitted.
    """

    def __init__(self, title: str, port: int = 0) -> None:
        """Listen at once; ``port`` 0 takes a free one."""
        self._title = title
        self._token = secrets.token_urlsafe(18)
        self._changed = threading.Condition()
        self._sections: Mapping[str, str] = {}
        self._num_checks = 0
        self._num_viewers = 0
        self._is_closed = False
        self._wanted = threading.Event()
        try:
            self._server = ThreadingHTTPServer((HOST, port), self._handler())
        except OSError as error:
            raise ConfigError(
                f"port {port} of {HOST} can't be used ({error.strerror or error}); give another --port, or none for a free one"
            ) from error
        self._server.daemon_threads, self._server.block_on_close = True, False
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self._server.server_address[1]}/{self._token}/"

    def __enter__(self) -> PageServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def follow(self, draw: Callable[[], Mapping[str, str] | None], every_s: float) -> None:
        """Call ``draw`` while somebody looks, and show what it returns (None: nothing new); until an exception ends it."""
        while True:
            self._wanted.clear()
            began_s = time.thread_time()
            drawn = draw()
            cost_s = time.thread_time() - began_s
            with self._changed:
                self._num_checks += 1
                if drawn is not None:
                    self._sections = drawn
                self._changed.notify_all()
            pause_s = max(every_s, cost_s * (1 / _MAX_LOAD - 1))
            self._wanted.wait(pause_s if self._num_viewers else None)

    def _page(self) -> bytes:
        with self._changed:
            before = self._num_checks
            self._wanted.set()
            self._changed.wait_for(lambda: self._num_checks > before or self._is_closed, _FRESH_S)
            return document(self._title, self._sections, live=True).encode()

    def _stream(self, write: Callable[[bytes], object]) -> None:
        """Send a viewer every section that changed, until it is gone or the server is closed."""
        sent: Mapping[str, str] = {}
        with self._changed:
            self._num_viewers += 1
            self._wanted.set()
        try:
            while not self._is_closed:
                with self._changed:
                    if self._sections is sent and not self._is_closed:
                        self._changed.wait(_ALIVE_S)
                    newest = self._sections
                changed = {name: html for name, html in newest.items() if sent.get(name) != html}
                sent = newest
                write(f"data: {json.dumps(changed)}\n\n".encode() if changed else b":\n\n")
        finally:
            with self._changed:
                self._num_viewers -= 1

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        pages = self

        class PageHandler(BaseHTTPRequestHandler):
            server_version, sys_version = "evenload", ""

            def do_GET(self) -> None:
                name = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
                token, _, rest = self.path.removeprefix("/").partition("/")
                known = secrets.compare_digest(token.encode(), pages._token.encode()) and name in _HOST_NAMES
                with contextlib.suppress(OSError):  # the browser closed the connection
                    if known and rest == "":
                        self._reply(200, "text/html; charset=utf-8", pages._page())
                    elif known and rest == "events":
                        self._reply(200, "text/event-stream", None)
                        pages._stream(self._write)
                    else:
                        self._reply(404, "text/plain; charset=utf-8", b"not found: open the whole address\n")

            def _write(self, data: bytes) -> None:
                self.wfile.write(data)
                self.wfile.flush()

            def _reply(self, status: int, kind: str, body: bytes | None) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Cache-Control", "no-store")
                self.send_header("X-Content-Type-Options", "nosniff")
                self.send_header("Referrer-Policy", "no-referrer")
                if body is not None:
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if body is not None:
                    self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Print nothing: the terminal shows the address alone."""

        return PageHandler


def serve_until_interrupt(
    title: str, name: str, draw: Callable[[], Mapping[str, str] | None], port: int, every_s: float
) -> None:
    """Print the address of a page of ``name`` in one line, and serve it until Ctrl-C."""
    with PageServer(title, port) as server:
        try:
            print(f"evenload: {server.url} shows {name} to browsers on this machine, until Ctrl-C", flush=True)
            server.follow(draw, every_s)
        except KeyboardInterrupt:
            print()
