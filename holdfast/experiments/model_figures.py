"""What metrics are made of: the models of a simulation after a round, and what they give on data."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from holdfast.contract import ServerAlgorithm
from holdfast.core.errors import HoldfastError
from holdfast.core.precision import unrounded
from holdfast.core.tree import leaves, tree_map
from holdfast.data.samples import targets_of
from holdfast.engines.common.simulation import Simulation

# --- figures of a model's outputs that the user brings: functions, and objects of torchmetrics ----------


Score = Callable[..., Any]
"""``score(outputs, targets)``: a number for each sample, [B], or their mean, []; or a torchmetrics object."""


class Accumulator(Protocol):
    """A score of one model, a batch at a time."""

    def update(self, outputs: Any, targets: Any) -> None:
        """Takes in a batch."""

    def compute(self) -> Any:
        """The score of all batches so far."""


class Mean:
    """The mean over all samples of what ``function`` gives for batches."""

    def __init__(self, name: str, function: Score) -> None:
        self.name, self.function = name, function
        self.total, self.samples = torch.zeros((), dtype=torch.float64), 0

    def update(self, outputs: Any, targets: Any) -> None:
        try:
            size, value = len(targets), torch.as_tensor(self.function(outputs, targets))
        except Exception as error:  # the user's own code
            raise HoldfastError(
                f"metric {self.name!r} fails: {type(error).__name__}: {error}; it is given outputs and "
                "targets"
            ) from error
        if value.shape not in ((), (size,)):
            raise HoldfastError(
                f"metric {self.name!r}: expected one number for each of {size} samples, or their mean, got "
                f"shape {list(value.shape)}"
            )
        value = value.double()
        self.total = self.total + (value.sum() if value.ndim else value * size)
        self.samples += size

    def compute(self) -> Any:
        return self.total / self.samples


def accumulator(name: str, score: Score, device: torch.device) -> Accumulator:
    """``score`` with nothing taken in yet."""
    # Whoever has such an object has imported the library.
    library = sys.modules.get("torchmetrics")
    if library is None or not isinstance(score, library.Metric):
        return Mean(name, score)
    fresh: Any = score.clone().to(device)
    fresh.reset()
    own: Accumulator = fresh
    return own


def scored(
    scores: Mapping[str, Score], rows: Tensor, batches: Iterator[tuple[Any, Any]]
) -> dict[str, Tensor]:
    """Every score of every row, [m]; ``batches``: outputs [m, B, ...] of all rows, and targets [B, ...]."""
    started = [{name: accumulator(name, score, rows.device) for name, score in scores.items()} for _ in rows]
    for outputs, targets in batches:
        for row, own in enumerate(started):
            for taking in own.values():
                taking.update(tree_map(lambda part, row=row: part[row], outputs), targets)
    return {name: torch.stack([_number(name, own[name].compute()) for own in started]) for name in scores}


def _number(name: str, value: Any) -> Tensor:
    figure = torch.as_tensor(value)
    if figure.numel() != 1:
        raise HoldfastError(
            f"metric {name!r}: expected one number, got shape {list(figure.shape)}; average them"
        )
    return figure.detach().double().reshape(())


# --- what metrics are made of ---------------------------------------------------------------------------


PERSONAL_STEP = 2**31 + 2**30  # minibatches of personalisation: far from those of rounds and of the start


class HeldOut(NamedTuple):
    """Stored samples, where the objective computes."""

    common: Any
    own: list[Any] | None = None  # of each node, if nodes are tested on their own; ``common`` has them all

    @property
    def samples(self) -> int:
        return len(next(leaves(self.common)))


class Reads(Enum):
    """The samples that a metric reads; metrics that read the same ones share what is computed of them."""

    NOTHING = auto()
    TRAIN = auto()  # all training samples at the average model
    TRAIN_GRADIENT = auto()  # the same with gradients
    AVERAGE_ON_TEST = auto()  # the test set at the average model
    NODES_ON_TEST = auto()  # the test set, or each node's own, at the nodes' models
    PERSONAL_ON_TEST = auto()  # the same at their personalised models


class ModelFigures:
    """The quantities that metrics are made of, for the models as they are now.

    ``scores``: the user's, by name, with the ``Reads`` that want them. ``personalize``: so many local steps
    make a personal model.
    """

    def __init__(
        self,
        simulation: Simulation,
        test: HeldOut | None = None,
        scores: Mapping[Reads, Mapping[str, Score]] | None = None,
        personalize: int = 0,
    ) -> None:
        self.simulation = simulation
        self.problem = simulation.problem
        self.test, self.scores, self.personalize = test, scores or {}, personalize
        self.world = simulation.world
        self.one_model = isinstance(simulation.method, ServerAlgorithm)
        # Whom figures are about: those who do not attack, which is nearly always everybody.
        self.honest = simulation.rounds.honest
        # [m, d] of the nodes here; [1, d] where all nodes hold the server's
        self.models = simulation.models.detach()[: 1 if self.one_model else None]
        # Around one of them, so that models that are equal have exactly that average.
        centre = self.world.of_leader(self.models[0])
        self.average = centre + self.mean(self.models - centre)  # [d]

    def mean(self, of_models: Tensor) -> Tensor:
        """The mean over honest models of what is given for those here, [m, ...]; of one model, [1, ...]."""
        if len(of_models) == 1 and self.one_model:
            return of_models[0]
        return self.world.mean(self.of_honest(of_models), self.simulation.network.honest)

    def of_honest(self, of_nodes: Tensor) -> Tensor:
        """The rows of ``of_nodes`` [m, ...] whose nodes do not attack; of one model, [1, ...], that."""
        return of_nodes if self.honest is None or len(of_nodes) == 1 else of_nodes[self.honest]

    def everybody(self, of_models: Tensor) -> Tensor:
        """[n]: what is given for the models here, [m] or of one model [1], for all nodes."""
        nodes = self.simulation.nodes
        own = of_models.expand(len(nodes))
        return self.world.sum(own.new_zeros(self.problem.nodes).index_copy(0, nodes, own))

    @cached_property
    def common(self) -> Tensor:
        """The average model with all that evaluation needs, see ``Problem.complete``."""
        return self.problem.tester.complete(self.average[None], None, self.world.sum)[0]

    # --- on the test set ----------------------------------------------------------------------------------

    @cached_property
    def node_tests(self) -> dict[str, Tensor]:
        """Accuracy, loss and scores of the models of the nodes here, [m]; [1] where all are the same."""
        assert self.test is not None
        personal = self.simulation.personal_models
        if personal is None and self.one_model and self.test.own is None:
            accuracy, loss = self.average_test
            figures = self._scored(self.common.unsqueeze(0), self.test.common, Reads.NODES_ON_TEST)
            return {"accuracy": accuracy, "loss": loss, **figures}
        return self._node_tests(self.simulation.models if personal is None else personal, Reads.NODES_ON_TEST)

    @cached_property
    def personal_tests(self) -> dict[str, Tensor]:
        """The same of personal models: the method's own, or those after a few local steps of each node."""
        return self._node_tests(self.personal_models, Reads.PERSONAL_ON_TEST)

    @cached_property
    def personal_models(self) -> Tensor:
        """[m, d]"""
        simulation = self.simulation
        if (personal := simulation.personal_models) is not None:
            return personal
        method = simulation.method.at(simulation.round)
        if not self.personalize or vars(method).get("lr") is None:
            name, lacking = type(method).__name__, "step size lr" if self.personalize else "personal models"
            raise HoldfastError(
                f"personal metrics: {name} has no {lacking}; give personalize=steps to a method with lr"
            )
        x = simulation.models.detach().contiguous()
        for step in range(PERSONAL_STEP, PERSONAL_STEP + self.personalize):
            drawn = (simulation.nodes, simulation.round, step)
            [(_, gradient)] = self.problem.minibatch_values_and_grads([x], *drawn)
            x = x - vars(method)["lr"] * gradient
        return x

    def _node_tests(self, models: Tensor, reads: Reads) -> dict[str, Tensor]:
        assert self.test is not None
        models = self.problem.tester.complete(models.detach(), self.simulation.nodes, self.world.sum)
        if self.test.own is None:
            return self._tested(models, self.test.common, reads)
        own = [self.test.own[node] for node in self.simulation.nodes.tolist()]
        found = [self._tested(models[i : i + 1], samples, reads) for i, samples in enumerate(own)]
        return {name: torch.cat([figures[name] for figures in found]) for name in found[0]}

    def _tested(self, models: Tensor, samples: Any, reads: Reads) -> dict[str, Tensor]:
        accuracy, loss = self.problem.tester.test(models, samples)
        return {"accuracy": accuracy, "loss": loss, **self._scored(models, samples, reads)}

    def _scored(self, models: Tensor, samples: Any, reads: Reads) -> dict[str, Tensor]:
        scores = self.scores.get(reads, {})
        return scored(scores, models, self.problem.tester.outputs(models, samples)) if scores else {}

    @cached_property
    def average_test(self) -> tuple[Tensor, Tensor]:
        """Test accuracy and test loss of the average model, each [1]; every process takes some samples."""
        assert self.test is not None
        mine = tree_map(lambda part: part[self.world.rank :: self.world.size], self.test.common)
        samples = len(next(leaves(mine)))
        figures = torch.zeros(2, 1, dtype=torch.float64, device=self.average.device)
        common = self.common.unsqueeze(0)
        if samples:
            share = samples / self.test.samples
            figures = torch.stack(self.problem.tester.test(common, mine)) * share
        accuracy, loss = self.world.sum(figures)
        return accuracy, loss

    @cached_property
    def average_scores(self) -> dict[str, Tensor]:
        """The user's scores of the average model, each [1]; every process takes all samples."""
        assert self.test is not None
        return self._scored(self.common.unsqueeze(0), self.test.common, Reads.AVERAGE_ON_TEST)

    @cached_property
    def class_accuracies(self) -> Tensor:
        """[C]: accuracy of the average model on the test samples of each class; NaN of a class without any.

        C is the greatest class number that occurs there, plus one.
        """
        assert self.test is not None
        targets = targets_of(self.test.common)
        if targets is None or targets.ndim != 1:
            raise HoldfastError("metric 'class_accuracy' needs one class number per test sample as target")
        classes = int(targets.max()) + 1
        correct = targets.new_zeros(classes, dtype=torch.float64)
        for outputs, labels in self.problem.tester.outputs(self.common.unsqueeze(0), self.test.common):
            hits = self.problem.tester.correct(tree_map(lambda part: part[0], outputs), labels)
            correct.index_add_(0, labels, hits.double())
        return torch.div(correct, torch.bincount(targets, minlength=classes))

    # --- on the training set ------------------------------------------------------------------------------

    @cached_property
    def global_gradient(self) -> Tensor:
        """Gradient of f at the average model, [d]."""
        with unrounded():  # in TF32, its norm would never fall below a thousandth of its terms
            return self.world.sum(self.problem.global_value_and_grad(self.common)[1])

    @cached_property
    def consensus(self) -> Tensor:
        """(1/n) sum_i ||x_i - average||^2."""
        return self.mean((self.models - self.average).square().sum(-1))

    @cached_property
    def duals(self) -> Tensor:
        """The estimates that the nodes here have of their own gradients at the optimum, [m, d]."""
        duals = self.simulation.rounds.duals(self.simulation.state)
        if duals is None:
            name = type(self.simulation.method).__name__
            raise HoldfastError(
                f"metric 'dual_error': {name} keeps no estimate of the gradients at the optimum"
            )
        return duals
