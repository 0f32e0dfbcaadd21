"""A member of a federation, written from docs/reference/wire.md alone: it imports nothing of holdfast.

It mixes what it sends with what it receives, half and half, and has no data: enough to show that the page
tells all that is needed to take part.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import struct
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import load_pem_private_key

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
        """Sends its final message, and receives the neighbour's."""
        self.publish(round, FAREWELL, b"")
        self.fetch(round, FAREWELL)

    def close(self) -> None:
        self.channel.close()
        self.server.stop(1.0).wait()


# --- through a relay -------------------------------------------------------------------------------------


def bound(*parts: bytes) -> bytes:
    return b"holdfast relay 1" + b"".join(struct.pack(">I", len(part)) + part for part in parts)


class SecondProcess:
    """A process of the member ``name`` behind a relay: its card, and what it seals and opens as asker."""

    def __init__(self, scope: str, name: str, key: bytes, certificate: bytes) -> None:
        self.scope, self.name, self.secret = scope, name, X25519PrivateKey.generate()
        public = base64.b64encode(self.secret.public_key().public_bytes_raw()).decode()
        issued = int(time.time())
        signed = bound(b"card", scope.encode(), name.encode(), public.encode(), str(issued).encode())
        signature = load_pem_private_key(key, None).sign(signed, ec.ECDSA(hashes.SHA256()))
        card = {"name": name, "key": public, "issued": issued, "certificate": certificate.decode()}
        self.card = text({**card, "signature": base64.b64encode(signature).decode()})

    def keys(self, card: bytes) -> tuple[bytes, bytes]:
        """For questions to, and answers from, the process with that card."""
        other = json.loads(card)
        secret = self.secret.exchange(X25519PublicKey.from_public_bytes(base64.b64decode(other["key"])))
        names = bound(self.scope.encode(), self.name.encode(), other["name"].encode())
        salt = hashlib.sha256(self.card).digest() + hashlib.sha256(card).digest()
        both = HKDF(hashes.SHA256(), 64, salt=salt, info=b"holdfast relay 1" + names).derive(secret)
        return both[:32], both[32:]

    def label(self, answerer: str, way: bytes, last: bool, question: bytes = b"") -> bytes:
        names = (self.scope.encode(), self.name.encode(), answerer.encode())
        return bound(*names, way, b"last" if last else b"more", question)

    def first_frame(self, answerer: str, card: bytes, kind: str, content: bytes) -> tuple[bytes, bytes]:
        """The parcel of call 1 with a whole question, and the question's digest."""
        head = text({"kind": kind, "said": {}})
        plain = struct.pack(">H", len(head)) + head + content
        label = self.label(answerer, b"question", True)
        sealed = ChaCha20Poly1305(self.keys(card)[0]).encrypt(struct.pack(">IQ", 1, 0), plain, label)
        parcel = struct.pack(">BIQH", 2, 1, 0, len(self.card)) + self.card + sealed
        return parcel, hashlib.sha256(plain).digest()

    def open_answer(self, answerer: str, card: bytes, parcel: bytes, question: bytes) -> tuple[int, bytes]:
        """The number of a frame, and what it says."""
        flags, call, frame, length = struct.unpack_from(">BIQH", parcel)
        label = self.label(answerer, b"answer", bool(flags & 2), question)
        nonce = struct.pack(">IQ", call, frame)
        return frame, ChaCha20Poly1305(self.keys(card)[1]).decrypt(nonce, parcel[15 + length :], label)
