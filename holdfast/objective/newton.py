"""Exact local solves for small models: Newton's method on every node at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from holdfast.errors import HoldfastError

MAX_STEPS = 100
MAX_DIMENSION = 4000


def newton_argmin(
    gradient: Callable[[Tensor], Tensor],
    hessian: Callable[[Tensor], Tensor],
    linear: Tensor,
    centre: Tensor,
    weight: float,
    start: Tensor,
) -> Tensor:
    """argmin_u f_i(u) + <linear, u> + (weight/2) ||u - centre||^2 for every row i; [m, d].

    One step is exact for quadratics. Stops when a step no longer changes the rows beyond rounding.
    """
    if start.shape[-1] > MAX_DIMENSION:
        raise HoldfastError(
            f"exact local solves need the Hessian, at most {MAX_DIMENSION} parameters, but the model has "
            f"{start.shape[-1]}; choose a solver by gradient steps"
        )
    identity = torch.eye(start.shape[-1], dtype=start.dtype, device=start.device)
    rounding = 64 * torch.finfo(start.dtype).eps
    u: Tensor = start
    for _ in range(MAX_STEPS):
        slope = gradient(u) + linear + weight * (u - centre)
        step = torch.linalg.solve(hessian(u) + weight * identity, slope)
        u = u - step
        if bool((step.norm(dim=-1) <= rounding * (1 + u.norm(dim=-1))).all()):
            return u
    raise HoldfastError(
        f"the exact local solver did not settle in {MAX_STEPS} Newton steps: the local problem is not convex "
        "enough; choose a larger proximal weight or a solver by gradient steps"
    )
