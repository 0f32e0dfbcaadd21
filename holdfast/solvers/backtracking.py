"""Backtracking line search on every node at once, each with a step of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.solvers.iterative import choose

GROWTH = 1 / 0.9  # "full" backtracking: a step may grow again in every iteration
HALVINGS = 100  # after which a search gives up


class Descent(NamedTuple):
    """The outcome of a search, row by row."""

    point: Tensor  # [m, d]
    energy: Tensor  # [m, 1]: at ``point``
    step: Tensor  # [m, 1]
    found: Tensor  # [m, 1]: whether a step was accepted; if not, ``point`` is where the search began


def backtrack(
    rows: Tensor,
    x: Tensor,
    energy: Tensor,
    step: Tensor,
    candidate: Callable[[Tensor], Tensor],
    bound: Callable[[Tensor, Tensor], Tensor],
    energy_of: Callable[[Tensor, Tensor], Tensor],
) -> Descent:
    """Halves the ``step`` [m, 1] of each of the ``rows`` [m, 1] until its descent condition holds.

    ``candidate(step)`` is the point [m, d] that a step leads to, ``bound(point, step)`` [m, 1] what the
    energy may be there, up to rounding, and ``energy_of(point, rows)`` computes it for these rows alone.
    """
    slack = rounding(energy)
    reached, level, seeking = x, energy, rows
    for _ in range(HALVINGS):
        point = candidate(step)
        value = energy_of(point, seeking)
        fine = seeking & (value <= bound(point, step) + slack)
        reached, level = choose(fine, point, reached), choose(fine, value, level)
        seeking = seeking & ~fine
        if not bool(seeking.any()):
            break
        step = choose(seeking, step / 2, step)
    return Descent(reached, level, step, rows & ~seeking)


def grown(step: Tensor, gradient: Tensor, energy: Tensor) -> Tensor:
    """The step to try first, [m, 1]: longer than the last one, unless rounding hides what it gains.

    There the descent condition holds whatever the step, and would let it grow without bounds.
    """
    gain = step * gradient.square().sum(-1, keepdim=True)
    return choose(gain > rounding(energy), step * GROWTH, step)


def rounding(energy: Tensor) -> Tensor:
    """How far computed energies may be from the true ones: 1e-15 times their size in float64."""
    return 4.5 * torch.finfo(energy.dtype).eps * energy.abs()
