"""Curvature and convexity, against Hessians that are formed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from convex_problems import digits, regression
from torch import nn

from holdfast.core.errors import HoldfastError
from holdfast.data.federated import FederatedData
from holdfast.problem.curvature import DENSE_DIMENSION, estimate_curvature, why_not_convex
from holdfast.problem.flat import FlatModel
from holdfast.problem.losses import CrossEntropy, Hinge, Logistic
from holdfast.problem.model_problem import ModelProblem
from holdfast.problem.problem import FunctionProblem


def test_curvature_of_quadratics_is_that_of_their_matrices(quadratics):
    found = estimate_curvature(FunctionProblem(quadratics.functions, quadratics.x0))
    assert found.mu == pytest.approx(0.5, rel=1e-12)
    assert pytest.approx(5.0, rel=1e-12) == found.L
    assert found.kappa == pytest.approx(10, rel=1e-12)
    assert not found.everywhere


def gram_eigenvalues(problem: ModelProblem) -> np.ndarray:
    """[n]: the largest of X_i^T X_i / N_i, the bias being one more column of ones."""
    source = problem.source
    x = (
        source.stored.x.numpy() / (255 if source.stored.x.dtype == torch.uint8 else 1) - source.mean
    ) / source.std
    parts = np.split(np.hstack([x, np.ones((len(x), 1))]), np.cumsum(source.counts.numpy())[:-1])
    return np.array([np.linalg.eigvalsh(part.T @ part / len(part))[-1] for part in parts])


@pytest.mark.parametrize("loss", [CrossEntropy(), Hinge(smoothing=0.25)], ids=["cross-entropy", "hinge"])
def test_curvature_bounds_every_hessian(loss):
    """Found by Lanczos' method, as there are 650 parameters: the loss's bound times the Gram matrix."""
    problem = digits(loss, counts=(60, 50, 40))
    assert problem.dim > DENSE_DIMENSION
    found = estimate_curvature(problem)
    assert found.mu == 0.01
    assert pytest.approx(0.01 + loss.curvature * gram_eigenvalues(problem).max(), rel=1e-6) == found.L
    assert found.everywhere
    x = torch.randn(3, 650, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    eigenvalues = torch.linalg.eigvalsh(problem.hessians(x, torch.arange(3)))
    assert eigenvalues.max() <= found.L
    assert eigenvalues.min() >= found.mu - 1e-12


def test_curvature_counts_the_weights_of_nodes():
    counts = (60, 50, 10)
    uniform, samples = digits(counts=counts), digits(weights="samples", counts=counts)
    scales = np.array(counts) / 40
    expected = 0.01 + 0.5 * (scales * gram_eigenvalues(uniform)).max()
    assert pytest.approx(expected, rel=1e-6) == estimate_curvature(samples).L


def test_curvature_of_least_squares_knows_mu_from_the_data():
    problem = regression(l2=0.1)
    eigenvalues = torch.linalg.eigvalsh(problem.hessians(problem.x0.expand(4, -1), torch.arange(4)))
    found = estimate_curvature(problem)
    assert found.mu == pytest.approx(float(eigenvalues.min()), rel=1e-12)
    assert pytest.approx(float(eigenvalues.max()), rel=1e-12) == found.L


def test_hessian_products_are_products_with_hessians():
    problem = digits(counts=(30, 20, 10))
    x, v = torch.randn(2, 3, 650, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = (problem.hessians(x, torch.arange(3)) @ v[..., None]).squeeze(-1)
    found = problem.hessian_products(x, v, torch.arange(3))
    assert (found - expected).abs().max() < 1e-12 * expected.abs().max()


def test_curvature_that_does_not_exist_or_cannot_be_found_says_so():
    with pytest.raises(HoldfastError, match="the exact hinge has kinks"):
        estimate_curvature(digits(Hinge()))
    many = FunctionProblem([lambda x: (x**2).sum()], torch.zeros(DENSE_DIMENSION + 1).double())
    with pytest.raises(HoldfastError, match=r"mu: .* 501: give it"):
        estimate_curvature(many)


def test_convexity_is_recognised():
    assert why_not_convex(digits()) is None
    assert why_not_convex(digits(module=nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 10)))) is not None
    binary = FederatedData(torch.randn(20, 5), torch.ones(20), np.array([20]))
    model = FlatModel(nn.Linear(5, 1), torch.device("cpu"), torch.float32)
    assert why_not_convex(ModelProblem(model, Logistic(), binary, batch_size=4, seed=0)) is None
