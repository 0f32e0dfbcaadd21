"""A client's secrets for one round, and what follows from them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
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

# --- A client's secrets for one round, and what follows from them ---------------------------------------


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
        for key in (announced.masks, announced.seals):  # of small order, it would share the same with all
            exchanged(_ANY_KEY, key)
        return announced


class Secrets:
    """A client's secrets for the round that ``context`` names, derived from its ``root``.

    ``context`` is the same for all clients of a round. ``root`` must differ whenever the message does, and
    whenever a round is gone through again: two messages under the same masks would show their difference, and
    of a client that was there in one attempt and not in the other, both secrets would be revealed.
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
    """What X25519 gives the owners of two keys."""
    try:
        return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError:
        raise HoldfastError("a public key that X25519 does not accept") from None


def seal(key: bytes, text: bytes, context: bytes) -> bytes:
    """``text`` such that only who has ``key`` can read or change it. One text for a key."""
    return ChaCha20Poly1305(key).encrypt(_NONCE, text, context)


def unseal(key: bytes, sealed: bytes, context: bytes) -> bytes | None:
    """The text; None if it was not sealed with ``key``."""
    try:
        return ChaCha20Poly1305(key).decrypt(_NONCE, sealed, context)
    except InvalidTag:
        return None


def mask(seed: bytes, size: int) -> Tensor:
    """``size`` numbers, each of the 2^64 as likely as any other to who does not have ``seed``: int64."""
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


# --- shamir's shares of a secret: ``threshold`` of them give it back, fewer tell nothing about it -------


PRIME = 2**521 - 1  # a prime, so that every number but zero has an inverse
SECRET_BYTES, SHARE_BYTES = 32, 66


def split(secret: bytes, threshold: int, holders: int, randomness: bytes) -> list[bytes]:
    """The shares of holders 1, 2, ..., of a ``secret`` of 32 bytes.

    ``randomness``: 66 bytes for each of the ``threshold - 1`` coefficients; never used for anything else.
    """
    assert len(secret) == SECRET_BYTES
    assert 1 <= threshold <= holders
    assert len(randomness) == SHARE_BYTES * (threshold - 1)
    pieces = [randomness[i : i + SHARE_BYTES] for i in range(0, len(randomness), SHARE_BYTES)]
    # Nearly uniform: of 2^528 numbers, all but 128 fall evenly on the residues.
    coefficients = [int.from_bytes(secret), *(int.from_bytes(piece) % PRIME for piece in pieces)]
    return [_value(coefficients, x).to_bytes(SHARE_BYTES) for x in range(1, holders + 1)]


def join(shares: Mapping[int, bytes], threshold: int) -> bytes | None:
    """The secret of which holder ``x`` has ``shares[x]``; None if these are not shares of one of 32 bytes."""
    assert len(shares) >= threshold
    points = {x: int.from_bytes(share) for x, share in sorted(shares.items())[:threshold]}
    secret = 0
    for x, y in points.items():
        weight = 1
        for other in points:
            if other != x:  # Lagrange's polynomials at zero
                weight = weight * other * pow(other - x, -1, PRIME) % PRIME
        secret = (secret + y * weight) % PRIME
    return secret.to_bytes(SECRET_BYTES) if secret < 256**SECRET_BYTES else None


def _value(coefficients: list[int], x: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * x + coefficient) % PRIME
    return value


def check_threshold(threshold: int, clients: int) -> None:
    """More than half, or a server could make two groups and unmask both."""
    if not clients / 2 < threshold <= clients:
        raise HoldfastError(
            f"secure aggregation: threshold = {threshold} of {clients} clients; expected more than half"
        )


def default_threshold(clients: int) -> int:
    """Two thirds: up to a third may drop out, and nearly a third may conspire with the server."""
    return min(clients, 2 * clients // 3 + 1)


# --- numbers as whole numbers modulo 2^64, in which masks can be added and taken away without a trace ---


PRECISION = 32  # binary digits after the point


def encode(values: Tensor, clients: int, digits: int = PRECISION) -> Tensor:
    """``values`` [d] as int64, such that the sum over ``clients`` does not overflow.

    A number is off by at most 2^-(digits + 1), and so is the mean of all. Refuses what does not fit.
    """
    values, largest = values.double(), limit(clients, digits)  # float32 would round the limit up
    if not bool(torch.isfinite(values).all()) or bool((values.abs() > largest).any()):
        raise HoldfastError(
            f"secure aggregation of {clients} clients takes finite numbers up to {largest:.0f}; "
            f"the message has {float(values.abs().max()):.3g}: the run diverges, try a smaller lr"
        )
    return (values * 2.0**digits).round().to(torch.int64)


def decode(total: Tensor, digits: int = PRECISION) -> Tensor:
    """The sum that ``total`` int64 [d] stands for, in float64."""
    return total.double() / 2.0**digits


def limit(clients: int, digits: int = PRECISION) -> float:
    """The largest number that every client may send."""
    return float(2 ** (63 - digits) // clients - 1)
