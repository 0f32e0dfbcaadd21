"""A member of a federation, written from docs/reference/wire.md alone: it imports nothing of holdfast.

It mixes what it sends with what it receives, half and half, and has no data: enough to show that the page
tells all that is needed to take part. Python's standard library suffices, apart from numpy for the mixing.
"""

from __future__ import annotations

import hashlib
import io
import json
import secrets
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

ZEROS = "0" * 64
FINAL: list[Any] = []  # the tensors of a final message


def text(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def tls(server: bool, certs: Path, name: str) -> ssl.SSLContext:
    """TLS 1.3, mutual."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version, context.verify_mode = ssl.TLSVersion.TLSv1_3, ssl.CERT_REQUIRED
    context.load_verify_locations(certs / "ca.crt")
    context.load_cert_chain(certs / f"{name}.crt", certs / f"{name}.key")
    return context


class Refused(Exception):  # noqa: N818 - an answer
    """A status that is no success, and the reason."""

    def __init__(self, answer: HTTPResponse) -> None:
        problem = json.loads(answer.read())
        super().__init__(problem["detail"])
        self.status = answer.status
        assert problem["status"] == self.status


class SecondMember:
    """``name`` with a single neighbour, ``peer``, which it reaches by ``dial``."""

    def __init__(
        self, name: str, peer: str, agreed: dict[str, Any], dial: Callable[[str], HTTPConnection]
    ) -> None:
        self.name, self.peer, self.agreed, self.round = name, peer, agreed, 0
        self.depends_on = {name: secrets.token_hex(8)}
        self.messages: dict[tuple[int, int], tuple[dict[str, Any], bytes]] = {}
        self.chains, self.passed = {"sent": ZEROS, "received": ZEROS}, list[dict[str, Any]]()
        self.connection = dial(peer)

    # --- what others ask ---------------------------------------------------------------------------------

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """One request of the peer."""
        names = [value for kind, value in handler.connection.getpeercert()["subjectAltName"] if kind == "DNS"]
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        _, version, *path = handler.path.split("/")
        if names != [self.peer]:
            self.reply(handler, 403, text({"title": "", "status": 403, "detail": "not a neighbour"}))
        elif version != "v2":
            self.reply(handler, 404, text({"title": "", "status": 404, "detail": "no such question"}))
        elif path[0] == "messages":
            header, content = self.messages[int(path[1]), int(path[2])]
            assert handler.headers["If-Match"] == f'"{header["content"]}"'
            first = int(handler.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-"))
            ranged = {"Content-Range": f"bytes {first}-{len(content) - 1}/{len(content)}"} if first else {}
            self.reply(handler, 206 if first else 200, content[first:], **ranged)
        elif path[0] == "sync":
            ask = json.loads(body)
            header, _ = self.messages.get((ask["round"], ask["exchange"]), (None, b""))
            self.reply(handler, 200, self.says(header=header))  # null: not yet
        else:
            self.reply(handler, 200, self.says())

    def says(self, **fields: Any) -> bytes:
        return text({"round": self.round, "passed": self.passed[-4:], **fields})

    def reply(self, handler: BaseHTTPRequestHandler, status: int, body: bytes, **headers: str) -> None:
        handler.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            handler.send_header(key, value)
        handler.end_headers()
        handler.wfile.write(body)

    # --- what it sends and asks --------------------------------------------------------------------------

    def publish(self, round: int, tensors: list[Any], content: bytes) -> None:
        header = {
            "federation": self.agreed["federation"],
            "sender": self.name,
            "round": round,
            "exchange": 0,
            "tensors": tensors,
            "depends_on": dict(self.depends_on),
            "notes": {},
            "content": digest(content),
            "checksum": ZEROS,
        }
        header["checksum"] = digest(text(header))
        self.round, self.messages[round, 0] = round, (header, content)

    def request(self, method: str, path: str, body: bytes = b"", **headers: str) -> HTTPResponse:
        self.connection.request(method, f"/v2/{path}", body, headers)
        answer = self.connection.getresponse()
        if answer.status not in (200, 206):
            raise Refused(answer)
        return answer

    def ask(self, round: int, **changes: Any) -> Any:
        ask = {**self.agreed, "round": round, "exchange": 0, "depends_on": self.depends_on}
        ask |= {"passed": self.passed[-4:], **changes}
        return json.loads(self.request("POST", "sync", text(ask)).read())

    def fetch(self, round: int, tensors: list[Any], break_off: bool = False) -> bytes:
        """The peer's message, checked; ``break_off``: over two connections, the first of which is cut."""
        answer = self.ask(round)
        while answer.get("header") is None:
            answer = self.ask(round)
        header, content = answer["header"], b""
        if break_off:
            content = self.get(header, 0).read(1_000_001)
            self.connection.close()
        content += self.get(header, len(content)).read()
        who = {"federation": self.agreed["federation"], "sender": self.peer, "round": round, "exchange": 0}
        assert {key: header[key] for key in who} == who
        assert header["tensors"] == tensors
        assert header["content"] == digest(content)
        assert header["checksum"] == digest(text(header | {"checksum": ZEROS}))
        self.compare(answer["passed"])
        self.depends_on |= header["depends_on"]
        return content

    def get(self, header: dict[str, Any], first: int) -> HTTPResponse:
        headers = {"If-Match": f'"{header["content"]}"'} | ({"Range": f"bytes={first}-"} if first else {})
        answer = self.request("GET", f"messages/{header['round']}/{header['exchange']}", **headers)
        assert answer.status == (206 if first else 200)
        assert answer.headers["ETag"] == f'"{header["content"]}"'
        return answer

    def compare(self, theirs: list[dict[str, Any]]) -> None:
        ours = {passed["round"]: passed for passed in self.passed}
        for passed in theirs:
            if passed["round"] in ours:
                own = ours[passed["round"]]
                assert (own["sent"], own["received"]) == (passed["received"], passed["sent"])

    def exchange(self, round: int, x: np.ndarray, break_off: bool = False) -> np.ndarray:
        """Sends ``x`` [1, d] to the neighbour; what it sent."""
        tensors = [{"name": "value", "shape": list(x.shape), "dtype": "float32"}]
        self.publish(round, tensors, x.astype("<f4").tobytes())
        received = self.fetch(round, tensors, break_off)
        for way, content in (("sent", self.messages[round, 0][1]), ("received", received)):
            self.chains[way] = digest((self.chains[way] + digest(content)).encode())
        self.passed.append({"round": round, **self.chains})
        return np.frombuffer(received, "<f4").reshape(x.shape)

    def part(self, round: int) -> None:
        """Says that it has finished, and hears that the neighbour has."""
        self.publish(round, FINAL, b"")
        self.fetch(round, FINAL)


# --- at an address -----------------------------------------------------------------------------------------


class Direct(HTTPConnection):
    """To ``peer`` at host:port."""

    def __init__(self, address: str, context: ssl.SSLContext, peer: str) -> None:
        host, _, port = address.rpartition(":")
        super().__init__(host, int(port), timeout=60)
        self.tls, self.peer = context, peer

    def connect(self) -> None:
        super().connect()
        self.sock = self.tls.wrap_socket(self.sock, server_hostname=self.peer)


def handler_of(member: SecondMember) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            member.answer(self)

        do_POST = do_GET  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    return Handler


def serve(member: SecondMember, port: int, context: ssl.SSLContext) -> ThreadingHTTPServer:
    """Answers on a port."""
    server = ThreadingHTTPServer(("127.0.0.1", port), handler_of(member))
    server.handle_error = lambda *_: None  # type: ignore[method-assign] # the peer has hung up
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=server.serve_forever, args=[0.05], daemon=True).start()
    return server


# --- through a relay ---------------------------------------------------------------------------------------


class Relay:
    """Where it is, and what TLS needs, with it and inside."""

    def __init__(self, address: str, relay: str, certs: Path, name: str) -> None:
        self.address, self.relay, self.certs, self.name = address, relay, certs, name

    def say(self, line: str) -> ssl.SSLSocket:
        """A connection that begins with ``line``."""
        host, _, port = self.address.rpartition(":")
        plain = socket.create_connection((host, int(port)), 60)
        outer = tls(False, self.certs, self.name).wrap_socket(plain, server_hostname=self.relay)
        outer.sendall(f"{line}\n".encode())
        return outer

    def call(self, peer: str) -> Inside:
        outer = self.say(f"CALL {peer}")
        assert read_line(outer) == "OK"
        return Inside(outer, tls(False, self.certs, self.name), peer)

    def listen(self, member: SecondMember) -> ssl.SSLSocket:
        """Answers what comes through the relay, until the connection is closed."""
        listening, handler = self.say("LISTEN"), handler_of(member)

        def accept(token: str) -> None:
            with suppress(OSError, EOFError):
                inside = Inside(self.say(f"ACCEPT {token}"), tls(True, self.certs, self.name), None)
                handler(inside, ("relay", 0), None)  # type: ignore[arg-type]

        def listen() -> None:
            with suppress(OSError, EOFError):
                while True:
                    if token := read_line(listening):
                        threading.Thread(target=accept, args=[token], daemon=True).start()

        threading.Thread(target=listen, daemon=True).start()
        return listening


class Relayed(HTTPConnection):
    """To ``peer`` through a relay."""

    def __init__(self, relay: Relay, peer: str) -> None:
        super().__init__("relay", timeout=60)
        self.relay, self.peer = relay, peer

    def connect(self) -> None:
        self.sock = self.relay.call(self.peer)  # type: ignore[assignment]


def read_line(connection: ssl.SSLSocket) -> str:
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := connection.recv(1)):
            raise EOFError
        line += byte
    return line.decode().strip()


class Reading(io.RawIOBase):
    """What comes in; to close it does not end the connection."""

    def __init__(self, read_into: Callable[[Any], int]) -> None:
        self.readinto = read_into  # type: ignore[method-assign]

    def readable(self) -> bool:
        return True


class Inside:
    """TLS inside another connection, as much like a socket as http.client and http.server need it."""

    def __init__(self, outer: ssl.SSLSocket, context: ssl.SSLContext, peer: str | None) -> None:
        self.outer, self.coming, self.going = outer, ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.coming, self.going, server_side=peer is None, server_hostname=peer)
        self.getpeercert = self.tls.getpeercert
        self._do(self.tls.do_handshake)

    def _do(self, action: Callable[..., Any], *given: Any) -> Any:
        while True:
            try:
                done = action(*given)
            except ssl.SSLWantReadError:
                self._flush()
                content = self.outer.recv(1 << 16)
                self.coming.write(content) if content else self.coming.write_eof()
            else:
                self._flush()
                return done

    def _flush(self) -> None:
        if self.going.pending:
            self.outer.sendall(self.going.read())

    def sendall(self, content: Any) -> None:
        view = memoryview(content)
        while view:
            view = view[self._do(self.tls.write, view) :]

    def read_into(self, buffer: Any) -> int:
        try:
            count: int = self._do(self.tls.read, len(buffer), buffer)
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return 0
        return count

    def makefile(self, *_: Any, **__: Any) -> io.BufferedReader:
        return io.BufferedReader(Reading(self.read_into))

    def close(self) -> None:
        self.outer.close()
