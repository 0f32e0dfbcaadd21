"""A problem with minibatches, runs with a server, and what counts as the same."""

from __future__ import annotations

import torch
from torch import Tensor

import holdfast as hf
from holdfast.data import DATASETS
from holdfast.engines.common.simulation import Simulation
from holdfast.models import MODELS
from holdfast.problem.flat import FlatModel
from holdfast.problem.losses import CrossEntropy
from holdfast.problem.model_problem import ModelProblem


def stochastic_digits(nodes: int = 6) -> ModelProblem:
    """Minibatches of digits on heterogeneous nodes, in float64."""
    digits = DATASETS.build("digits", {})
    data = hf.partition(digits.x_train, digits.y_train, hf.Dirichlet(0.3), nodes=nodes, seed=0)
    torch.manual_seed(0)
    model = MODELS.build("linear", {}, input_shape=digits.input_shape, outputs=10)
    flat = FlatModel(model, torch.device("cpu"), torch.float64)
    return ModelProblem(flat, CrossEntropy(), data, batch_size=16, seed=0)


def simulate(algorithm, problem, rounds: int = 0, seed: int = 3, cohort: int | None = None) -> Simulation:
    """A method with a server after so many rounds."""
    simulation = Simulation(algorithm, problem, hf.server(problem.nodes), seed=seed, cohort=cohort or "all")
    for _ in range(rounds):
        simulation.step()
    return simulation


def assert_same(first: Tensor, second: Tensor) -> None:
    assert first.abs().max() > 0.1  # the path goes somewhere
    assert (first - second).abs().max() <= 1e-10 * first.abs().max()
