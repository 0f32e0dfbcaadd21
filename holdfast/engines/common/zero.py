"""The objective that is zero, to find out what a method sends and keeps without computing anything."""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.core.randomness import Word
from holdfast.problem.problem import ExactProblem


class ZeroProblem(ExactProblem):
    """f_i = 0."""

    def __init__(self, nodes: int, dim: int = 1) -> None:
        self.nodes, self.dim = nodes, dim
        self.x0 = torch.zeros(dim, dtype=torch.float64)  # any local solver's tolerance is within reach

    def full_grads(self, x: Tensor, nodes: Tensor, round: Word = 0, step: Word = 0) -> Tensor:
        return torch.zeros_like(x)

    def samples(self, nodes: Tensor) -> int:
        return 0  # so that ``Work.sample_gradients`` counts minibatches

    def values(self, x: Tensor, nodes: Tensor) -> Tensor:
        return x.new_zeros(len(nodes))

    def hessians(self, x: Tensor, nodes: Tensor) -> Tensor:
        # Invertible, also where no quadratic is added.
        return torch.eye(self.dim, dtype=x.dtype).expand(len(nodes), -1, -1)

    def hessian_products(self, x: Tensor, v: Tensor, nodes: Tensor) -> Tensor:
        return v

    def global_value_and_grad(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.new_zeros(()), torch.zeros_like(x)

    def global_value(self, x: Tensor) -> Tensor:
        return x.new_zeros(())
