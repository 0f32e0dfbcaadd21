"""Exact local solves for small models: Newton's method on every node at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.contract.solver import SOLVERS, LocalProblem, Solver, require_smooth
from holdfast.core.errors import HoldfastError
from holdfast.core.validation import Count

MAX_DIMENSION = 4000


@SOLVERS.register("newton")
@dataclass(frozen=True)
class Newton(Solver):
    """Newton's method until rounding stops it, exact; for models of up to 4,000 parameters.

    The ideal that gradient methods are compared with: of its work only the gradients are counted, one per
    step, not the Hessians.
    """

    max_steps: Count = 100

    def solve(self, problem: LocalProblem, start: Tensor) -> Tensor:
        require_smooth("newton", problem)
        if start.shape[-1] > MAX_DIMENSION:
            raise HoldfastError(
                f"the solver 'newton' takes at most {MAX_DIMENSION} parameters, but the model has "
                f"{start.shape[-1]}; choose a solver by gradient steps"
            )
        rounding = 64 * torch.finfo(start.dtype).eps
        u: Tensor = start
        for _ in range(self.max_steps):
            try:
                step: Tensor = torch.linalg.solve(problem.hessian(u), problem.grad(u))
            except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
                raise HoldfastError(
                    "the solver 'newton' met a singular Hessian: the local problem is not strongly convex; "
                    "add l2, choose a larger proximal weight or a solver by gradient steps"
                ) from None
            u = u - step
            if bool((step.norm(dim=-1) <= rounding * (1 + u.norm(dim=-1))).all()):
                return u
        raise HoldfastError(
            f"the solver 'newton' did not settle in {self.max_steps} steps: the local problem is not convex "
            "enough; choose a larger proximal weight or a solver by gradient steps"
        )
