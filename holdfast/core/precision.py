"""In which precision training steps are computed; models and everything exchanged keep their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

Precision = Literal["tf32", "float32", "bfloat16"]


def compute_in(precision: Precision) -> torch.dtype | None:
    """Sets up products and convolutions on a GPU, and gives the type of training steps (None: the model's).

    These are switches of torch for the whole process; see ``switches_restored``.

    "tf32" rounds the factors of float32 products to ten bits, which is several times faster; "float32" does
    not. A CPU computes float32 products as they are. "bfloat16" computes all of a step in it.
    """
    torch.set_float32_matmul_precision("highest" if precision == "float32" else "high")
    torch.backends.cudnn.allow_tf32 = precision != "float32"
    # The fastest convolution of those cuDNN has, found by trying.
    torch.backends.cudnn.benchmark = True
    return torch.bfloat16 if precision == "bfloat16" else None


# By how much, at most, a product exceeds that of its factors as they were: both are rounded, perhaps upwards,
# to 10 bits behind the first (TF32) or to 7 (bfloat16).
_EXCESS = {"highest": 0.0, "high": 2.0**-9, "medium": 2.0**-6}


def excess(like: Tensor) -> float:
    """By how much factors ``like`` that have to be reduced, lest rounding them make a product too large.

    Errors of their number type come on top.
    """
    rounded = like.is_cuda and like.dtype == torch.float32
    return _EXCESS[torch.get_float32_matmul_precision()] if rounded else 0.0


@contextmanager
def switches_restored() -> Iterator[None]:
    """Puts torch's switches for the whole process, which ``compute_in`` sets, back to what they were."""
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    benchmark = torch.backends.cudnn.benchmark
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions
        torch.backends.cudnn.benchmark = benchmark


@contextmanager
def unrounded() -> Iterator[None]:
    """Products on a GPU in full, whatever training steps are computed in."""
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


@contextmanager
def untried() -> Iterator[None]:
    """Convolutions by the kernels that cuDNN guesses to be the fastest.

    Trying them takes up to a second for every new shape, which calls that are made once do not earn back.
    """
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
