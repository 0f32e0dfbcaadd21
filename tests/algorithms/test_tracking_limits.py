"""Where gradient tracking, K-GT, DSGT and PD-SGDM end, how fast, and up to which step size."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import Quadratics
from linear_rounds import MU, L, contraction, measured_decay, reference_quadratics
from thinning import thinned

import holdfast as hf
from holdfast.algorithms import DSGT, GTSGD, KGT, NETFLEET, PDSGDM

RING = hf.Network.of(hf.ring(10))
COMPLETE = hf.Network.of(hf.complete(10))


@pytest.fixture(scope="module")
def reference() -> Quadratics:
    return reference_quadratics(dim=4)


EXACT = [  # the algorithm, rounds, factor per round of an independent implementation on the same problem
    (GTSGD(lr=0.03), 600, 0.948),
    (GTSGD(lr=0.03, order="atc"), 600, 0.951),
    (NETFLEET(lr=0.003, local_steps=10), 600, 0.950),
    (NETFLEET(lr=0.01, local_steps=10), 1100, 0.975),
    (KGT(lr=0.003, local_steps=10), 600, 0.951),
    (KGT(lr=0.02, local_steps=10, server_lr=0.3), 700, 0.963),
    (hf.LocalGECL(lr=0.003, local_steps=10), 600, 0.951),
    (hf.LocalGECL(lr=0.003, local_steps=10, alpha=5.0), 600, 0.954),
    (hf.LocalGECL(lr=0.01, local_steps=10), 1000, 0.971),
    (hf.DSCAFFOLD(lr=0.003, local_steps=10), 600, 0.951),
]


@pytest.mark.parametrize(("algorithm", "rounds", "factor"), thinned(EXACT, every=2, spread=True), ids=str)
def test_tracking_reaches_the_optimum_at_the_known_rate(reference, algorithm, rounds, factor):
    path = reference.run(algorithm, rounds, RING)
    assert (path[-1] - reference.optimum).norm(dim=-1).max() < 1e-10
    assert measured_decay(reference, path) == pytest.approx(factor, abs=0.002)
    radius, conserved = contraction(reference, algorithm, RING)
    assert radius == pytest.approx(factor, abs=0.002)
    assert conserved == reference.dim  # sum of the duals, or of trackers minus gradients


def pdsgdm_limit(
    problem: Quadratics, W: torch.Tensor, lr: float, steps: int, momentum: float
) -> torch.Tensor:
    """[n, d]: X = W X_K and m = m_K, where (X_K, m_K) is affine in (X, m) on every node."""
    n, d = problem.b.shape
    eye, zero = torch.eye(d, dtype=W.dtype), torch.zeros(d, d, dtype=W.dtype)
    powers, constants = [], []
    for A, b in zip(problem.A, problem.b, strict=True):
        # (x, m, 1) -> (x - lr m', m', 1) with m' = momentum m + A (x - b)
        step = torch.eye(2 * d + 1, dtype=W.dtype)
        step[:d] = torch.cat([eye - lr * A, -lr * momentum * eye, lr * (A @ b)[:, None]], dim=1)
        step[d : 2 * d] = torch.cat([A, momentum * eye, -(A @ b)[:, None]], dim=1)
        local = torch.linalg.matrix_power(step, steps)
        powers.append(local[:-1, :-1])
        constants.append(local[:-1, -1])
    models, buffers = torch.block_diag(eye, zero), torch.block_diag(zero, eye)
    mixing = torch.kron(W, models) + torch.kron(torch.eye(n, dtype=W.dtype), buffers)
    identity = torch.eye(2 * n * d, dtype=W.dtype)
    limit = torch.linalg.solve(identity - mixing @ torch.block_diag(*powers), mixing @ torch.cat(constants))
    return limit.reshape(n, 2, d)[:, 0]


@pytest.mark.parametrize(("steps", "lr", "momentum", "bias"), [(10, 0.005, 0.9, 0.58), (5, 0.01, 0.5, 0.25)])
def test_pdsgdm_stalls_exactly_at_its_biased_point(reference, steps, lr, momentum, bias):
    algorithm = PDSGDM(lr=lr, local_steps=steps, momentum=momentum)
    models = reference.run(algorithm, 300, RING)[-1]
    predicted = pdsgdm_limit(reference, torch.tensor(RING.dense()), lr, steps, momentum)
    assert (models - predicted).norm(dim=-1).max() < 1e-11
    assert (predicted.mean(0) - reference.optimum).norm() == pytest.approx(bias, abs=0.005)


def dsgt_limit(problem: Quadratics, W: torch.Tensor, lr: float, steps: int) -> torch.Tensor:
    """[n, d]: X = W (P X + q) - lr J G(X), P and q the local steps; trackers end at the mean gradient."""
    n, d = problem.b.shape
    eye = torch.eye(d, dtype=W.dtype)
    A, b = torch.block_diag(*problem.A), problem.b.flatten()
    P = torch.linalg.matrix_power(torch.eye(n * d, dtype=W.dtype) - lr * A, steps)
    mix, mean = torch.kron(W, eye), torch.kron(torch.full((n, n), 1 / n, dtype=W.dtype), eye)
    matrix = torch.eye(n * d, dtype=W.dtype) - mix @ P + lr * mean @ A
    return torch.linalg.solve(matrix, mix @ (b - P @ b) + lr * mean @ A @ b).reshape(n, d)


def test_dsgt_stalls_exactly_at_its_biased_point(reference):
    W = torch.tensor(RING.dense())
    predicted = dsgt_limit(reference, W, 0.01, 10)
    models = reference.run(DSGT(lr=0.01, local_steps=10), 400, RING)[-1]
    assert (models - predicted).norm(dim=-1).max() < 1e-11
    biases = [(dsgt_limit(reference, W, lr, 10).mean(0) - reference.optimum).norm() for lr in (0.01, 0.001)]
    assert biases == [pytest.approx(0.25, abs=0.005), pytest.approx(0.066, abs=0.001)]
    without_local_steps = dsgt_limit(reference, W, 0.01, 0)
    assert (without_local_steps - reference.optimum).norm(dim=-1).max() < 1e-12


def alike() -> Quadratics:
    """The same curvature everywhere, between MU and L: only the minimisers differ."""
    A = torch.diag(torch.tensor([MU, L], dtype=torch.float64))
    return Quadratics(A.expand(10, 2, 2).clone(), reference_quadratics(dim=2).b)


@pytest.mark.parametrize("algorithm", [GTSGD, NETFLEET, hf.GECL, hf.LocalGECL])
@pytest.mark.parametrize(("network", "limit"), [(COMPLETE, 1 / 2), (RING, 2 / 9)], ids=["complete", "ring"])
def test_combine_then_adapt_is_stable_up_to_a_known_step(algorithm, network, limit):
    """A mode w of W has (s - w)^2 + lr L (s - 1) = 0, which leaves the unit disc at lr L = (1 + w)^2 / 2."""
    assert limit == pytest.approx((1 + min(torch.linalg.eigvalsh(torch.tensor(network.dense())))) ** 2 / 2)
    below, _ = contraction(alike(), algorithm(lr=0.98 * limit / L), network)
    above, _ = contraction(alike(), algorithm(lr=1.02 * limit / L), network)
    assert below < 1 < above


def test_combine_then_adapt_on_a_complete_graph_has_the_predicted_radius():
    """The larger root of s^2 + a s - a, a = lr L, where steps are too long for w = 0."""
    a = 0.51
    radius, _ = contraction(alike(), GTSGD(lr=a / L), COMPLETE)
    assert radius == pytest.approx((a + math.sqrt(a**2 + 4 * a)) / 2, abs=1e-7)


@pytest.mark.parametrize("network", [COMPLETE, RING], ids=["complete", "ring"])
def test_adapt_then_combine_is_stable_up_to_the_step_of_gradient_descent(network):
    below, _ = contraction(alike(), GTSGD(lr=1.98 / L, order="atc"), network)
    above, _ = contraction(alike(), GTSGD(lr=2.02 / L, order="atc"), network)
    assert below < 1 < above
