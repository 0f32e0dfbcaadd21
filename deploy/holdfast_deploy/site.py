"""A node's own site: its data, its objective, what it measures at home."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from holdfast.problem.model_problem import ModelProblem
from holdfast_deploy.reading import Reading


@dataclass(frozen=True)
class Site:
    """What node number ``node`` has at home. None of it leaves."""

    node: int
    problem: ModelProblem
    test: Any  # a tree of samples; None: no test split
    digest: str  # of the data
    warning: str | None = None  # what the user should know, though it is no mistake
    counted_noise: bool = False  # for tests: private noise from the seed, as in a simulation
    reading: Reading = field(default_factory=Reading)  # what its columns are, as far as that is known

    def measure(self, row: Tensor) -> dict[str, float]:
        """The objective on the node's own data, and its own test split, at the model ``row`` [1, d].

        If BatchNorm's statistics are not behind it, [1, d + 2 s], they are those of the node's own data.
        """
        # The objective knows of this node only, whose share in the common one is 1/n.
        metrics = {}
        if self.problem.source.finite:
            metrics["local_loss"] = self.problem.nodes * float(self.problem.global_value(row[0]))
        if self.test is not None:
            accuracy, loss = self.problem.tester.test(row, self.test)
            if self.problem.loss.has_accuracy:
                metrics["test_accuracy"] = float(accuracy[0])
            metrics["test_loss"] = float(loss[0])
        return metrics
