"""The reference optimum, its cache, and what is measured against it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from convex_problems import digits, regression
from torch import nn

import holdfast as hf
from holdfast.core.errors import HoldfastError
from holdfast.data import DATASETS
from holdfast.data.federated import FederatedData
from holdfast.engines.common.simulation import Simulation
from holdfast.experiments.metrics import choose_metrics, measure
from holdfast.problem.losses import Hinge
from holdfast.problem.losses.base import Regulariser
from holdfast.problem.model_problem import ModelProblem
from holdfast.problem.optimum import GRADIENT_NORM, fingerprint, known_optimum, reference_optimum
from holdfast.problem.problem import FunctionProblem


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "holdfast" / "optima"


# --- the optimum -------------------------------------------------------------------------------------------


def test_the_gradient_vanishes_at_the_optimum_of_digits():
    objective = digits()
    found = reference_optimum(objective)
    value, gradient = objective.global_value_and_grad(found.x)
    assert gradient.norm() < 1e-10
    assert found.grad_norm == gradient.norm()
    assert found.value == value
    nearby = found.x + 1e-3 * torch.randn(
        5, 650, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    assert all(objective.global_value(x) > found.value for x in nearby)


@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_the_optimum_of_least_squares_solves_the_normal_equations(weights):
    objective = replace_weights(regression(l2=0.1), weights)
    x, y, counts = (part.numpy() for part in (*objective.source.stored, objective.source.counts))
    weight = np.repeat(1 / (4 * counts), counts) if weights == "uniform" else np.full(40, 1 / 40)
    expected = np.linalg.solve(x.T @ (weight[:, None] * x) + 0.1 * np.eye(3), x.T @ (weight * y))
    assert np.abs(reference_optimum(objective).x.numpy() - expected).max() < 1e-9


def replace_weights(objective: ModelProblem, weights) -> ModelProblem:
    return ModelProblem(
        objective.model,
        objective.loss,
        FederatedData(objective.source.stored.x, objective.source.stored.y, objective.source.counts.numpy()),
        batch_size=None,
        seed=0,
        regulariser=objective.regulariser,
        weights=weights,
    )


def test_functions_have_an_optimum_too(quadratics):
    objective = FunctionProblem(quadratics.functions, quadratics.x0)
    assert (reference_optimum(objective).x - quadratics.optimum).norm() < 1e-9
    single = FunctionProblem([lambda x: (x**2).sum()], torch.ones(2))
    with pytest.raises(HoldfastError, match="needs float64"):
        reference_optimum(single)


def test_a_run_in_float32_is_measured_against_float64():
    single, double = digits(dtype=torch.float32), digits()
    found = reference_optimum(single)
    assert found.x.dtype == torch.float64
    assert found.grad_norm < GRADIENT_NORM
    assert found.value == pytest.approx(reference_optimum(double).value, rel=1e-12)


@pytest.mark.parametrize(
    ("objective", "reason"),
    [
        (lambda: digits(module=nn.Sequential(nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, 10))), "not linear"),
        (lambda: digits(regulariser=Regulariser(l2=0.1, nonconvex=0.1)), "regulariser is not convex"),
        (lambda: digits(regulariser=Regulariser(l2=0.1, l1=0.1)), "l1 > 0 makes kinks"),
        (lambda: digits(regulariser=Regulariser()), "without l2 there may be no optimum"),
        (lambda: digits(Hinge()), "the exact hinge has kinks"),
        (
            lambda: FunctionProblem([lambda x: (x**3).sum() - x.sum()], -torch.ones(1).double()),
            "not positive",
        ),
    ],
)
def test_what_has_no_smooth_convex_optimum_is_refused(objective, reason):
    with pytest.raises(HoldfastError, match=f"reference optimum needs a .*convex objective: .*{reason}"):
        reference_optimum(objective())


# --- the cache ---------------------------------------------------------------------------------------------


def test_the_optimum_is_found_once(cache):
    first = reference_optimum(digits())
    again = digits()  # the same problem with another initial model
    again.hessian_products = None  # a Newton step would fail
    assert torch.equal(reference_optimum(again).x, first.x)
    assert [path.name for path in cache.iterdir()] == [f"{fingerprint(again)}.safetensors"]


def test_the_fingerprint_tells_problems_apart():
    data = DATASETS.build("digits", {})
    changed = data.x_train[:900].flatten(1).clone()
    changed[17, 3] += 1
    frozen = nn.Linear(64, 10)
    frozen.bias.requires_grad_(False)
    problems = [
        digits(),
        digits(x=changed),
        digits(counts=(300, 300, 300)),
        digits(weights="samples"),
        digits(regulariser=Regulariser(l2=0.02)),
        digits(Hinge(smoothing=0.1)),
        digits(std=2.0),
        digits(module=nn.Linear(64, 10, bias=False)),
        digits(module=frozen),
    ]
    assert len({fingerprint(problem) for problem in problems}) == len(problems)
    torch.manual_seed(1)
    assert fingerprint(digits()) == fingerprint(problems[0])


def test_a_cache_that_is_damaged_or_wrong_is_not_believed(cache):
    objective = regression(l2=0.1)
    right = reference_optimum(objective)
    (path,) = cache.iterdir()
    path.write_bytes(path.read_bytes()[:50])
    assert torch.equal(reference_optimum(objective).x, right.x)
    other = reference_optimum(regression(l2=0.2))
    (elsewhere,) = set(cache.iterdir()) - {path}
    path.write_bytes(elsewhere.read_bytes())
    assert torch.equal(reference_optimum(objective).x, right.x)
    assert not torch.equal(other.x, right.x)


def test_a_cache_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="the reference optimum is not kept"):
        found = reference_optimum(regression(l2=0.1), cache_dir=tmp_path / "file")
    assert found.grad_norm < GRADIENT_NORM


# --- metrics -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WithDual(hf.LocalGECLServer):
    """Local G-ECL, whose duals tend to the nodes' gradients at the optimum."""

    def dual(self, s):
        return s.dual


OPTIMUM = ["rel_energy", "optimum_distance", "dual_error"]


def test_metrics_against_the_optimum_vanish_there():
    objective = regression(l2=0.1)
    simulation = Simulation(WithDual(lr=0.05, local_steps=5), objective, hf.server(4))
    best = known_optimum(objective)
    first = measure(simulation, None, OPTIMUM)
    x0, nodes = objective.x0, torch.arange(4)
    excess = (objective.global_value(x0) - best.value) / best.value
    assert first["rel_energy"] == pytest.approx(float(excess), rel=1e-12)
    assert first["optimum_distance"] == pytest.approx(float((x0 - best.x).norm()), rel=1e-12)
    gradients = objective.full_grads(best.x.expand(4, -1).contiguous(), nodes)
    assert first["dual_error"] == pytest.approx(
        float(gradients.square().sum()), rel=1e-12
    )  # duals start at 0
    for _ in range(150):
        simulation.step()
    last = measure(simulation, None, OPTIMUM)
    assert abs(last["rel_energy"]) < 1e-12
    assert last["optimum_distance"] < 1e-9
    assert last["dual_error"] < 1e-18


def test_metrics_against_the_optimum_are_there_for_the_asking():
    for name in OPTIMUM:
        assert name not in choose_metrics("default", has_test=True, classes=3)
    assert list(choose_metrics(OPTIMUM, has_test=False, classes=None)) == OPTIMUM


def test_a_method_without_duals_is_named():
    simulation = Simulation(hf.FedAvg(lr=0.1), regression(l2=0.1), hf.server(4))
    with pytest.raises(HoldfastError, match="metric 'dual_error': FedAvg keeps no estimate"):
        measure(simulation, None, ["dual_error"])


def test_an_optimal_value_of_zero_has_no_relative_energy():
    objective = FunctionProblem([lambda x: (x**2).sum()], torch.ones(2).double())
    simulation = Simulation(hf.FedAvg(lr=0.1), objective, hf.server(1))
    with pytest.raises(HoldfastError, match="the optimal value is 0; use 'optimum_distance'"):
        measure(simulation, None, ["rel_energy"])
    assert measure(simulation, None, ["optimum_distance"])["optimum_distance"] == pytest.approx(2**0.5)


def test_objectives_in_float32_report_small_relative_energies():
    objective = digits(dtype=torch.float32, counts=(30, 20, 10))
    simulation = Simulation(hf.FedAvg(lr=0.1), objective, hf.server(3))
    simulation.state = replace_model(simulation, known_optimum(objective).x)
    assert 0 <= measure(simulation, None, ["rel_energy"])["rel_energy"] < 1e-11


def replace_model(simulation, x):
    server = simulation.state.server
    return simulation.state._replace(server=server._replace(x=x.float()))
