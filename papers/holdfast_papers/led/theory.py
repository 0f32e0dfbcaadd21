"""LED on heterogeneous quadratics in float64: identities, exactness, local steps, sparse graphs, noise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from holdfast.algorithms import KGT, LED, VRLSGD, ExactDiffusion, Gossip
from holdfast.contract import Algorithm
from holdfast.core.randomness import Word
from holdfast.core.tree import leaves, tree_map
from holdfast.engines.common.simulation import Simulation
from holdfast.topology import Network, complete, ring, server
from holdfast_papers.base import Circumstances, Claim, Finding, Layout, Line, Panel, PaperExperiment, judged
from holdfast_papers.evidence import Evidence, TableRow, fitted_power, scientific_text
from holdfast_papers.quadratics import Quadratics, path

DIM, MU, L = 2, 0.5, 5.0
STEPS = 4  # K
SIZES = (8, 16, 32)  # nodes of the rings
LOCAL_STEPS = (1, 2, 4, 8)
GRID = tuple(np.geomspace(0.6, 0.0005, 30).tolist())  # step sizes that are tried, times K
TARGET = 1e-6


class Noisy(Quadratics):
    """Quadratics whose gradients have normal noise of this size; the draws continue from call to call."""

    def __init__(self, A: Tensor, b: Tensor, noise: float) -> None:
        super().__init__(A, b)
        self.noise, self.draw = noise, torch.Generator().manual_seed(0)

    def full_grads(self, x: Tensor, nodes: Tensor, round: Word = 0, step: Word = 0) -> Tensor:
        drawn = torch.randn(x.shape, generator=self.draw, dtype=x.dtype)
        return super().full_grads(x, nodes) + self.noise * drawn


def heterogeneous(nodes: int, noise: float = 0.0) -> Quadratics:
    """Each node has axes, curvatures from 0.5 to 5 and a minimiser of its own."""
    rng = np.random.default_rng(1)
    axes = np.linalg.qr(rng.standard_normal((nodes, DIM, DIM)))[0]
    matrices = np.einsum("nij,j,nkj->nik", axes, [MU, L], axes)
    A, b = torch.tensor(matrices), torch.tensor(3 * rng.standard_normal((nodes, DIM)))
    return Noisy(A, b, noise) if noise else Quadratics(A, b)


def rounds_needed(method: Algorithm, problem: Quadratics, network: Network) -> float:
    """Rounds that shrink the error by 1e-6, from the spectral radius of a round; infinite if it diverges.

    On quadratics a round is an affine map of the state; one round from every unit vector gives its matrix.
    The duals' sum is conserved: eigenvalues of one belong to it.
    """
    simulation = Simulation(method, problem, network)
    template = simulation.state
    sizes = [tensor.numel() for tensor in leaves(template)]

    def after_round(z: Tensor) -> Tensor:
        parts = iter(torch.split(z, sizes))
        simulation.state = tree_map(lambda like: next(parts).reshape(like.shape), template)
        simulation.step()
        return torch.cat([tensor.flatten() for tensor in leaves(simulation.state)])

    origin = after_round(torch.zeros(sum(sizes), dtype=torch.float64))
    matrix = torch.stack([after_round(unit) - origin for unit in torch.eye(sum(sizes)).double()], dim=1)
    values = torch.linalg.eigvals(matrix)
    radius = float(values[(values - 1).abs() > 1e-9].abs().max())
    return float(np.log(TARGET) / np.log(radius)) if radius < 1 else np.inf


def tuned(build: Callable[[float], Algorithm], problem: Quadratics, network: Network, steps: int) -> float:
    """The fewest rounds over the grid of step sizes; stops where smaller ones only get slower."""
    best = np.inf
    for lr in GRID:
        needed = rounds_needed(build(lr / steps), problem, network)
        if np.isfinite(best) and needed > 1.3 * best:
            break
        best = min(best, needed)
    return best


def identities() -> list[TableRow]:
    """How far LED is from the methods that the paper says it contains, over 40 rounds."""
    problem, on_ring, complete_graph = heterogeneous(10), Network.of(ring(10)), Network.of(complete(10))
    pairs = {
        "K = 1 - Exact Diffusion": (LED(lr=0.1), ExactDiffusion(lr=0.1), on_ring, on_ring),
        "complete graph - VRL-SGD": (
            LED(lr=0.03, local_steps=STEPS, share=1.0),
            VRLSGD(lr=0.03, local_steps=STEPS),
            complete_graph,
            server(10),
        ),
    }
    return [
        {
            "what": what,
            "value": float((path(a, problem, here, 40) - path(b, problem, there, 40)).abs().max()),
        }
        for what, (a, b, here, there) in pairs.items()
    ]


def exactness() -> list[TableRow]:
    """‖X - x*‖ with exact gradients on a ring: LED, and Gossip at the same step."""
    problem, network = heterogeneous(10), Network.of(ring(10))
    methods = {"LED": LED(lr=0.03, local_steps=STEPS), "Gossip": Gossip(lr=0.03, local_steps=STEPS)}
    return [
        {"what": name, "round": round, "error": float((models - problem.optimum).norm())}
        for name, method in methods.items()
        for round, models in enumerate(path(method, problem, network, 200))
        if round % 5 == 0
    ]


def rounds_by_nodes() -> list[TableRow]:
    """Rounds to 1e-6 on rings, step sizes tuned."""
    rows: list[TableRow] = []
    for nodes in SIZES:
        problem, network = heterogeneous(nodes), Network.of(ring(nodes))
        for name, build in (
            ("LED on rings", lambda lr: LED(lr=lr, local_steps=STEPS)),
            ("K-GT on rings", lambda lr: KGT(lr=lr, local_steps=STEPS)),
        ):
            rows.append({"what": name, "n": nodes, "rounds": tuned(build, problem, network, STEPS)})
    return rows


def rounds_by_local_steps() -> list[TableRow]:
    """Rounds to 1e-6 on a ring of 10, for more and more local steps, step sizes tuned."""
    problem, network = heterogeneous(10), Network.of(ring(10))
    rows: list[TableRow] = []
    for steps in LOCAL_STEPS:
        needed = tuned(partial(LED, local_steps=steps), problem, network, steps)
        rows.append({"what": "tuned for each K", "K": steps, "rounds": needed})
        fixed = rounds_needed(LED(lr=0.01, local_steps=steps), problem, network)
        rows.append({"what": "the same small step", "K": steps, "rounds": fixed})
    return rows


def noise_floors() -> list[TableRow]:
    """Mean squared error of the average and of single models once settled, gradients with noise 1."""
    network = Network.of(ring(10))
    rows: list[TableRow] = []
    for name, method in (
        ("LED, noise", LED(lr=0.004, local_steps=STEPS)),
        ("K-GT, noise", KGT(lr=0.004, local_steps=STEPS)),
    ):
        problem = heterogeneous(10, noise=1.0)
        settled = path(method, problem, network, 1500)[500:]
        of_models = float((settled - problem.optimum).square().sum(-1).mean())
        of_average = float((settled.mean(1) - problem.optimum).square().sum(-1).mean())
        rows.append({"what": name, "average": of_average, "models": of_models})
    return rows


def computed(where: Circumstances) -> list[TableRow]:
    """The same at both scales: it takes seconds."""
    return identities() + exactness() + rounds_by_nodes() + rounds_by_local_steps() + noise_floors()


def identity(what: str) -> Callable[[Evidence], Finding]:
    def check(e: Evidence) -> Finding:
        worst = float(e.column("value", what=what)[0])
        return judged(worst <= 1e-12, scientific_text([worst]), "at most 1e-12 in float64")

    return check


def is_exact(e: Evidence) -> Finding:
    ours, theirs = (float(e.column("error", what=name)[-1]) for name in ("LED", "Gossip"))
    holds = ours <= 1e-6 and theirs > 1e-2
    return judged(
        holds, f"{ours:.0e}, Gossip {theirs:.0e}", "at most 1e-6 after 200 rounds; Gossip above 1e-2"
    )


def local_steps_help(e: Evidence) -> Finding:
    rounds = e.column("rounds", what="the same small step")
    text = " → ".join(f"{value:.0f}" for value in rounds)
    return judged(bool(rounds[0] > 3 * rounds[-1]), f"{text} rounds for K = 1, 2, 4, 8", "K = 8: a third")


def tuned_steps_do_not(e: Evidence) -> Finding:
    rounds = e.column("rounds", what="tuned for each K")
    text = " → ".join(f"{value:.0f}" for value in rounds)
    return judged(
        bool(rounds.min() > 0.8 * rounds[0]), f"{text} rounds for K = 1, 2, 4, 8", "no K saves a fifth"
    )


def network_dependence(e: Evidence) -> Finding:
    led, kgt = (
        fitted_power(e.column("n", what=f"{name} on rings"), e.column("rounds", what=f"{name} on rings"))
        for name in ("LED", "K-GT")
    )
    return judged(led < kgt - 0.5, f"n^{led:.2f}, K-GT n^{kgt:.2f}, n = 8 to 32", "exponent smaller by 1/2")


def fewer_rounds(e: Evidence) -> Finding:
    led, kgt = (e.column("rounds", what=f"{name} on rings") for name in ("LED", "K-GT"))
    text = ", ".join(f"n = {n}: {a:.0f} against {b:.0f}" for n, a, b in zip(SIZES, led, kgt, strict=True))
    return judged(bool((led < kgt).all()), text, "fewer than K-GT on every ring, at half the bytes a round")


def equal_noise(e: Evidence) -> Finding:
    led, kgt = (float(e.column("average", what=f"{name}, noise")[0]) for name in ("LED", "K-GT"))
    return judged(0.9 <= led / kgt <= 1.1, f"{led:.2e}, K-GT {kgt:.2e}", "within a tenth of K-GT's")


def more_disagreement(e: Evidence) -> Finding:
    led, kgt = (float(e.column("models", what=f"{name}, noise")[0]) for name in ("LED", "K-GT"))
    return judged(led > 1.2 * kgt, f"{led:.2e}, K-GT {kgt:.2e}", "above K-GT's by a fifth or more")


THEORY = PaperExperiment(
    id="theory",
    title="What LED is, where it ends, and how it depends on local steps and on the graph",
    compute=computed,
    claims=[
        Claim("With one local step it is Exact Diffusion", "identity", identity("K = 1 - Exact Diffusion")),
        Claim(
            "Where everybody averages with everybody it is VRL-SGD",
            "identity",
            identity("complete graph - VRL-SGD"),
        ),
        Claim("With exact gradients it reaches the optimum of heterogeneous nodes", "yes", is_exact),
        Claim("At a fixed small step, local updates save communication", "fewer rounds", local_steps_help),
        Claim(
            "Its rate depends less on the graph than that of tracking with local steps",
            "improves on existing rates",
            network_dependence,
        ),
        Claim(
            "It needs fewer rounds than K-GT on every ring, step sizes tuned", "-", fewer_rounds, kind="ours"
        ),
        Claim(
            "Once the step is tuned for each K, local steps save nothing",
            "-",
            tuned_steps_do_not,
            kind="ours",
        ),
        Claim(
            "At equal steps the average of all models is as noisy as K-GT's", "-", equal_noise, kind="ours"
        ),
        Claim("Single models are noisier, as (I + W)/2 mixes less", "-", more_disagreement, kind="ours"),
    ],
    layout=Layout(
        [
            Panel(
                "(a) exact gradients, ring of 10",
                [Line("LED", "LED"), Line("Gossip", "Gossip")],
                x="round",
                y="error",
                y_label="‖X − x*‖",
                log_y=True,
                by="what",
            ),
            Panel(
                "(b) rounds to 10⁻⁶ on rings, tuned",
                [Line("LED", "LED on rings"), Line("K-GT", "K-GT on rings")],
                x="n",
                y="rounds",
                x_label="nodes n",
                y_label="rounds",
                log_x=True,
                log_y=True,
                by="what",
                slope=True,
            ),
            Panel(
                "(c) rounds to 10⁻⁶ with K local steps",
                [
                    Line("step 0.01", "the same small step"),
                    Line("tuned for each K", "tuned for each K"),
                ],
                x="K",
                y="rounds",
                x_label="local steps K",
                y_label="rounds",
                log_x=True,
                log_y=True,
                by="what",
            ),
        ],
        columns=3,
    ),
    note="Quadratics in two dimensions, Metropolis weights, (I + W)/2; rounds from the spectral radius.",
)
