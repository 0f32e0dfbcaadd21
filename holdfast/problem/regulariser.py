"""What is added to every node's loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Regulariser:
    """(l2/2) ||x||^2 + l1 ||x||_1 + nonconvex * sum_l x_l^2 / (1 + x_l^2), the last as in FedPD's paper."""

    l2: float = 0.0
    nonconvex: float = 0.0
    l1: float = 0.0

    def value(self, x: Tensor) -> Tensor:
        total = x.new_zeros(x.shape[:-1])
        if self.l2:
            total = total + self.l2 / 2 * x.square().sum(-1)
        if self.nonconvex:
            square = x * x
            total = total + self.nonconvex * (square / (1 + square)).sum(-1)
        if self.l1:
            total = total + self.l1 * x.abs().sum(-1)
        return total

    def add_grad(self, gradient: Tensor, x: Tensor) -> Tensor:
        """``gradient`` plus the regulariser's own at ``x``."""
        if self.l2:
            gradient = torch.add(gradient, x, alpha=self.l2)
        if self.nonconvex:
            gradient = gradient + 2 * self.nonconvex * x / (1 + x * x) ** 2
        if self.l1:
            gradient = torch.add(gradient, x.sign(), alpha=self.l1)
        return gradient

    def curvature(self, x: Tensor) -> Tensor:
        """The diagonal of the regulariser's Hessian at ``x``."""
        return self.l2 + 2 * self.nonconvex * (1 - 3 * x * x) / (1 + x * x) ** 3
