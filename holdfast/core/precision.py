"""In which precision training steps are computed; models and everything exchanged keep their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

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


def full_product(a: Tensor, b: Tensor) -> Tensor:
    """``a`` [n, k] @ ``b`` [k, m] in the precision of their type, whatever training steps are computed in."""
    product: Tensor = _full_product(a, b)
    return product


# An operation of its own: a compiled graph would not know that the switch was another one here.
@torch.library.custom_op("holdfast::full_product", mutates_args=())
def _full_product(a: Tensor, b: Tensor) -> Tensor:
    with unrounded():
        return a @ b


@_full_product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


@_full_product.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *factors: Tensor) -> tuple[Tensor, int]:
    stacked = [
        part.unsqueeze(0) if place is None else part.movedim(place, 0)
        for part, place in zip(factors, in_dims, strict=True)
    ]
    return _full_product(*stacked), 0
