"""Others on the wire, made of Python's own HTTP and TLS: they ask and answer whatever a test wants."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from holdfast_deploy.storage.messages import LENGTH, Header
from holdfast_deploy.wire.protocol import MESSAGES, SYNC, Answer, Ask


@dataclass(frozen=True)
class Reply:
    """What a question was answered."""

    status: int
    body: bytes

    @property
    def reason(self) -> str:
        """Why it was refused."""
        reason: str = json.loads(self.body)["detail"]
        return reason


class Caller(http.client.HTTPConnection):
    """A connection to the member ``to``, with whatever certificate is in ``context``."""

    def __init__(self, address: str, to: str, context: ssl.SSLContext, timeout: float = 60.0) -> None:
        host, _, port = address.rpartition(":")
        super().__init__(host, int(port), timeout)
        self.to, self.context = to, context

    def connect(self) -> None:
        super().connect()
        self.sock = self.context.wrap_socket(self.sock, server_hostname=self.to)

    def ask(self, question: str, body: Any = None, **headers: str) -> Reply:
        """``question``: method and path. A connection that was ended is made again for the next question."""
        method, _, path = question.partition(" ")
        try:
            self.request(method, path, body, {key.replace("_", "-"): value for key, value in headers.items()})
            answer = self.getresponse()
            reply = Reply(answer.status, answer.read())
        except BaseException:
            self.close()
            raise
        return reply

    def fetch(self, ask: Ask) -> bytes:
        """The message of an exchange."""
        header = Answer.model_validate_json(self.ask(SYNC, ask.model_dump_json().encode()).body).header
        assert header is not None
        path = f"GET {MESSAGES}/{ask.round}/{ask.exchange}"
        return self.ask(path, If_Match=f'"{header.content}"').body

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def submission(header: Header, pieces: Iterable[bytes]) -> bytes:
    """The body of a message that is submitted."""
    head = header.model_dump_json().encode()
    return LENGTH.pack(len(head)) + head + b"".join(pieces)


Made = tuple[int, bytes | Iterable[bytes]]  # status and body


class Pretender:
    """Answers on ``address`` what ``answer`` makes up for (method and path, body, headers)."""

    def __init__(
        self, address: str, context: ssl.SSLContext, answer: Callable[[str, bytes, Any], Made]
    ) -> None:
        host, _, port = address.rpartition(":")
        self.connections: list[ssl.SSLSocket] = []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(handler) -> None:  # noqa: N805 - ``self`` is who pretends
                super(Handler, handler).setup()
                self.connections.append(handler.connection)

            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                status, made = answer(f"{self.command} {self.path}", body, self.headers)
                self.send_response(status)
                if isinstance(made, bytes):
                    self.send_header("Content-Length", str(len(made)))
                    self.end_headers()
                    self.wfile.write(made)
                    return
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for piece in made:
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                self.wfile.write(b"0\r\n\r\n")

            do_POST = do_PUT = do_GET  # noqa: N815

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing."""

        class Server(ThreadingHTTPServer):
            def handle_error(self, request: Any, client_address: Any) -> None:
                """Members hang up when they like."""

        self.server = Server((host, int(port)), Handler, bind_and_activate=False)
        self.server.allow_reuse_address = True
        self.server.server_bind()
        self.server.server_activate()
        self.server.socket = context.wrap_socket(
            self.server.socket, server_side=True, do_handshake_on_connect=False
        )
        self.thread = threading.Thread(target=self.server.serve_forever, args=[0.05], daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        for connection in self.connections:
            with suppress(OSError):  # it has ended
                connection.shutdown(socket.SHUT_RDWR)
        self.thread.join()

    def __enter__(self) -> Pretender:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self.close()


def problem(status: int, reason: str) -> Made:
    """A refusal."""
    return status, json.dumps({"title": "refused", "status": status, "detail": reason}).encode()
