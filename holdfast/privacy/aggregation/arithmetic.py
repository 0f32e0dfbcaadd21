"""The arithmetic of secure aggregation: messages modulo 2^64, and shares of secrets modulo a prime."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError

# --- messages as whole numbers modulo 2^64, in which masks can be added and taken away without a trace ---


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


# --- Shamir's shares of a secret: ``threshold`` of them give it back, fewer tell nothing about it --------


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
