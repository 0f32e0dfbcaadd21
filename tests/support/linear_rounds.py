"""A round is an affine map of the state on quadratics; its matrix tells how fast a method contracts."""

from __future__ import annotations

import numpy as np
import torch
from conftest import Quadratics
from torch import Tensor

from holdfast.api import as_network
from holdfast.core.tree import leaves, tree_map
from holdfast.engines.common.simulation import Simulation

MU, L = 0.5, 5.0


def reference_quadratics(dim: int, nodes: int = 10) -> Quadratics:
    """The problem whose contraction factors and biases are known from an independent implementation."""
    rng = np.random.default_rng(1)
    matrices = []
    for _ in range(nodes):
        basis, _ = np.linalg.qr(rng.standard_normal((dim, dim)))
        eigenvalues = np.exp(rng.uniform(np.log(MU), np.log(L), dim))
        eigenvalues[:2] = MU, L
        matrices.append(basis @ np.diag(eigenvalues) @ basis.T)
    minimisers = 3 * rng.standard_normal((nodes, dim))
    return Quadratics(torch.tensor(np.array(matrices)), torch.tensor(minimisers))


def round_matrix(problem: Quadratics, algorithm, topology=None) -> Tensor:
    """M of the round z -> M z + c, z being all numbers of the state: one round from every unit vector."""
    simulation = Simulation(algorithm, problem, as_network(topology, problem.nodes))
    template = simulation.state

    def after_round(z: Tensor) -> Tensor:
        parts = iter(z.clone().split([tensor.numel() for tensor in leaves(template)]))
        simulation.state = tree_map(lambda like: next(parts).reshape(like.shape), template)
        simulation.step()
        return flat(simulation.state)

    origin = after_round(torch.zeros_like(flat(template)))
    units = torch.eye(len(origin), dtype=origin.dtype)
    return torch.stack([after_round(unit) - origin for unit in units], dim=1)


def flat(state) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in leaves(state)])


def contraction(problem: Quadratics, algorithm, topology=None) -> tuple[float, int]:
    """Spectral radius of a round without the eigenvalues 1 of conserved sums, and the number of those."""
    values = torch.linalg.eigvals(round_matrix(problem, algorithm, topology))
    conserved = (values - 1).abs() < 1e-7
    return float(values[~conserved].abs().max()), int(conserved.sum())


def measured_decay(problem: Quadratics, path: Tensor) -> float:
    """Factor per round of the mean model's distance to the optimum: a fit until it meets rounding errors."""
    errors = (path.mean(1) - problem.optimum).norm(dim=-1).numpy()
    last = int(np.argmax(errors < 1e-11)) or len(errors)
    settled = np.arange(last // 3, last)
    slope, _ = np.polyfit(settled, np.log(errors[settled]), 1)
    return float(np.exp(slope))


def limit(problem: Quadratics, algorithm, topology=None, cycle=1, doublings=12, **options) -> Tensor:
    """Where all nodes' models end, [n, d], after ``cycle`` rounds that are repeated 2**doublings times.

    ``options`` are those of ``Simulation``. The rounds are one affine map, whose power is taken.
    """
    simulation = Simulation(algorithm, problem, as_network(topology, problem.nodes), **options)
    template, start = simulation.state, flat(simulation.state)

    def put(z: Tensor) -> None:
        parts = iter(z.clone().split([tensor.numel() for tensor in leaves(template)]))
        simulation.state, simulation.round = (
            tree_map(lambda like: next(parts).reshape(like.shape), template),
            0,
        )

    def after(z: Tensor) -> Tensor:
        put(z)
        for _ in range(cycle):
            simulation.step()
        return flat(simulation.state)

    size = len(start)
    affine = torch.zeros(size + 1, size + 1, dtype=start.dtype)
    affine[-1, -1], affine[:-1, -1] = 1.0, after(torch.zeros_like(start))
    for i, unit in enumerate(torch.eye(size, dtype=start.dtype)):
        affine[:-1, i] = after(unit) - affine[:-1, -1]
    for _ in range(doublings):
        affine = affine @ affine
    put((affine @ torch.cat([start, start.new_ones(1)]))[:-1])
    return simulation.models
