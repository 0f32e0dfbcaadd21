"""Serves a live page on this machine only: read-only, behind an address that cannot be guessed.

There is one page and its data. No path leads to a file. The name that a browser asked for has to be that of
this machine, so that no other site can have its name point here and read along (DNS rebinding).
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from holdfast.core.errors import HoldfastError
from holdfast.report.live import LiveView
from holdfast.report.page_data import policy

Answer = tuple[str, bytes]  # type and content
LOCAL = ("127.0.0.1", "localhost", "[::1]")
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": f"{policy(live=True)}; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def is_local(host: str | None) -> bool:
    """Whether the ``Host`` of a request is this machine; any port, as it may come through a tunnel."""
    name = (host or "").strip().lower()
    return (name if name.endswith("]") else name.rpartition(":")[0] or name) in LOCAL


def answers(view: LiveView, root: str = "/") -> dict[str, Callable[[str], Answer]]:
    """What is answered under which path, given the query."""

    def page(_: str) -> Answer:
        return "text/html; charset=utf-8", view.page().encode()

    def data(query: str) -> Answer:
        since = parse_qs(query).get("since", [""])[0]
        text = json.dumps(view.news(since), separators=(",", ":"), allow_nan=False)
        return "application/json", text.encode()

    return {root: page, f"{root}data": data}


def respond(handler: BaseHTTPRequestHandler, pages: dict[str, Callable[[str], Answer]]) -> None:
    """Answers a GET from ``pages``, or refuses it."""
    asked = urlsplit(handler.path)
    if not is_local(handler.headers.get("Host")):
        return handler.send_error(403, "Not the name of this machine")
    path = asked.path.encode()
    page = next((page for own, page in pages.items() if secrets.compare_digest(own.encode(), path)), None)
    if page is None:
        return handler.send_error(404)
    kind, content = page(asked.query)
    handler.send_response(200)
    for name, value in {"Content-Type": kind, "Content-Length": str(len(content)), **HEADERS}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(content)
    return None


class LiveServer:
    """A live page at ``url``, served until closed."""

    def __init__(self, view: LiveView, port: int = 0) -> None:
        """``port`` 0: a free one."""
        pages = answers(view, f"/{secrets.token_urlsafe(16)}/")
        served = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 30  # seconds for a request to come in
            server_version, sys_version = "holdfast", ""

            def do_GET(self) -> None:
                served.asked = time.monotonic()
                with suppress(ConnectionError):  # the browser has gone
                    respond(self, pages)
                served.answered += 1

            def log_message(self, format: str, *args: object) -> None:
                pass

        try:
            self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        except OSError as error:
            raise HoldfastError(
                f"--port {port}: cannot serve on 127.0.0.1 ({error.strerror}); choose another port"
            ) from None
        self.server.daemon_threads = True
        self.asked, self.answered = -60.0, 0
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}{next(iter(pages))}"
        threading.Thread(target=self.server.serve_forever, name="live page", daemon=True).start()

    def close(self, patience: float = 2.5) -> None:
        """Ends; a browser that shows the page gets the chance to ask once more."""
        answered, looked_on = self.answered, time.monotonic() - self.asked < patience
        end = time.monotonic() + patience
        while looked_on and self.answered == answered and time.monotonic() < end:
            time.sleep(0.05)
        self.server.shutdown()
        self.server.server_close()
