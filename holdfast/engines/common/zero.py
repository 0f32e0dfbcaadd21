"""The objective that is zero, to find out what a method sends and keeps without computing anything."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class ZeroObjective:
    """f_i = 0."""

    l1 = 0.0
    smooth = True

    def __init__(self, nodes: int, dim: int = 1) -> None:
        self.nodes, self.dim = nodes, dim
        self.x0 = torch.zeros(dim, dtype=torch.float64)  # any local solver's tolerance is within reach

    def minibatch_grads(self, points: Sequence[Tensor], nodes: Tensor, round: int, step: int) -> list[Tensor]:
        return [torch.zeros_like(x) for x in points]

    def full_grads(self, x: Tensor, nodes: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def values(self, x: Tensor, nodes: Tensor) -> Tensor:
        return x.new_zeros(len(nodes))

    def hessians(self, x: Tensor, nodes: Tensor) -> Tensor:
        # Invertible, also where no quadratic is added.
        return torch.eye(self.dim, dtype=x.dtype).expand(len(nodes), -1, -1)

    def hessian_products(self, x: Tensor, v: Tensor, nodes: Tensor) -> Tensor:
        return v

    def samples_per_minibatch(self, nodes: Tensor) -> int:
        return 0

    def samples(self, nodes: Tensor) -> int:
        return 0

    def global_value_and_grad(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.new_zeros(()), torch.zeros_like(x)

    def global_value(self, x: Tensor) -> Tensor:
        return x.new_zeros(())
