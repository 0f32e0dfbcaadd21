"""A client's secrets for one round, and what follows from them."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from torch import Tensor

from holdfast.core.errors import HoldfastError

KEY_BYTES = 32
_NONCE = bytes(12)  # every key seals one text only
_ANY_KEY = bytes([1] * KEY_BYTES)  # a private one, to try public ones with


class Announcement(NamedTuple):
    """What a client publishes for a round."""

    masks: bytes  # the X25519 key from which pairs have their masks
    seals: bytes  # the X25519 key for which shares are sealed
    own: bytes  # the digest of the own mask's seed, so that a wrong share shows

    def pack(self) -> bytes:
        return b"".join(self)

    @classmethod
    def unpack(cls, packed: bytes) -> Announcement:
        if len(packed) != 3 * KEY_BYTES:
            raise HoldfastError(f"an announcement of {len(packed)} bytes; expected {3 * KEY_BYTES}")
        announced = cls(*(packed[i : i + KEY_BYTES] for i in range(0, len(packed), KEY_BYTES)))
        for key in (announced.masks, announced.seals):  # a key of small order would share one secret with all
            exchanged(_ANY_KEY, key)
        return announced


class Secrets:
    """A client's secrets for the round that ``context`` names, derived from its ``root``.

    ``context`` is the same for all clients of a round. ``root`` must differ whenever the message does, and
    whenever a round is repeated: two messages under the same masks would show their difference, and of a
    client that was there in one attempt and not in the other, both secrets would be revealed.
    """

    def __init__(self, root: bytes, context: bytes) -> None:
        assert len(root) == KEY_BYTES
        self.context = context
        self._root = root
        self.masks, self.seals, self.own = (self._derive(use) for use in (b"masks", b"seals", b"own mask"))

    def announcement(self) -> Announcement:
        return Announcement(public(self.masks), public(self.seals), commitment(self.own, self.context))

    def randomness(self, size: int, roster: bytes) -> bytes:
        """For the shares among the clients of ``roster``; the same in every call."""
        return keystream(self._derive(b"shares\0" + roster), size)

    def _derive(self, use: bytes) -> bytes:
        return derived(self._root, self.context, use)


def public(private: bytes) -> bytes:
    """The public half of an X25519 key."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def commitment(seed: bytes, context: bytes) -> bytes:
    """A digest of ``seed``, from which it cannot be found."""
    return hashlib.sha256(b"own mask\0" + seed + context).digest()


def agreed(private: bytes, other: bytes, context: bytes, use: bytes) -> bytes:
    """The key that the owners of two X25519 keys share for one ``use``."""
    first, second = sorted((public(private), other))
    return derived(exchanged(private, other), context, use + first + second)


def exchanged(private: bytes, other: bytes) -> bytes:
    """The secret that the owners of two X25519 keys share."""
    try:
        return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError:
        raise HoldfastError("a public key that X25519 does not accept") from None


def seal(key: bytes, text: bytes, context: bytes) -> bytes:
    """``text`` such that only an owner of ``key`` can read or change it. A key seals one text."""
    return ChaCha20Poly1305(key).encrypt(_NONCE, text, context)


def unseal(key: bytes, sealed: bytes, context: bytes) -> bytes | None:
    """The text; None if it was not sealed with ``key``."""
    try:
        return ChaCha20Poly1305(key).decrypt(_NONCE, sealed, context)
    except InvalidTag:
        return None


def mask(seed: bytes, size: int) -> Tensor:
    """``size`` numbers, int64, each of the 2^64 equally likely to anyone without ``seed``."""
    numbers = np.frombuffer(bytearray(keystream(seed, 8 * size)), dtype="<i8")
    return torch.from_numpy(numbers)


def keystream(seed: bytes, size: int) -> bytes:
    """``size`` bytes of ChaCha20. A seed is used for one stream."""
    return Cipher(algorithms.ChaCha20(seed, bytes(16)), mode=None).encryptor().update(bytes(size))


def derived(secret: bytes, context: bytes, use: bytes) -> bytes:
    """A key for one ``use``, from which ``secret`` cannot be found."""
    info = b"holdfast secure aggregation 2\0" + use + b"\0" + context
    return HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=info).derive(secret)


def digest_of(*parts: bytes) -> bytes:
    """A digest of ``parts``, each with its length, so that no other parts have the same."""
    return hashlib.sha256(b"".join(len(part).to_bytes(8) + part for part in parts)).digest()
