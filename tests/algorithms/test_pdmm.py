"""PDMM and ECL: against a link-by-link implementation, their limits, rates and traffic."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import Quadratics
from linear_rounds import measured_decay, reference_quadratics, round_matrix
from torch import Tensor

import holdfast as hf
from holdfast.algorithms.pdmm import ECL, PDMM
from holdfast.core.tree import leaves
from holdfast.engines.common.dry_run import dry_run
from holdfast.engines.common.simulation import Simulation
from holdfast.models import MODELS
from holdfast.problem.flat import FlatModel
from holdfast.problem.losses import CrossEntropy
from holdfast.problem.losses.base import Regulariser
from holdfast.problem.model_problem import ModelProblem
from holdfast.topology import Network

EYE = torch.eye(4, dtype=torch.float64)
IRREGULAR = hf.random_geometric(10, radius=0.45, seed=3)  # degrees 1 to 7
GRAPHS = {"ring": hf.ring(10), "line": hf.line(10), "star": hf.star(10), "irregular": IRREGULAR}


def link_by_link(problem: Quadratics, graph, rounds: int, local, theta: float = 1.0) -> Tensor:
    """[rounds + 1, n, d]: the iterates with one dual per directed link in a dictionary.

    ``local(i, x, pulls)`` is node i's new model, where ``pulls`` holds (j, A_ij z_ij) for its neighbours j.
    """
    sign = {(i, j): 1.0 if i > j else -1.0 for a, b in graph.edges for i, j in ((a, b), (b, a))}
    z = {link: torch.zeros(problem.dim, dtype=torch.float64) for link in sign}
    x = problem.x0.expand(problem.nodes, -1)
    path = [x]
    for _ in range(rounds):
        x = torch.stack(
            [local(i, x[i], [(j, sign[i, j] * z[i, j]) for j in graph[i]]) for i in sorted(graph)]
        )
        sent = {(i, j): z[i, j] - 2 * sign[i, j] * x[i] for i, j in sign}
        z = {(i, j): (1 - theta) * z[i, j] + theta * sent[j, i] for i, j in sign}
        path.append(x)
    return torch.stack(path)


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
@pytest.mark.parametrize("theta", [1.0, 0.5])
def test_pdmm_link_by_link(quadratics, graph, theta):
    gamma = 0.7

    def exact(i: int, x: Tensor, pulls: list) -> Tensor:
        A, b = quadratics.A[i], quadratics.b[i]
        return torch.linalg.solve(
            A + gamma * len(pulls) * EYE, A @ b + gamma * sum(pull for _, pull in pulls)
        )

    expected = link_by_link(quadratics, graph, 12, exact, theta)
    path = quadratics.run(PDMM(gamma=gamma, theta=theta), 12, graph)
    assert torch.allclose(path, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
@pytest.mark.parametrize("gamma", [None, 0.7])
def test_ecl_link_by_link(quadratics, graph, gamma):
    lr, steps = 0.05, 3

    def linearised(i: int, x: Tensor, pulls: list) -> Tensor:
        strength = {j: gamma or 1 / (lr * steps * max(graph.degree[i], graph.degree[j])) for j, _ in pulls}
        pull = sum(strength[j] * pull for j, pull in pulls)
        for _ in range(steps):
            gradient = quadratics.A[i] @ (x - quadratics.b[i])
            x = (x - lr * (gradient - pull)) / (1 + lr * sum(strength.values()))
        return x

    expected = link_by_link(quadratics, graph, 12, linearised)
    path = quadratics.run(ECL(lr=lr, local_steps=steps, gamma=gamma), 12, graph)
    assert torch.allclose(path, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("algorithm", "graph", "rounds"),
    [
        (PDMM(gamma=2.0), "ring", 150),
        (PDMM(gamma=3.0), "line", 250),  # a tree
        (PDMM(gamma=0.5), "star", 350),
        (PDMM(gamma=0.5), "irregular", 400),
        (PDMM(gamma=2.0, theta=0.5), "ring", 300),
        (ECL(lr=0.1), "ring", 550),
        (ECL(lr=0.1, local_steps=5), "ring", 400),
        # With gamma by the node's own degree these would end at argmin sum_i deg_i f_i.
        (ECL(lr=0.05, local_steps=3), "star", 600),
        (ECL(lr=0.05, local_steps=3), "irregular", 600),
    ],
    ids=str,
)
def test_they_reach_the_optimum(quadratics, algorithm, graph, rounds):
    models = quadratics.run(algorithm, rounds, GRAPHS[graph])[-1]
    assert (models - quadratics.optimum).norm(dim=-1).max() < 1e-10


@pytest.mark.parametrize(
    ("algorithm", "factor", "rounds"),
    [
        (PDMM(gamma=0.5), 0.949, 500),
        (PDMM(gamma=2.0), 0.790, 200),
        (PDMM(gamma=0.5, theta=0.5), 0.974, 1000),
        (ECL(lr=0.1), 0.938, 450),
        (ECL(lr=0.1, local_steps=5, gamma=1.25), 0.872, 250),  # the reference code's 1 / (lr (K - 1) deg)
    ],
    ids=str,
)
def test_contraction_factors_are_the_known_ones(algorithm, factor, rounds):
    """Factors from an independent implementation; none is above that of the round's slowest mode."""
    problem, ring = reference_quadratics(dim=4), hf.ring(10)
    decay = measured_decay(problem, problem.run(algorithm, rounds, ring))
    assert decay == pytest.approx(factor, abs=2e-3)
    modes = torch.linalg.eigvals(round_matrix(problem, algorithm, ring)).abs()
    lasting = (
        modes > 1 - 1e-9
    )  # duals that circle around the ring, alike or alternating: models never see them
    assert lasting.sum() in (4, 8)
    assert decay <= modes[~lasting].max() + 1e-3


def test_ecl_with_many_steps_is_pdmm(quadratics):
    ecl = quadratics.run(ECL(lr=0.15, local_steps=300, gamma=0.7), 20, IRREGULAR)
    pdmm = quadratics.run(PDMM(gamma=0.7), 20, IRREGULAR)
    assert torch.allclose(ecl, pdmm, rtol=0, atol=1e-12)


def test_the_first_round_by_hand():
    """f_1 = (x - 4)^2 / 2, f_2 = x^2 / 2, gamma = 1: x = b / 2, then x = (b + A z) / 2 with z received."""
    functions = [lambda x: (x - 4).square().sum() / 2, lambda x: x.square().sum() / 2]
    path = hf.minimize(functions, [0.0], PDMM(gamma=1.0), 3, topology=hf.line(2)).x[:, :, 0]
    # round 1: x = (2, 0); node 0 (A = -1) sends 4, node 1 (A = +1) sends 0
    # round 2: x_0 = (4 - 0) / 2, x_1 = (0 + 4) / 2: the optimum, after one exchange
    assert path.tolist() == [[0, 0], [2, 0], [2, 2], [2, 2]]


@pytest.mark.parametrize("algorithm", [PDMM(gamma=1.0), ECL(lr=0.1, local_steps=3)], ids=str)
def test_one_vector_per_link_and_one_dual_per_end(quadratics, algorithm):
    network = Network.of(IRREGULAR)
    simulation = Simulation(algorithm, quadratics, network)
    assert simulation.traffic.numbers == 0
    simulation.step()
    assert simulation.traffic.numbers == network.directed_links * quadratics.dim
    assert simulation.traffic.delay == 1
    assert simulation.state.z.shape == (network.directed_links, quadratics.dim)
    footprint = dry_run(algorithm, network)
    assert footprint.vectors_per_link == 1
    assert footprint.state_vectors == 10 + network.directed_links


def test_gradients_of_ecl(quadratics):
    simulation = Simulation(ECL(lr=0.1, local_steps=3), quadratics, Network.of(hf.ring(10)))
    simulation.step()
    assert simulation.work.gradient_evaluations == 30


@pytest.mark.parametrize("algorithm", [PDMM(gamma=1.0), ECL(lr=0.1)], ids=str)
def test_bad_networks(quadratics, algorithm):
    with pytest.raises(hf.HoldfastError, match="works along links: use a graph"):
        Simulation(algorithm, quadratics, hf.server(10))
    varying = Network.varying(lambda epoch: hf.erdos_renyi(10, p=0.4, seed=epoch))
    with pytest.raises(hf.HoldfastError, match=r"needs links and weights that are the same in every round"):
        Simulation(algorithm, quadratics, varying)


def test_bad_parameters():
    for make, message in (
        (lambda: PDMM(gamma=0), r"PDMM.gamma: should be greater than 0, got 0"),
        (lambda: PDMM(gamma=1, theta=1.5), r"PDMM.theta: should be less than or equal to 1, got 1.5"),
        (lambda: ECL(lr=0.1, gamma=-1), r"ECL.gamma: should be greater than 0, got -1"),
        (lambda: ECL(lr=0.1, local_steps=0), r"ECL.local_steps: should be greater than or equal to 1, got 0"),
    ):
        with pytest.raises(hf.HoldfastError, match=message):
            make()


# --- softmax regression -------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[torch.float32, torch.float64], ids=str)
def softmax(request) -> ModelProblem:
    """Three classes of points in the plane on five heterogeneous nodes; exact gradients."""
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(3), 40)
    x = rng.standard_normal((120, 2)) + 2 * np.array([[0, 1], [1, 0], [-1, -1]])[y]
    data = hf.partition(x, y, hf.Dirichlet(0.5), nodes=5, seed=0)
    model = MODELS.build("linear", {}, input_shape=(2,), outputs=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    flat = FlatModel(model, torch.device("cpu"), request.param)
    return ModelProblem(flat, CrossEntropy(), data, batch_size=None, seed=0, regulariser=Regulariser(l2=1.0))


@pytest.mark.parametrize(
    "algorithm", [PDMM(gamma=2.0, theta=0.7), ECL(lr=0.3, local_steps=3, gamma=2.0)], ids=str
)
def test_they_solve_softmax_regression(softmax, algorithm):
    simulation = Simulation(algorithm, softmax, Network.of(hf.ring(5)))
    for _ in range(80):
        simulation.step()
    gradient = softmax.global_value_and_grad(simulation.models.mean(0))[1].norm()
    spread = (simulation.models - simulation.models.mean(0)).norm()
    tolerance = 1e-10 if softmax.x0.dtype == torch.float64 else 1e-5
    assert max(gradient, spread) < tolerance


@pytest.mark.parametrize("algorithm", [PDMM(gamma=0.5), ECL(lr=0.1, local_steps=2)], ids=str)
def test_resuming_changes_nothing(softmax, algorithm):
    network = Network.of(hf.star(5))

    def simulate(rounds: int) -> Simulation:
        simulation = Simulation(algorithm, softmax, network)
        for _ in range(rounds):
            simulation.step()
        return simulation

    whole, half, resumed = simulate(5), simulate(2), simulate(0)
    resumed.restore(*half.snapshot())
    for _ in range(3):
        resumed.step()
    assert all(torch.equal(a, b) for a, b in zip(leaves(resumed.state), leaves(whole.state), strict=True))
    assert all(tensor.dtype == softmax.x0.dtype for tensor in leaves(whole.state))
    assert (resumed.work, resumed.traffic) == (whole.work, whole.traffic)
    assert whole.models.shape == (5, softmax.dim)
