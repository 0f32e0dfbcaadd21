"""The oracle that engines hand to algorithms: some nodes' view of their own objectives in one round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from holdfast.contract import LocalSteps, Steps
from holdfast.core.errors import HoldfastError
from holdfast.core.randomness import RandomStream, Word, coin, uniform
from holdfast.engines.common.counters import Accesses, Work
from holdfast.problem.problem import Problem
from holdfast.solvers import Newton, Solver

EXACT = Newton()

# Minibatches drawn before the first round have step numbers of their own, far from any round's.
INITIAL_STEP = 2**31


MinibatchGradient = Callable[[Tensor, Tensor, Word, Word], tuple[Tensor, Tensor]]
"""(x [m, d], nodes [m], round, step) -> losses [m], gradients [m, d]."""

Guard = Callable[[Callable[[], Tensor], Tensor], Tensor]
"""(a local solve, its start [m, d]) -> the solution [m, d], or what stands for it where the solve fails."""


def unguarded(solve: Callable[[], Tensor], start: Tensor) -> Tensor:
    """A solve that fails ends the round."""
    return solve()


def unprotected(what: str) -> HoldfastError:
    """That ``what`` cannot be asked of private data."""
    return HoldfastError(
        f"private: the method's solver asks for {what} and only gradients are protected; choose a solver of "
        'so many gradient steps, such as {name = "sgd", lr = 0.1, steps = 10}, or another method'
    )


@dataclass
class BatchOracle:
    """The objectives of ``nodes`` [m]; every call of ``grad`` draws the next minibatch of the round."""

    problem: Problem
    nodes: Tensor
    seed: int
    round: int
    work: Work
    chances: Tensor | None = None  # [n] float64: every node's probability of being able to compute; None: 1
    gradient: MinibatchGradient | None = None  # instead of the problem's own
    guard: Guard = unguarded
    step: int = 0  # the number of the next minibatch
    read: int = 0  # the number of the next gradient of all data
    accesses: Accesses = field(default_factory=Accesses)
    limits: Callable[[int], int] | None = None  # (node) -> more local steps than that it does not take
    until: Tensor | None = None  # [m, 1]: the number of each node's minibatches in the round; None: any
    losses: list[Tensor] = field(default_factory=list)  # of every minibatch so far, at its first point; [k]
    cohort: Tensor | None = None  # [c], sorted: all nodes that take part in the round; None: every node
    draws: int = 0  # shared coins of this round so far

    def steps(self, given: LocalSteps) -> Steps:
        if not isinstance(given, tuple) and self.limits is None:
            return given
        nodes: list[int] = self.nodes.tolist()
        own = [given[node] if isinstance(given, tuple) else given for node in nodes]
        if self.limits is not None:
            own = [min(steps, self.limits(node)) for node, steps in zip(nodes, own, strict=True)]
        if min(own) == max(own):
            return own[0]
        taken = torch.tensor(own, device=self.nodes.device)[:, None]
        self.until = self.step + taken
        return taken.to(self.problem.x0)

    def grad(self, x: Tensor, where: Tensor | None = None) -> Tensor:
        if self.until is not None:
            where = self.step < self.until
        gradient = self._compute(x, where, lambda rows, nodes: self._minibatch([rows], nodes)[0])
        self.step += 1
        return gradient

    def grads(self, *points: Tensor) -> tuple[Tensor, ...]:
        gradients = self._minibatch([self._rows(x) for x in points], self.nodes)
        self.step += 1
        return tuple(gradients)

    def full_grad(self, x: Tensor, where: Tensor | None = None) -> Tensor:
        return self._compute(x, where, self._full)

    def argmin(
        self,
        linear: Tensor,
        centre: Tensor,
        weight: float | Tensor,
        start: Tensor,
        solver: Solver = EXACT,
        gradient_norm: float | None = None,
    ) -> Tensor:
        if self.problem.private and (solver.adaptive or gradient_norm is not None):
            raise unprotected("as many gradients as a stopping rule demands,")
        problem, rows = OracleProblem(self, linear, centre, weight, gradient_norm), self._rows(start)
        return self.guard(lambda: solver.solve(problem, rows), rows)

    def full_value(self, x: Tensor, where: Tensor | None = None) -> Tensor:
        return self._compute(x, where, self._values, 1)

    def coin(self, probability: float) -> bool:
        self.draws += 1
        return coin(self.seed, self.round, self.draws, probability)

    def parts(self, x: Tensor, copies: int) -> Tensor:
        # Clients stand in a ring in random order; entry k is sent by ``copies`` of them from place k copies
        # on. All send equally many entries, or one more.
        device = self.nodes.device
        cohort = torch.arange(self.problem.nodes, device=device) if self.cohort is None else self.cohort
        size, copies = len(cohort), min(copies, len(cohort))
        draws = uniform(self.seed, RandomStream.PARTS, self.round, 0, cohort)
        own = uniform(self.seed, RandomStream.PARTS, self.round, 0, self.nodes)
        place = (draws < own[:, None]).sum(-1, keepdim=True)
        sends = (place - copies * torch.arange(x.shape[-1], device=device)) % size < copies
        return sends.to(x.dtype) * (size / copies)

    @property
    def able(self) -> Tensor:
        draws = uniform(self.seed, RandomStream.COMPUTE, self.round, 0, self.nodes)
        return draws[:, None] < self.chance

    @property
    def chance(self) -> Tensor:
        if self.chances is None:
            return torch.ones(len(self.nodes), 1, dtype=torch.float64, device=self.nodes.device)
        return self.chances[self.nodes][:, None]

    def _compute(
        self,
        x: Tensor,
        where: Tensor | None,
        function: Callable[[Tensor, Tensor], Tensor],
        width: int | None = None,
    ) -> Tensor:
        """``function`` of the rows that ``where`` [m, 1] marks; the others cost nothing and are zero.

        ``width`` is the size of its rows, if not that of ``x``.
        """
        rows = self._rows(x)
        if where is None:
            return function(rows, self.nodes)
        chosen = where.squeeze(-1).nonzero().squeeze(-1)
        if len(chosen) == len(rows):
            return function(rows, self.nodes)
        result = rows.new_zeros(len(rows), width or rows.shape[-1])
        if len(chosen):
            result[chosen] = function(rows[chosen], self.nodes[chosen])
        return result

    def _minibatch(self, points: list[Tensor], nodes: Tensor) -> list[Tensor]:
        self._count(len(points), nodes, self.problem.samples_per_minibatch(nodes))
        self.accesses.minibatches += 1
        # Private gradients at several points need noise of their own: only the problem sees them together.
        if self.gradient is None or (self.problem.private and len(points) > 1):
            computed = self.problem.minibatch_values_and_grads(points, nodes, self.round, self.step)
        else:
            computed = [self.gradient(x, nodes, self.round, self.step) for x in points]
        self.losses.append(computed[0][0])
        return [gradient for _, gradient in computed]

    def _full(self, x: Tensor, nodes: Tensor) -> Tensor:
        self._count(1, nodes, self.problem.samples(nodes))
        self.accesses.of_all_data += 1
        self.read += 1
        return self.problem.full_grads(x, nodes, self.round, self.read - 1)

    def _values(self, x: Tensor, nodes: Tensor) -> Tensor:
        if self.problem.private:
            raise unprotected("values of the objective, as a line search or a stopping rule does,")
        self.work.value_evaluations += len(nodes)
        return self.problem.values(x, nodes)[:, None]

    def _count(self, points: int, nodes: Tensor, samples: int) -> None:
        self.work.gradient_evaluations += points * len(nodes)
        self.work.sample_gradients += points * samples
        if self.chances is None:
            share = raw = len(nodes) / self.problem.nodes
        else:
            slowness = 1 / self.chances
            busy = slowness[nodes].sum()
            share, raw = float(busy / slowness.sum()), float(busy / len(slowness))
        self.work.delay += points * share
        self.work.raw_delay += points * raw

    def _rows(self, x: Tensor) -> Tensor:
        """One row per node; laid out alike whether ``x`` is a server's single row, fresh or restored.

        The same numbers in another layout may take another kernel and round differently.
        """
        shape = (len(self.nodes), x.shape[-1])
        return (x if x.shape == shape else x.expand(shape)).contiguous()


@dataclass(frozen=True)
class OracleProblem:
    """f_i(u) + <linear, u> + (weight/2) ||u - centre||^2 of an oracle's nodes, for a local solver."""

    oracle: BatchOracle
    linear: Tensor
    centre: Tensor
    weight: float | Tensor  # [m, 1] where nodes differ
    gradient_norm: float | None = None

    @property
    def l1(self) -> float:
        return self.oracle.problem.l1

    @property
    def smooth(self) -> bool:
        return self.oracle.problem.smooth

    def value(self, u: Tensor, where: Tensor | None = None) -> Tensor:
        away = (u - self.centre).square().sum(-1, keepdim=True)
        added = (self.linear * u).sum(-1, keepdim=True) + self.weight / 2 * away
        return self._masked(self.oracle.full_value(u, where), added, where)

    def grad(self, u: Tensor, where: Tensor | None = None) -> Tensor:
        return self._masked(self.oracle.full_grad(u, where), self.slope(u), where)

    def minibatch_grad(self, u: Tensor, where: Tensor | None = None) -> Tensor:
        return self._masked(self.oracle.grad(u, where), self.slope(u), where)

    def hessian(self, u: Tensor) -> Tensor:
        if self.oracle.problem.private:
            raise unprotected("Hessians, as an exact solve does,")
        identity = torch.eye(u.shape[-1], dtype=u.dtype, device=u.device)
        weight = self.weight[..., None] if isinstance(self.weight, Tensor) else self.weight
        return self.oracle.problem.hessians(u, self.oracle.nodes) + weight * identity

    def slope(self, u: Tensor) -> Tensor:
        return self.linear + self.weight * (u - self.centre)

    def report_unfinished(self, rows: Tensor) -> None:
        self.oracle.work.unfinished_solves += int(rows.sum())

    @staticmethod
    def _masked(own: Tensor, added: Tensor, where: Tensor | None) -> Tensor:
        return own + added if where is None else own + added * where
