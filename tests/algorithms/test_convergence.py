"""Where methods end on heterogeneous quadratics: corrected ones at the optimum, others where theory says."""

from __future__ import annotations

import pytest
import torch
from conftest import Quadratics

import holdfast as hf

CORRECTED = [
    (hf.SCAFFOLD(lr=0.02, local_steps=10), None, 100),
    (hf.SCAFFOLD(lr=0.02, local_steps=10, server_lr=2.0), None, 100),
    (hf.LocalGECLServer(lr=0.02, local_steps=10), None, 100),
    (hf.LocalGECLServer(lr=0.02, local_steps=10, warm_start=True), None, 100),
    (hf.FedAvg(lr=0.1, local_steps=1), None, 400),  # one step: no drift, so no correction is needed
    (hf.LocalGECL(lr=0.01, local_steps=10), "ring", 1100),
    (hf.LocalGECL(lr=0.003, local_steps=10, alpha=5.0), "ring", 700),
    (hf.LocalGECL(lr=0.003, local_steps=10, first_grad_at="mixed"), "ring", 700),
    (hf.LocalGECL(lr=0.003, local_steps=10, warm_start_rounds=20), "ring", 700),
    (hf.DSCAFFOLD(lr=0.003, local_steps=10), "ring", 700),
    (hf.GECL(lr=0.05), "ring", 700),
]


@pytest.mark.parametrize(("algorithm", "graph", "rounds"), CORRECTED, ids=str)
def test_corrected_methods_reach_the_optimum(quadratics, algorithm, graph, rounds):
    topology = hf.ring(10) if graph else None
    models = quadratics.run(algorithm, rounds, topology)[-1]
    assert (models - quadratics.optimum).norm(dim=-1).max() < 1e-10


def local_map(A: torch.Tensor, b: torch.Tensor, lr: float, steps: int, rho: float = 0.0):
    """(M, c) with x -> M x + c: ``steps`` gradient steps on a quadratic, pulled by rho towards the start."""
    eye = torch.eye(len(b), dtype=b.dtype)
    pulled = A + rho * eye
    power = torch.linalg.matrix_power(eye - lr * pulled, steps)
    reach = (eye - power) @ torch.linalg.inv(pulled)
    return power + rho * reach, reach @ A @ b


def fixed_point(problem: Quadratics, lr: float, steps: int, rho: float = 0.0) -> torch.Tensor:
    """Where averaging after local steps stands still."""
    maps = [local_map(A, b, lr, steps, rho) for A, b in zip(problem.A, problem.b, strict=True)]
    M = torch.stack([M for M, _ in maps]).mean(0)
    c = torch.stack([c for _, c in maps]).mean(0)
    return torch.linalg.solve(torch.eye(len(c), dtype=c.dtype) - M, c)


@pytest.mark.parametrize("server_lr", [1.0, 1.5])
def test_fedavg_stalls_exactly_at_its_biased_point(quadratics, server_lr):
    algorithm = hf.FedAvg(lr=0.1, local_steps=10, server_lr=server_lr)
    models = quadratics.run(algorithm, 60)[-1]
    predicted = fixed_point(quadratics, 0.1, 10)
    assert (models - predicted).norm(dim=-1).max() < 1e-12
    assert (predicted - quadratics.optimum).norm() > 0.1


@pytest.mark.parametrize("rho", [0.1, 1.0, 10.0])
def test_fedprox_stalls_exactly_at_its_biased_point(quadratics, rho):
    lr = 1.0 / (5.0 + rho)
    algorithm = hf.FedProx(lr=lr, local_steps=20, rho=rho)
    models = quadratics.run(algorithm, 400)[-1]
    predicted = fixed_point(quadratics, lr, 20, rho)
    assert (models - predicted).norm(dim=-1).max() < 1e-12
    assert (predicted - quadratics.optimum).norm() > 0.05


def test_fedprox_with_many_steps_is_the_exact_proximal_point(quadratics):
    """sum_i (A_i + rho I)^-1 A_i (x - b_i) = 0"""
    rho, eye = 1.0, torch.eye(4, dtype=torch.float64)
    shrink = torch.linalg.inv(quadratics.A + rho * eye) @ quadratics.A
    predicted = torch.linalg.solve(shrink.sum(0), (shrink @ quadratics.b[..., None]).sum(0)).squeeze(-1)
    assert (fixed_point(quadratics, 0.15, 400, rho) - predicted).norm() < 1e-12


def gossip_limit(problem: Quadratics, W: torch.Tensor, lr: float, steps: int) -> torch.Tensor:
    """X = W (M X + c), row by row: the fixed point of local steps followed by mixing, [n, d]."""
    n, d = problem.b.shape
    maps = [local_map(A, b, lr, steps) for A, b in zip(problem.A, problem.b, strict=True)]
    blocks = torch.block_diag(*[M for M, _ in maps])
    mixing = torch.kron(W, torch.eye(d, dtype=W.dtype))
    constant = mixing @ torch.cat([c for _, c in maps])
    return torch.linalg.solve(torch.eye(n * d, dtype=W.dtype) - mixing @ blocks, constant).reshape(n, d)


def test_gossip_stalls_exactly_at_its_biased_point(quadratics):
    network = hf.Network.of(hf.ring(10))
    algorithm = hf.Gossip(lr=0.01, local_steps=10)
    models = quadratics.run(algorithm, 500, network)[-1]
    predicted = gossip_limit(quadratics, torch.tensor(network.dense()), 0.01, 10)
    assert (models - predicted).norm(dim=-1).max() < 1e-11
    assert (predicted.mean(0) - quadratics.optimum).norm() > 0.05


def test_dsgd_stalls_where_disagreement_balances_the_gradients(quadratics):
    """(I - W) X = -lr G(X), combine-then-adapt."""
    network = hf.Network.of(hf.ring(10))
    W = torch.tensor(network.dense())
    X = quadratics.run(hf.DSGD(lr=0.05), 800, network)[-1]
    assert (X - W @ X + 0.05 * quadratics.grads(X)).abs().max() < 1e-12
    assert (X.mean(0) - quadratics.optimum).norm() > 0.05


def test_naive_dscaffold_is_biased_on_a_ring(quadratics):
    algorithm = hf.DSCAFFOLD(lr=0.01, local_steps=10, naive=True)
    path = quadratics.run(algorithm, 400, hf.ring(10))
    assert (path[-1].mean(0) - quadratics.optimum).norm() > 0.05
    assert (path[-1] - path[-2]).abs().max() < 1e-6  # it has settled there


@pytest.mark.parametrize(("steps", "factor"), [(2, 1.04), (8, ((0.8) ** 8 + 1.2**8) / 2)])
def test_fedavg_diverges_on_opposite_parabolas_at_the_predicted_rate(steps, factor):
    """f_1 = x^2, f_2 = -x^2 sum to zero, yet FedAvg leaves every point (FedPD, Claim II.2)."""
    functions = [lambda x: (x**2).sum(), lambda x: -(x**2).sum()]
    result = hf.minimize(functions, [1.0], hf.FedAvg(lr=0.1, local_steps=steps), 20)
    path = result.x[:, 0, 0]
    assert torch.allclose(path[1:] / path[:-1], torch.full((20,), factor, dtype=torch.float64), rtol=1e-13)


def test_minimize_agrees_with_the_objective_in_one_product(quadratics):
    algorithm = hf.LocalGECL(lr=0.01, local_steps=3)
    by_functions = hf.minimize(quadratics.functions, quadratics.x0, algorithm, 30, topology=hf.ring(10)).x
    assert torch.allclose(by_functions, quadratics.run(algorithm, 30, hf.ring(10)), rtol=0, atol=1e-12)


def test_corrected_methods_do_not_diverge_there():
    functions = [lambda x: (x**2).sum(), lambda x: -(x**2).sum()]
    result = hf.minimize(functions, [1.0], hf.SCAFFOLD(lr=0.01, local_steps=8), 50)
    assert result.x.abs().max() < 2


def test_divergence_stops_the_run_and_keeps_what_was_recorded():
    functions = [lambda x: (x**2).sum(), lambda x: (3 * x**2).sum()]
    with pytest.warns(RuntimeWarning, match=r"FedAvg diverged: .*: try a smaller lr"):
        result = hf.minimize(functions, [1.0], hf.FedAvg(lr=1e6, local_steps=20), 50)
    assert result.diverged
    assert 1 < len(result.x) < 51
    assert len(result.history) == len(result.x)
