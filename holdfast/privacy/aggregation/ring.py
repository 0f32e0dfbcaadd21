"""Numbers as whole numbers modulo 2^64, in which masks can be added and taken away without a trace."""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError

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
