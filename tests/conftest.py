"""Problems that the mathematical tests share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

import holdfast.engines.deploy  # noqa: F401 - before any test imports gRPC, which it has to configure
from holdfast.api import as_network
from holdfast.engines.simulate.simulation import Simulation


@dataclass(frozen=True)
class Quadratics:
    """f_i(x) = (1/2) (x - b_i)^T A_i (x - b_i): unlike curvatures and unlike minimisers."""

    A: Tensor  # [n, d, d]
    b: Tensor  # [n, d]

    l1 = 0.0
    smooth = True

    @property
    def nodes(self) -> int:
        return len(self.A)

    @property
    def dim(self) -> int:
        return self.b.shape[-1]

    @property
    def functions(self) -> list:
        return [lambda x, A=A, b=b: 0.5 * (x - b) @ A @ (x - b) for A, b in zip(self.A, self.b, strict=True)]

    @property
    def x0(self) -> Tensor:
        return torch.zeros(self.dim, dtype=torch.float64)

    @property
    def optimum(self) -> Tensor:
        return torch.linalg.solve(self.A.sum(0), (self.A @ self.b[..., None]).sum(0)).squeeze(-1)

    def grads(self, x: Tensor) -> Tensor:
        """[n, d]: every node's gradient at its own row of ``x``."""
        return self.full_grads(x, torch.arange(self.nodes))

    # --- the same as an Objective: all nodes in one product, for long runs ---------------------------------

    def minibatch_grads(self, points, nodes, round, step) -> list[Tensor]:
        return [self.full_grads(x, nodes) for x in points]

    def full_grads(self, x: Tensor, nodes: Tensor) -> Tensor:
        return (self.A[nodes] @ (x - self.b[nodes])[..., None]).squeeze(-1)

    def values(self, x: Tensor, nodes: Tensor) -> Tensor:
        return 0.5 * ((x - self.b[nodes]) * self.full_grads(x, nodes)).sum(-1)

    def hessians(self, x: Tensor, nodes: Tensor) -> Tensor:
        return self.A[nodes]

    def hessian_products(self, x: Tensor, v: Tensor, nodes: Tensor) -> Tensor:
        return (self.A[nodes] @ v[..., None]).squeeze(-1)

    def samples_per_minibatch(self, nodes: Tensor) -> int:
        return len(nodes)

    def samples(self, nodes: Tensor) -> int:
        return len(nodes)

    def global_value(self, x: Tensor) -> Tensor:
        return self.values(x.expand(self.nodes, -1), torch.arange(self.nodes)).mean()

    def run(self, algorithm, rounds: int, topology=None, cohort_size=None) -> Tensor:
        """[rounds + 1, n, d]: every node's model after every round."""
        network = as_network(topology, self.nodes)
        simulation = Simulation(algorithm, self, network, seed=3, cohort_size=cohort_size)
        path = [simulation.models.clone()]
        for _ in range(rounds):
            simulation.step()
            path.append(simulation.models.clone())
        return torch.stack(path)


def make_quadratics(
    nodes: int = 10, dim: int = 4, mu: float = 0.5, L: float = 5.0, seed: int = 1
) -> Quadratics:
    rng = np.random.default_rng(seed)
    matrices, minimisers = [], []
    for _ in range(nodes):
        basis, _ = np.linalg.qr(rng.standard_normal((dim, dim)))
        eigenvalues = np.exp(rng.uniform(np.log(mu), np.log(L), dim))
        eigenvalues[0], eigenvalues[-1] = mu, L
        matrices.append(basis @ np.diag(eigenvalues) @ basis.T)
        minimisers.append(3 * rng.standard_normal(dim))
    return Quadratics(torch.tensor(np.array(matrices)), torch.tensor(np.array(minimisers)))


@pytest.fixture(scope="session")
def quadratics() -> Quadratics:
    return make_quadratics()
