"""The oracle that engines hand to algorithms: some nodes' view of their own objectives in one round."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from holdfast.objective.objective import Objective


@dataclass
class Work:
    """What has been computed so far, over all nodes."""

    gradient_evaluations: int = 0  # one per node, call and point
    sample_gradients: int = 0  # samples those evaluations read


@dataclass
class BatchOracle:
    """The objectives of ``nodes`` [m]; every call of ``grad`` draws the next minibatch of the round."""

    objective: Objective
    nodes: Tensor
    round: int
    work: Work
    step: int = field(default=0)

    def grad(self, x: Tensor) -> Tensor:
        return self.grads(x)[0]

    def grads(self, *points: Tensor) -> tuple[Tensor, ...]:
        rows = [self._rows(x) for x in points]
        gradients = self.objective.minibatch_grads(rows, self.nodes, self.round, self.step)
        self.step += 1
        self.work.gradient_evaluations += len(points) * len(self.nodes)
        self.work.sample_gradients += len(points) * self.objective.samples_per_minibatch(self.nodes)
        return tuple(gradients)

    def full_grad(self, x: Tensor) -> Tensor:
        self.work.gradient_evaluations += len(self.nodes)
        self.work.sample_gradients += self.objective.samples(self.nodes)
        return self.objective.full_grads(self._rows(x), self.nodes)

    def _rows(self, x: Tensor) -> Tensor:
        """One row per node; laid out alike whether ``x`` is a server's single row, fresh or restored.

        The same numbers in another layout may take another kernel and round differently.
        """
        return x.expand(len(self.nodes), x.shape[-1]).contiguous()
