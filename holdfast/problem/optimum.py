"""The reference optimum of a smooth convex objective: damped Newton, with conjugate gradients inside."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.files import read_tensors, write_tensors
from holdfast.core.world import ALONE, World
from holdfast.problem.problem import Problem

GRADIENT_NORM = 1e-10  # gradient norm that a reference optimum has to reach
NEWTON_STEPS = 100
PRODUCTS = 5000  # Hessian-vector products in a Newton step
SHORTEST_STEP = 1e-6


class Reference(NamedTuple):
    """The minimiser x* of f, in float64."""

    x: Tensor  # [d]
    value: float  # f(x*)
    grad_norm: float  # ||grad f(x*)||


def reference_optimum(problem: Problem, cache_dir: Path | None = None, world: World = ALONE) -> Reference:
    """The minimiser of a smooth convex objective, with a gradient norm below 1e-10; in float64.

    Found once: that of a model's objective is kept in ``cache_dir`` (by default the user's cache folder),
    under a hash of data, weights, model, loss and regulariser, and checked whenever it is read. Where other
    processes of ``world`` hold the other nodes, all look for it together, and nothing is kept.
    """
    exact = problem.in_float64
    _check_optimum_exists(exact)
    if exact.identity() is None:
        return _newton(exact, exact.x0, world)
    if world.size > 1:
        return _newton(exact, torch.zeros_like(exact.x0), world)
    path = (cache_dir or user_cache()) / "optima" / f"{fingerprint(exact)}.safetensors"
    cached = _read(path, exact)
    if cached is not None:
        return cached
    found = _newton(exact, torch.zeros_like(exact.x0), world)
    _write(path, found)
    return found


_REFERENCES: WeakKeyDictionary[Problem, Reference] = WeakKeyDictionary()
_GRADIENTS: WeakKeyDictionary[Problem, Tensor] = WeakKeyDictionary()


def known_optimum(problem: Problem, world: World = ALONE) -> Reference:
    """``reference_optimum``, remembered for as long as the objective lives."""
    if problem not in _REFERENCES:
        _REFERENCES[problem] = reference_optimum(problem, world=world)
    return _REFERENCES[problem]


def gradients_at_optimum(problem: Problem, world: World = ALONE) -> Tensor:
    """grad f_i(x*) of the nodes here, [m, d] float64, remembered likewise."""
    if problem not in _GRADIENTS:
        exact, x = problem.in_float64, known_optimum(problem, world).x
        rows = x.expand(len(exact.here), -1).contiguous()
        _GRADIENTS[problem] = exact.full_grads(rows, exact.here)
    return _GRADIENTS[problem]


def _check_optimum_exists(problem: Problem) -> None:
    obstacle = problem.convexity.obstacle
    if obstacle is None and not problem.smooth:
        obstacle = "the exact hinge has kinks (give the loss some smoothing)"
    if obstacle is None and problem.l1:
        obstacle = "l1 > 0 makes kinks"
    if obstacle is None and not problem.convexity.attained:
        # The infimum may lie at infinity, where gradients vanish just as well.
        obstacle = "without l2 there may be no optimum"
    if obstacle is not None:
        raise HoldfastError(f"the reference optimum needs a smooth convex objective: {obstacle}")


# --- damped Newton -----------------------------------------------------------------------------------------


def _newton(problem: Problem, start: Tensor, world: World) -> Reference:
    nodes = problem.here

    def product(x: Tensor, v: Tensor) -> Tensor:
        rows = (len(nodes), problem.dim)
        products = problem.hessian_products(x.expand(rows), v.expand(rows), nodes)
        return world.mean(products, problem.nodes)

    def value_and_grad(x: Tensor) -> tuple[Tensor, Tensor]:
        value, gradient = problem.global_value_and_grad(x)
        return world.sum(value), world.sum(gradient)

    x = start
    value, gradient = value_and_grad(x)
    for _ in range(NEWTON_STEPS):
        norm = float(gradient.norm())
        if norm < GRADIENT_NORM:
            return Reference(x, float(value), norm)
        # The closer to the optimum, the more exact the step: convergence is superlinear.
        direction = _conjugate_gradients(partial(product, x), -gradient, min(0.1, norm**0.5) * norm)
        step = 1.0
        value, gradient = value_and_grad(x + direction)
        while not float(gradient.norm()) <= (1 - 1e-4 * step) * norm:
            step /= 2
            if step < SHORTEST_STEP:
                raise HoldfastError(
                    f"no reference optimum was found: the norm of the gradient stays at {norm:.1e}, and "
                    f"should be below {GRADIENT_NORM:g}; scale the data, or add l2"
                )
            value, gradient = value_and_grad(x + step * direction)
        x = x + step * direction
    raise HoldfastError(
        f"no reference optimum was found in {NEWTON_STEPS} Newton steps: the norm of the gradient is "
        f"{float(gradient.norm()):.1e} and should be below {GRADIENT_NORM:g}"
    )


def _conjugate_gradients(product: Callable[[Tensor], Tensor], b: Tensor, tolerance: float) -> Tensor:
    """x with ||A x - b|| <= tolerance, or as near as it gets, for a positive definite A given by products."""
    x, residual, direction = torch.zeros_like(b), b, b
    square = residual @ residual
    for _ in range(PRODUCTS):
        image = product(direction)
        curvature = direction @ image
        if not curvature > 0:
            raise HoldfastError("the reference optimum needs a convex objective: a curvature is not positive")
        length = square / curvature
        x, residual = x + length * direction, residual - length * image
        previous, square = square, residual @ residual
        if square <= tolerance**2:
            break
        direction = residual + square / previous * direction
    return x


# --- the cache ---------------------------------------------------------------------------------------------


def user_cache() -> Path:
    """The folder for what can be computed again: $XDG_CACHE_HOME/holdfast, by default ~/.cache/holdfast."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "holdfast"


def fingerprint(problem: Problem) -> str:
    """A hash of all that the optimum depends on."""
    identity = problem.identity()
    assert identity is not None
    words, tensors = identity
    digest = hashlib.sha256(repr(words).encode())
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read(path: Path, problem: Problem) -> Reference | None:
    """The optimum in the cache, if it is one of this very objective."""
    if not path.exists():
        return None
    try:
        x = read_tensors(path)[0]["x"].to(problem.x0)
        value, gradient = problem.global_value_and_grad(x)
    except (HoldfastError, KeyError, RuntimeError):  # damaged, or not ours: it will be written again
        return None
    norm = float(gradient.norm())
    return Reference(x, float(value), norm) if norm < GRADIENT_NORM else None


def _write(path: Path, found: Reference) -> None:
    notes = {"value": found.value, "grad_norm": found.grad_norm}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(path, {"x": found.x.cpu()}, notes)
    except OSError as error:
        warnings.warn(f"the reference optimum is not kept: {path}: {error.strerror}", stacklevel=3)
