"""Theorem 1: the tracker keeps the mean gradient, the method is exact, and its noise falls as 1/n."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from holdfast.algorithms import NETFLEET, Gossip
from holdfast.data import FederatedData
from holdfast.models import MODELS
from holdfast.problem.flat import FlatModel
from holdfast.problem.losses import LOSSES
from holdfast.problem.model_problem import ModelProblem
from holdfast.problem.optimum import known_optimum
from holdfast.topology import Network, build_network
from holdfast_papers.base import (
    Circumstances,
    Claim,
    Finding,
    Layout,
    Line,
    Panel,
    PaperExperiment,
    judged,
    judged_by_seeds,
)
from holdfast_papers.evidence import Evidence, TableRow, fitted_power, mean_text, scientific_text
from holdfast_papers.quadratics import visited

DIM, SAMPLES = 5, 40  # of the regression; samples of each node
SIZES = (4, 8, 16, 32, 64)
LR, STEPS = 0.02, 4
SETTLED, ROUNDS = 60, 200  # rounds until the floor is reached, and all rounds
SEEDS = (0, 1, 2, 3, 4)


def regression(nodes: int, seed: int, batch_size: int | None) -> ModelProblem:
    """Least squares whose nodes have different optima; minibatches are noise. float64.

    The optima lie in pairs on opposite sides, equally far out, so that noise does not depend on their number.
    """
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((nodes, SAMPLES, DIM))
    out = rng.standard_normal((nodes // 2, 1, DIM))
    out /= np.linalg.norm(out, axis=-1, keepdims=True)
    optima = 1 + np.concatenate([out, -out])
    y = (x * optima).sum(-1) + rng.standard_normal((nodes, SAMPLES))
    data = FederatedData(
        torch.from_numpy(x.reshape(-1, DIM)),
        torch.from_numpy(y.reshape(-1)),
        counts=np.full(nodes, SAMPLES),
    )
    model = MODELS.build("linear", {"bias": False, "zero": True}, input_shape=(DIM,), outputs=1)
    return ModelProblem(
        FlatModel(model, torch.device("cpu"), torch.float64),
        LOSSES.build("squared-error", {}),
        data,
        batch_size=batch_size,
        seed=seed,
    )


def graph(nodes: int, seed: int) -> Network:
    """The paper's: Erdős-Rényi with p_c = 0.5, W = I - 2 L / (3 lambda_max)."""
    return build_network("erdos-renyi", {"p": 0.5}, "laplacian", {}, nodes, seed)


def gradient_tracking(problem: ModelProblem, network: Network, lr: float, rounds: int) -> Iterator[Tensor]:
    """X at the start and after each round, with exact gradients: X' = W X - lr Y, Y' = W Y + G(X') - G(X)."""
    weights = torch.from_numpy(network.dense())
    nodes = torch.arange(network.nodes)
    x = problem.x0.expand(network.nodes, -1)
    g = y = problem.full_grads(x, nodes)
    yield x
    for _ in range(rounds):
        x = weights @ x - lr * y
        before, g = g, problem.full_grads(x, nodes)
        y = weights @ y + g - before
        yield x


def identities() -> list[TableRow]:
    """How far the mean tracker is from the mean gradient with noise, and K = 1 from gradient tracking."""
    network = graph(10, 0)
    drift = [
        float((s.state.y.mean(0) - s.state.g.mean(0)).abs().max())
        for s in visited(NETFLEET(lr=LR, local_steps=STEPS), regression(10, 0, batch_size=4), network, 50)
    ]
    problem = regression(10, 0, batch_size=None)
    one_step = visited(NETFLEET(lr=LR, local_steps=1), problem, network, 50)
    tracking = gradient_tracking(problem, network, LR, 50)
    apart = [float((a.models - x).abs().max()) for a, x in zip(one_step, tracking, strict=True)]
    return [
        {"what": "mean tracker - mean gradient", "value": max(drift)},
        {"what": "K = 1 - gradient tracking", "value": max(apart)},
    ]


def stationarity() -> list[TableRow]:
    """||grad f(average)||^2 + consensus error with exact gradients: NET-FLEET, and LD-SGD for comparison."""
    problem, network = regression(10, 0, batch_size=None), graph(10, 0)
    rows: list[TableRow] = []
    for name, method in (
        ("NET-FLEET", NETFLEET(lr=LR, local_steps=STEPS)),
        ("LD-SGD", Gossip(lr=LR, local_steps=STEPS)),
    ):
        for round, simulation in enumerate(visited(method, problem, network, 300)):
            if round % 5 == 0:
                average = simulation.models.mean(0)
                gradient = problem.global_value_and_grad(average)[1]
                apart = (simulation.models - average).square().sum(-1).mean()
                value = float(gradient.square().sum() + apart)
                rows.append({"what": f"{name}, exact gradients", "round": round, "stationarity": value})
    return rows


def noise_floors() -> list[TableRow]:
    """Mean of ||average - x*||^2 after the first rounds, at a fixed step, for more and more nodes."""
    rows: list[TableRow] = []
    for nodes in SIZES:
        for seed in SEEDS:
            problem = regression(nodes, seed, batch_size=4)
            best = known_optimum(problem).x
            method = NETFLEET(lr=LR, local_steps=STEPS)
            errors = [
                float((s.models.mean(0) - best).square().sum())
                for s in visited(method, problem, graph(nodes, seed), ROUNDS)
            ]
            floor = float(np.mean(errors[SETTLED:]))
            rows.append({"what": "noise floor", "n": nodes, "seed": seed, "floor": floor})
    floors = [row["floor"] for row in rows if row["n"] == SIZES[0]]
    ideal = float(np.mean(floors)) * SIZES[0]
    return rows + [{"what": "1/n", "n": nodes, "floor": ideal / nodes} for nodes in SIZES]


def computed(where: Circumstances) -> list[TableRow]:
    """The same at both scales: it takes seconds."""
    return identities() + stationarity() + noise_floors()


def slopes(e: Evidence) -> np.ndarray:
    """Of the logarithm of the noise floor against that of the number of nodes, [seeds]."""
    seeds = dict.fromkeys(e.column("seed", what="noise floor").tolist())
    floors = {seed: e.rows_where(what="noise floor", seed=seed) for seed in seeds}
    return np.array(
        [fitted_power([row["n"] for row in r], [row["floor"] for row in r]) for r in floors.values()]
    )


def linear_speedup(e: Evidence) -> Finding:
    found = slopes(e)
    ours = f"slope {mean_text(found)}, n = 4 to 64"
    return judged_by_seeds([0.3 - np.abs(found + 1)], ours, "between -1.3 and -0.7")


def _is_identity(e: Evidence, what: str) -> Finding:
    worst = float(e.column("value", what=what)[0])
    return judged(worst <= 1e-12, scientific_text([worst]), "at most 1e-12 in float64")


def keeps_mean(e: Evidence) -> Finding:
    return _is_identity(e, "mean tracker - mean gradient")


def is_tracking(e: Evidence) -> Finding:
    return _is_identity(e, "K = 1 - gradient tracking")


def becomes_stationary(e: Evidence) -> Finding:
    ours, theirs = (
        e.column("stationarity", what=f"{name}, exact gradients") for name in ("NET-FLEET", "LD-SGD")
    )
    text = f"{ours[-1]:.0e}, LD-SGD {theirs[-1]:.0e}"
    return judged(bool(ours[-1] <= 1e-12 and theirs[-1] > 1e-6), text, "at most 1e-12; LD-SGD above 1e-6")


THEOREM_1 = PaperExperiment(
    id="theorem-1",
    title="Theorem 1: exact with heterogeneous nodes, and n times less noise with n nodes",
    compute=computed,
    claims=[
        Claim("The mean of the trackers is the mean of the gradients, always", "identity", keeps_mean),
        Claim("With one step per round it is gradient tracking, combine then adapt", "identity", is_tracking),
        Claim(
            "With exact gradients it becomes stationary although the nodes are heterogeneous",
            "yes",
            becomes_stationary,
        ),
        Claim("Linear speed-up: at a fixed step the noise floor falls as 1/n", "slope -1", linear_speedup),
    ],
    layout=Layout(
        [
            Panel(
                "(a) noise floor at a fixed step",
                [Line("NET-FLEET, minibatches", "noise floor"), Line("1/n", "1/n")],
                x="n",
                y="floor",
                x_label="nodes n",
                y_label="mean of ‖average − x*‖²",
                log_x=True,
                log_y=True,
                by="what",
                slope=True,
            ),
            Panel(
                "(b) exact gradients, heterogeneous nodes",
                [
                    Line("NET-FLEET, exact", "NET-FLEET, exact gradients"),
                    Line("LD-SGD, exact", "LD-SGD, exact gradients"),
                ],
                x="round",
                y="stationarity",
                y_label="‖∇f‖² + consensus error",
                log_y=True,
                by="what",
            ),
        ],
        columns=2,
    ),
    note="Least squares in five dimensions on random graphs, five draws for each number of nodes.",
)
