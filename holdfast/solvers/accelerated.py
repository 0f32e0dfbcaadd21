"""What AOGM and FISTA share: a gradient step from an extrapolated point, with momentum that may restart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.contract.solver import LocalProblem
from holdfast.core.validation import Positive
from holdfast.solvers.iterative import IterativeSolver
from holdfast.solvers.stopping import StoppingRule


class Moving(NamedTuple):
    answer: Tensor  # y: the end of the last step
    energy: Tensor  # [m, 1]: there
    x: Tensor  # extrapolated from there: where the next gradient is taken
    t: Tensor  # [m, 1]: what the momentum is made of
    step: Tensor  # [m, 1]


@dataclass(frozen=True, kw_only=True)
class Accelerated(IterativeSolver):
    """Steps found by backtracking; the first search begins at ``first_step``."""

    first_step: Positive = 1.0

    def begin(self, problem: LocalProblem, start: Tensor, rule: StoppingRule) -> Moving:
        one = start.new_ones(len(start), 1)
        return Moving(start, problem.value(start), start, one, self.first_step * one)


def next_t(t: Tensor, step: Tensor, new_step: Tensor) -> Tensor:
    """t_{k+1}, such that the method stays accelerated though its step changes."""
    return (1 + torch.sqrt(1 + 4 * step / new_step * t**2)) / 2
