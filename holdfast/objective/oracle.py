"""The oracle that engines hand to algorithms: some nodes' view of their own objectives in one round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.objective.newton import newton_argmin
from holdfast.objective.objective import Objective
from holdfast.randomness import Stream, uniform


@dataclass
class Work:
    """What has been computed so far, over all nodes."""

    gradient_evaluations: int = 0  # one per node, call and point
    sample_gradients: int = 0  # samples those evaluations read
    delay: float = 0.0  # DSpodFL's tau_proc: 1 for every gradient that all nodes compute


@dataclass
class BatchOracle:
    """The objectives of ``nodes`` [m]; every call of ``grad`` draws the next minibatch of the round."""

    objective: Objective
    nodes: Tensor
    seed: int
    round: int
    work: Work
    chances: Tensor | None = None  # [n] float64: every node's probability of being able to compute; None: 1
    step: int = 0

    def grad(self, x: Tensor, where: Tensor | None = None) -> Tensor:
        gradient = self._compute(x, where, lambda rows, nodes: self._minibatch([rows], nodes)[0])
        self.step += 1
        return gradient

    def grads(self, *points: Tensor) -> tuple[Tensor, ...]:
        gradients = self._minibatch([self._rows(x) for x in points], self.nodes)
        self.step += 1
        return tuple(gradients)

    def full_grad(self, x: Tensor, where: Tensor | None = None) -> Tensor:
        return self._compute(x, where, self._full)

    def argmin(self, linear: Tensor, centre: Tensor, weight: float, start: Tensor) -> Tensor:
        def hessian(x: Tensor) -> Tensor:
            return self.objective.hessians(x, self.nodes)

        return newton_argmin(self.full_grad, hessian, linear, centre, weight, self._rows(start))

    @property
    def able(self) -> Tensor:
        draws = uniform(self.seed, Stream.COMPUTE, self.round, 0, self.nodes)
        return draws[:, None] < self.chance

    @property
    def chance(self) -> Tensor:
        if self.chances is None:
            return torch.ones(len(self.nodes), 1, dtype=torch.float64, device=self.nodes.device)
        return self.chances[self.nodes][:, None]

    def _compute(
        self, x: Tensor, where: Tensor | None, gradient: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """The gradient of the rows that ``where`` [m, 1] marks; the others cost nothing and are zero."""
        rows = self._rows(x)
        if where is None:
            return gradient(rows, self.nodes)
        chosen = where.squeeze(-1).nonzero().squeeze(-1)
        result = torch.zeros_like(rows)
        if len(chosen):
            result[chosen] = gradient(rows[chosen], self.nodes[chosen])
        return result

    def _minibatch(self, points: list[Tensor], nodes: Tensor) -> list[Tensor]:
        self._count(len(points), nodes, self.objective.samples_per_minibatch(nodes))
        return self.objective.minibatch_grads(points, nodes, self.round, self.step)

    def _full(self, x: Tensor, nodes: Tensor) -> Tensor:
        self._count(1, nodes, self.objective.samples(nodes))
        return self.objective.full_grads(x, nodes)

    def _count(self, points: int, nodes: Tensor, samples: int) -> None:
        self.work.gradient_evaluations += points * len(nodes)
        self.work.sample_gradients += points * samples
        if self.chances is None:
            self.work.delay += points * len(nodes) / self.objective.nodes
        else:
            slowness = 1 / self.chances
            self.work.delay += points * float(slowness[nodes].sum() / slowness.sum())

    def _rows(self, x: Tensor) -> Tensor:
        """One row per node; laid out alike whether ``x`` is a server's single row, fresh or restored.

        The same numbers in another layout may take another kernel and round differently.
        """
        return x.expand(len(self.nodes), x.shape[-1]).contiguous()
