"""In which precision training steps are computed; models and everything exchanged keep their own."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Precision = Literal["tf32", "float32", "bfloat16"]


def compute_in(precision: Precision) -> torch.dtype | None:
    """Sets up matrix products on a GPU, and gives the type of training steps (None: that of the model).

    "tf32" rounds the factors of float32 products to ten bits, which is several times faster; "float32" does
    not. A CPU computes float32 products as they are. "bfloat16" computes all of a step in it.
    """
    torch.set_float32_matmul_precision("highest" if precision == "float32" else "high")
    torch.backends.cudnn.allow_tf32 = precision != "float32"
    return torch.bfloat16 if precision == "bfloat16" else None


def exact_product(matrix: Tensor, rows: Tensor) -> Tensor:
    """``matrix`` @ ``rows`` without TF32: rows of W that do not sum to one shrink the models."""
    rounded = matrix.is_cuda and matrix.layout == torch.strided
    return _exact_product(matrix, rows) if rounded else matrix @ rows


# An operation of its own, as a compiler would not see that the setting is another one here.
@torch.library.custom_op("holdfast::exact_product", mutates_args=())
def _exact_product(matrix: Tensor, rows: Tensor) -> Tensor:
    usual = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        return matrix @ rows
    finally:
        torch.set_float32_matmul_precision(usual)


@_exact_product.register_fake
def _(matrix: Tensor, rows: Tensor) -> Tensor:
    return rows.new_empty(matrix.shape[0], rows.shape[1])
