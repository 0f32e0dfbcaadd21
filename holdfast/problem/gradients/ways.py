"""Two ways to compute something for every row: all rows stacked in one call, or one row after the other.

Stacking is what makes a simulation fast, and most layers can be stacked. Some cannot, such as LSTM and GRU:
torch has no batched form of them. A model with such a layer goes the second way everywhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, hessian, vmap

RowFunction = Callable[..., Tensor]
"""(row [d], ...) -> a tensor; for derivatives, a number."""


class Way(Protocol):
    """How rows are computed, and how functions of one row are differentiated."""

    def each(self, function: RowFunction, *rows: Any, shared: tuple[Any, ...] = ()) -> Tensor:
        """``function`` of every row, then of what is ``shared``; rows: tensors [m, ...] or tuples of them."""

    def grad_and_value(self, function: RowFunction, row: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        """The gradient [d] of ``function`` at ``row``, and its value."""

    def hessian(self, function: RowFunction, row: Tensor, *rest: Any) -> Tensor:
        """The Hessian [d, d] of ``function`` at ``row``."""

    def hessian_product(self, function: RowFunction, row: Tensor, v: Tensor, *rest: Any) -> Tensor:
        """That Hessian times ``v`` [d], without forming it."""


class Stacked:
    """All rows in one call, by torch's function transforms."""

    def each(self, function: RowFunction, *rows: Any, shared: tuple[Any, ...] = ()) -> Tensor:
        places = (*(0 for _ in rows), *(None for _ in shared))
        result: Tensor = vmap(function, in_dims=places)(*rows, *shared)
        return result

    def grad_and_value(self, function: RowFunction, row: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        gradient, value = grad_and_value(function)(row, *rest)
        return gradient, value

    def hessian(self, function: RowFunction, row: Tensor, *rest: Any) -> Tensor:
        second: Tensor = hessian(function)(row, *rest)
        return second

    def hessian_product(self, function: RowFunction, row: Tensor, v: Tensor, *rest: Any) -> Tensor:
        def slope(at: Tensor) -> Tensor:
            along: Tensor = grad(function)(at, *rest) @ v
            return along

        product: Tensor = grad(slope)(row)
        return product


class OneByOne:
    """One row after the other, by plain automatic differentiation: works for every layer, on every device."""

    def each(self, function: RowFunction, *rows: Any, shared: tuple[Any, ...] = ()) -> Tensor:
        return torch.stack([function(*row, *shared) for row in zip(*map(unbound, rows), strict=True)])

    def grad_and_value(self, function: RowFunction, row: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            at = row.detach().requires_grad_()
            value = function(at, *rest)
            [gradient] = torch.autograd.grad(value, at, materialize_grads=True)
        return gradient, value.detach()

    def hessian(self, function: RowFunction, row: Tensor, *rest: Any) -> Tensor:
        with twice_differentiable():
            second: Tensor = torch.autograd.functional.hessian(  # type: ignore[no-untyped-call]
                lambda at: function(at, *rest), row.detach()
            )
        return second

    def hessian_product(self, function: RowFunction, row: Tensor, v: Tensor, *rest: Any) -> Tensor:
        with torch.enable_grad(), twice_differentiable():
            at = row.detach().requires_grad_()
            [gradient] = torch.autograd.grad(function(at, *rest), at, create_graph=True)
            [product] = torch.autograd.grad(gradient @ v, at)
        return product


def can_be_stacked(evaluation: Callable[[], Tensor], gradient: Callable[[], Tensor]) -> bool:
    """Whether stacked calls of a model, in evaluation and for its gradient, work."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that an operation is slow if it is stacked
            with torch.no_grad():
                evaluation()
            gradient()
    except RuntimeError:  # what torch's function transforms raise for what they cannot batch
        return False
    return True


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """Without the kernels for whole recurrent layers, which torch can differentiate only once."""
    libraries: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.mkldnn)
    before = [library.enabled for library in libraries]
    for library in libraries:
        library.enabled = False
    try:
        yield
    finally:
        for library, enabled in zip(libraries, before, strict=True):
            library.enabled = enabled


def unbound(rows: Any) -> Iterator[Any]:
    """The rows of a tensor [m, ...], or of a NamedTuple of them, one by one."""
    if isinstance(rows, Tensor):
        return iter(rows)
    return (type(rows)(*row) for row in zip(*rows, strict=True))
