"""What two members say through a relay, sealed from end to end.

Every process draws an X25519 key when it starts and never writes it down. Its *card* is the public key,
signed with the key of the member's certificate. Two cards give two keys, one for questions and one for
answers, by HKDF over both cards. Each frame is sealed with ChaCha20-Poly1305. Its nonce is the number of the
call and of the frame; bound to it are the federation, sender, receiver and direction, and to an answer also
the question that it answers, with its kind, round and exchange. So a frame that is repeated, reordered, sent
back, or taken from another call, pair, direction or federation does not open.

Forward secrecy: who records the relay's traffic and later gets a member's key cannot open it, since X25519
keys are gone with their processes. Who reads the memory of a process can open what that process exchanged.
"""

from __future__ import annotations

import base64
import hashlib
import struct
import time
from dataclasses import dataclass
from typing import Annotated

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from pydantic import BaseModel, ConfigDict, Field

from holdfast.core.errors import HoldfastError
from holdfast_deploy.storage.messages import parse
from holdfast_deploy.wire.credentials import Credentials
from holdfast_deploy.wire.signatures import check_signature, signature_of

PURPOSE = b"holdfast relay 1"
LIFETIME = 24 * 3600.0  # seconds that a card is accepted for
SKEW = 3600.0  # clocks may differ
QUESTION, ANSWER = b"question", b"answer"

_NONCE = struct.Struct(">IQ")  # call, frame

Base64 = Annotated[str, Field(max_length=4096, pattern="^[A-Za-z0-9+/=]*$")]


class SealError(HoldfastError):
    """A card or a frame is not what its sender made."""


class Card(BaseModel):
    """Who answers or asks through the relay, and with which key."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: str = Field(max_length=64)
    key: Base64  # X25519, 32 bytes
    issued: Annotated[int, Field(ge=0, lt=2**40)]  # seconds since 1970
    certificate: str = Field(max_length=8192)  # PEM
    signature: Base64  # ECDSA with SHA-256 by the certificate's key

    @property
    def instance(self) -> str:
        """Names the process, to the relay and in nonces' keys."""
        return hashlib.sha256(base64.b64decode(self.key)).hexdigest()[:32]

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(self.model_dump_json().encode()).digest()

    def signed(self, federation: str) -> bytes:
        """What the signature is of."""
        return _bound(
            b"card", federation.encode(), self.name.encode(), self.key.encode(), str(self.issued).encode()
        )


@dataclass(frozen=True)
class Identity:
    """A process's own key and card."""

    federation: str
    key: X25519PrivateKey
    card: Card
    credentials: Credentials

    def session(self, peer: Card, *, asks: bool) -> Session:
        """The keys for what this process asks ``peer``, or is asked by it; its card has been checked."""
        asker, answerer = (self.card, peer) if asks else (peer, self.card)
        try:
            secret = self.key.exchange(X25519PublicKey.from_public_bytes(base64.b64decode(peer.key)))
        except ValueError:  # a key such as zeros, with which everybody has the same secret
            raise SealError(f"card: the key of {peer.name} is none") from None
        info = _bound(self.federation.encode(), asker.name.encode(), answerer.name.encode())
        keys = HKDF(hashes.SHA256(), 64, salt=asker.digest + answerer.digest, info=PURPOSE + info).derive(
            secret
        )
        return Session(self.federation, asker.name, answerer.name, keys[:32], keys[32:])

    def check(self, text: bytes, name: str) -> Card:
        """The card in ``text``, if it is one of the member ``name`` of this federation."""
        card: Card = parse(Card, text)
        if card.name != name:
            raise SealError(f"card: expected {name}'s, got {card.name!r}'s")
        now = time.time()
        if not now - LIFETIME - SKEW <= card.issued <= now + SKEW:
            raise SealError(f"card: {name}'s is too old, or clocks differ by more than an hour")
        try:
            certificate, signature = card.certificate.encode(), base64.b64decode(card.signature)
            check_signature(self.credentials, name, certificate, signature, card.signed(self.federation))
            X25519PublicKey.from_public_bytes(base64.b64decode(card.key))
        except ValueError as error:
            raise SealError(f"card: {error}") from None
        return card


def new_identity(federation: str, name: str, credentials: Credentials) -> Identity:
    """A fresh key for this process, and its card."""
    key = X25519PrivateKey.generate()
    public = base64.b64encode(key.public_key().public_bytes_raw()).decode()
    open_card = Card(
        name=name,
        key=public,
        issued=int(time.time()),
        certificate=credentials.certificate.decode(),
        signature="",
    )
    signature = signature_of(credentials, open_card.signed(federation))
    card = open_card.model_copy(update={"signature": base64.b64encode(signature).decode()})
    return Identity(federation, key, card, credentials)


@dataclass(frozen=True)
class Session:
    """What one process asks another, and is answered."""

    federation: str
    asker: str
    answerer: str
    question_key: bytes
    answer_key: bytes

    def seal_question(self, call: int, frame: int, last: bool, text: bytes) -> bytes:
        return self._seal(self.question_key, call, frame, text, self._label(QUESTION, last, b""))

    def open_question(self, call: int, frame: int, last: bool, sealed: bytes) -> bytes:
        return self._open(self.question_key, call, frame, sealed, self._label(QUESTION, last, b""))

    def seal_answer(self, call: int, frame: int, last: bool, text: bytes, question: bytes) -> bytes:
        """``question``: the digest of the question's first frame, which says what is asked."""
        return self._seal(self.answer_key, call, frame, text, self._label(ANSWER, last, question))

    def open_answer(self, call: int, frame: int, last: bool, sealed: bytes, question: bytes) -> bytes:
        return self._open(self.answer_key, call, frame, sealed, self._label(ANSWER, last, question))

    def _label(self, way: bytes, last: bool, question: bytes) -> bytes:
        names = (self.federation.encode(), self.asker.encode(), self.answerer.encode())
        return _bound(*names, way, b"last" if last else b"more", question)

    @staticmethod
    def _seal(key: bytes, call: int, frame: int, text: bytes, label: bytes) -> bytes:
        return ChaCha20Poly1305(key).encrypt(_NONCE.pack(call, frame), text, label)

    @staticmethod
    def _open(key: bytes, call: int, frame: int, sealed: bytes, label: bytes) -> bytes:
        try:
            return ChaCha20Poly1305(key).decrypt(_NONCE.pack(call, frame), sealed, label)
        except InvalidTag:
            raise SealError("a sealed frame was changed, or is not for this place") from None


def _bound(*parts: bytes) -> bytes:
    """``parts`` end to end, each after its length, so that no two lists give the same bytes."""
    return PURPOSE + b"".join(struct.pack(">I", len(part)) + part for part in parts)
