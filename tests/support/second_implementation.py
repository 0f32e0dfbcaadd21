"""A member of a federation, written from docs/reference/wire.md alone: it imports nothing of holdfast.

It mixes what it sends with what it receives, half and half, and has no data: enough to show that the page
tells all that is needed to take part.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import numpy as np

PIECE, ZEROS = 1 << 20, "0" * 64
FAREWELL: list[Any] = []


def text(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class SecondMember:
    """``name`` with a single neighbour, ``peer``; ``tls``: key, certificate and authority in PEM."""

    def __init__(
        self, name: str, port: int, peer: str, address: str, agreed: dict[str, Any], tls: list[bytes]
    ) -> None:
        key, certificate, authority = tls
        self.name, self.peer, self.agreed, self.round = name, peer, agreed, 0
        self.depends_on = {name: secrets.token_hex(8)}
        self.messages: dict[tuple[int, int], tuple[dict[str, Any], bytes]] = {}
        self.chains, self.passed = {"sent": ZEROS, "received": ZEROS}, []
        self.server = grpc.server(futures.ThreadPoolExecutor(4))
        handlers = {
            "Fetch": grpc.unary_stream_rpc_method_handler(self.serve),
            "Release": grpc.unary_unary_rpc_method_handler(lambda ask, context: self.answer()),
        }
        own = grpc.ssl_server_credentials([(key, certificate)], authority, require_client_auth=True)
        self.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("holdfast.Federation", handlers),)
        )
        self.server.add_secure_port(f"127.0.0.1:{port}", own)
        self.server.start()
        options = [("grpc.ssl_target_name_override", peer)]
        mine = grpc.ssl_channel_credentials(authority, key, certificate)
        self.channel = grpc.secure_channel(address, mine, options)

    # --- what others ask ---------------------------------------------------------------------------------

    def answer(self, **fields: Any) -> bytes:
        return text({"round": self.round, "passed": self.passed[-4:], **fields})

    def serve(self, question: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        if context.auth_context()["x509_subject_alternative_name"] != [self.peer.encode()]:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "not a neighbour")
        ask = json.loads(question)
        found = self.messages.get((ask["round"], ask["exchange"]))
        if found is None:
            yield self.answer()  # not yet
            return
        header, content = found
        offset = ask["offset"] if ask["content"] == header["content"] else 0
        yield self.answer(header=header, offset=offset)
        for first in range(offset, len(content), PIECE):
            yield content[first : first + PIECE]

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

    def ask(self, round: int, offset: int = 0, content: str = ZEROS, **changes: Any) -> Any:
        ask = {**self.agreed, "round": round, "exchange": 0, "depends_on": self.depends_on}
        ask |= {"passed": self.passed[-4:], "offset": offset, "content": content, **changes}
        return self.channel.unary_stream("/holdfast.Federation/Fetch")(text(ask), timeout=60)

    def fetch(self, round: int, tensors: list[Any], break_off: bool = False) -> bytes:
        """The peer's message, checked; ``break_off``: in two calls, the first of which is cut short."""
        content, expected = b"", ZEROS
        while True:
            call = self.ask(round, len(content), expected)
            answer = json.loads(next(call))
            header = answer.get("header")
            if header is None:
                continue
            assert answer["offset"] == len(content)
            for piece in call:
                content += piece
                if break_off:
                    break
            if break_off:
                call.cancel()
                break_off, expected = False, header["content"]
                continue
            break
        who = {"federation": self.agreed["federation"], "sender": self.peer, "round": round, "exchange": 0}
        assert {key: header[key] for key in who} == who
        assert header["tensors"] == tensors
        assert header["content"] == digest(content)
        assert header["checksum"] == digest(text(header | {"checksum": ZEROS}))
        self.compare(answer["passed"])
        self.depends_on |= header["depends_on"]
        return content

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
        """Says farewell, and hears the neighbour's."""
        self.publish(round, FAREWELL, b"")
        self.fetch(round, FAREWELL)

    def close(self) -> None:
        self.channel.close()
        self.server.stop(1.0).wait()
