"""A small read-only page and Prometheus metrics about a member, on the loopback interface only."""

from __future__ import annotations

import errno
import html
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, MetricsHandler
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from holdfast.core.errors import TRY_LATER, HoldfastError

Status = Callable[[], dict[str, Any]]

GAUGES = {
    "round": "Rounds finished",
    "rounds": "Rounds in all",
    "uptime_seconds": "Seconds since the process began",
}
COUNTERS = {
    "payload_bytes": "Bytes of messages sent, each counted once",
    "wire_bytes_sent": "Bytes of messages that went out, repetitions and compression included",
    "wire_bytes_received": "Bytes of messages that came in",
    "retries": "Attempts that had to be repeated",
    "waiting_seconds": "Seconds spent on exchanges",
}


PEER_FIGURES = {
    "waiting_seconds": "Seconds for which this peer has been waited for, by now",
    "round": "The last round that this peer is known to be in",
    "bytes_sent": "Bytes of messages to this peer, as far as we dialled",
    "bytes_received": "Bytes of messages from this peer",
    "retries": "Attempts to reach this peer that had to be repeated",
}
PEER_GAUGES = ("waiting_seconds", "round")


class _MemberMetrics(Collector):
    def __init__(self, status: Status) -> None:
        self.status = status

    def collect(self) -> Iterator[Metric]:
        status = self.status()
        for key, text in GAUGES.items():
            yield GaugeMetricFamily(f"holdfast_{key}", text, value=status[key])
        for key, text in COUNTERS.items():
            yield CounterMetricFamily(f"holdfast_{key}", text, value=status[key])
        refused = CounterMetricFamily("holdfast_refused", "Callers and messages refused", labels=["kind"])
        for kind, count in status["refused"].items():
            refused.add_metric([kind], count)
        yield refused
        for key, text in PEER_FIGURES.items():
            kind = GaugeMetricFamily if key in PEER_GAUGES else CounterMetricFamily
            family = kind(f"holdfast_peer_{key}", text, labels=["peer"])
            for peer, of_peer in status["peers"].items():
                family.add_metric([peer], of_peer[key])
            yield family
        if status["certificate_days"] is not None:
            text = "Days until this member's certificate expires"
            yield GaugeMetricFamily("holdfast_certificate_days", text, value=status["certificate_days"])
        figures = GaugeMetricFamily("holdfast_metric", "The latest figures of this node", labels=["name"])
        for name, value in status["metrics"].items():
            figures.add_metric([name], value)
        yield figures


def health(status: dict[str, Any]) -> dict[str, Any]:
    """Whether the member gets on: it waits for nobody for longer than half of ``limits.wait``."""
    ages = {peer: figures["waiting_seconds"] for peer, figures in status["peers"].items()}
    late = {peer: age for peer, age in ages.items() if age > status["wait_limit"] / 2}
    return {"healthy": not late, "round": status["round"], "phase": status["phase"], "late": late}


MOST_READERS = 64  # at a time; whoever has been there longest makes room for the next
LONGEST_READ = 30.0  # seconds for a whole request, and for its answer


class _Pages(ThreadingHTTPServer):
    """Bounded: anybody may connect and say nothing, and must not use up the member's threads and files."""

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self._open: dict[socket.socket, float] = {}  # since when
        self._lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._open) >= MOST_READERS:
                self._end(next(iter(self._open)))
            self._open[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        with self._lock:
            for request, since in list(self._open.items()):
                if time.monotonic() - since > LONGEST_READ:
                    self._end(request)

    def _end(self, request: socket.socket) -> None:
        """Whoever serves it finds that the other end has gone, and closes it."""
        del self._open[request]
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Readers that go away are no event."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class PageTakenError(HoldfastError):
    """Another process serves there, perhaps the one before that is about to end."""

    exit_code = TRY_LATER


def serve_monitor(
    status: Status,
    port: int,
    respond: Callable[[BaseHTTPRequestHandler], None] | None = None,
    host: str = "127.0.0.1",
    is_own: Callable[[str | None], bool] = lambda _: True,
) -> ThreadingHTTPServer:
    """Serves ``/metrics``, ``/health`` and a page on ``host``; shut it down when done.

    ``respond`` answers everything else. Without it, ``/`` is a table. ``is_own``: whether the name that was
    asked for may be used; a name of somebody else's that points here lets its pages read along.
    """

    class Handler(MetricsHandler):
        def log_message(self, format: str, *args: Any) -> None:
            """Who looks at the page is no event."""

        registry = CollectorRegistry()
        timeout = 30  # seconds for a request to come in

        def do_GET(self) -> None:  # noqa: N802 - as http.server calls it
            if not is_own(self.headers.get("Host")):
                self.send_error(403, "Not the name of this machine")
            elif self.path == "/metrics":
                super().do_GET()
            elif self.path == "/health":
                answer = health(status())
                body = json.dumps(answer).encode()
                self.send_response(200 if answer["healthy"] else 503)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            elif respond is not None:
                respond(self)
            elif self.path == "/":
                body = _page(status())
                self.send_response(200)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            else:
                self.send_error(404)

    Handler.registry.register(_MemberMetrics(status))
    try:
        server = _Pages((host, port), Handler)
    except OSError as error:
        kind = PageTakenError if error.errno == errno.EADDRINUSE else HoldfastError
        raise kind(
            f"--monitor: cannot serve on {host}:{port} ({error.strerror}); choose another port"
        ) from None
    threading.Thread(target=server.serve_forever, name="monitor", daemon=True).start()
    return server


def _page(status: dict[str, Any]) -> bytes:
    rows = "".join(
        f"<tr><th>{html.escape(key.replace('_', ' '))}</th><td>{html.escape(str(value))}</td></tr>"
        for key, value in status.items()
    )
    title = html.escape(f"holdfast: {status['name']}")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="5">'
        f"<title>{title}</title><style>body{{font-family:sans-serif;margin:2em}}"
        f"th{{text-align:left;padding-right:2em}}</style><h1>{title}</h1><table>{rows}</table></html>"
    ).encode()
