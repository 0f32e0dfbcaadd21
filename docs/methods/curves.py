"""Draws the curve of every method: python docs/methods/curves.py [NAME ...], a minute for all.

One problem for all: ten nodes with heterogeneous quadratics in ten dimensions, exact gradients, float64.
Their curvatures lie between mu = 0.1 and L = 1 and point in different directions; the optimum is a linear
solve. Methods for graphs run on a ring with Metropolis weights beside Gossip, the others with a server beside
FedAvg. What a curve ends at goes to figures/results.json, from which the pages quote.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from io import StringIO
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from holdfast.algorithms import ALGORITHMS
from holdfast.contract import Algorithm, Method, ServerAlgorithm
from holdfast.engines.common.simulation import Simulation
from holdfast.topology import Network, complete, ring, server
from holdfast_papers.dualfl.quadratics import Quadratics

HERE = Path(__file__).parent
FIGURES = HERE / "figures"
METHODS = tomllib.loads((HERE / "methods.toml").read_text(encoding="utf-8"))
BASELINES = [METHODS[name]["title"] for name in ("fedavg", "gossip")]
NODES, DIM, MU, L, ROUNDS = 10, 10, 0.1, 1.0, 300
FLOOR = 1e-14  # relative distances below are rounding
COLOURS = {"method": "#2f7fd1", "variant": "#2a9d6f", "baseline": "#e07b39"}
GREY = "#808080"  # readable on a light page and on a dark one


def problem() -> Quadratics:
    rng = np.random.default_rng(7)
    matrices = []
    for _ in range(NODES):
        basis, _ = np.linalg.qr(rng.standard_normal((DIM, DIM)))
        eigenvalues = np.exp(rng.uniform(np.log(MU), np.log(L), DIM))
        eigenvalues[0], eigenvalues[-1] = MU, L
        matrices.append(basis @ np.diag(eigenvalues) @ basis.T)
    minimisers = 3 * rng.standard_normal(DIM) + 1.5 * rng.standard_normal((NODES, DIM))
    return Quadratics(torch.tensor(np.array(matrices)), torch.tensor(minimisers))


def network(name: str, method: Algorithm | ServerAlgorithm[Any]) -> Network:
    if isinstance(method, ServerAlgorithm) or method.capabilities.topology == "server":
        return server(NODES)
    if name == "dspodfl":  # half of the nodes compute in one round of five, and half of the links are up
        busy = [1.0 if node % 2 else 0.2 for node in range(NODES)]
        return Network.of(complete(NODES)).sporadic(compute=busy, links=0.5)
    return Network.of(ring(NODES))


def path(method: Method, over: Network, personal: bool) -> Tensor:
    """The error after every round, over that of the start, [ROUNDS + 1].

    It is the nodes' mean distance to the optimum; with ``personal`` the mean of f_i above its minimum, at the
    nodes' own models.
    """
    quadratics = problem()
    run = Simulation(method, quadratics, over, seed=0)
    errors = []
    for done in range(ROUNDS + 1):
        if done:
            run.step()
        own = run.models if run.personal_models is None else run.personal_models
        if personal:
            errors.append(quadratics.values(own, torch.arange(NODES)).mean())
        else:
            errors.append((own - quadratics.optimum).norm(dim=-1).mean())
    values = torch.stack(errors)
    return (values / values[0]).clamp(min=FLOOR)


def draw(name: str, curves: dict[str, Tensor], personal: bool) -> None:
    figure = Figure(figsize=(5.6, 3.0), layout="constrained")
    axes = figure.subplots()
    for label, errors in curves.items():
        kind = (
            "method" if label == METHODS[name]["title"] else "baseline" if label in BASELINES else "variant"
        )
        axes.plot(errors.numpy(), label=label, color=COLOURS[kind], linewidth=1.8)
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.set_xlim(0, ROUNDS)
    axes.set_xlabel("rounds", color=GREY)
    axes.set_ylabel("own loss above its minimum" if personal else "distance to the optimum", color=GREY)
    axes.tick_params(colors=GREY, which="both")
    axes.grid(color=GREY, alpha=0.25, linewidth=0.6)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GREY)
    axes.legend(frameon=False, labelcolor=GREY, fontsize=9)
    text = StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    (FIGURES / f"{name}.svg").write_text(_shorter(text.getvalue()), encoding="utf-8")


def _shorter(svg: str) -> str:
    """Any sans-serif font will do, and a tenth of a point is enough for a path."""
    svg = re.sub(r"font-family: [^;\"]*", "font-family: sans-serif", svg).replace(" \n", "\n")
    return re.sub(r'(?<= d=")[^"]*', lambda path: re.sub(r"(\d\.\d)\d+", r"\1", path[0]), svg)


def computed(name: str, personal: bool) -> dict[str, Tensor]:
    """The curves of a method, its variants and its baseline, by label."""
    entry = METHODS[name]
    given: dict[str, dict[str, Any]] = {entry["title"]: {}, **entry.get("variants", {})}
    methods = {label: ALGORITHMS.build(name, entry["settings"] | changed) for label, changed in given.items()}
    over = network(name, methods[entry["title"]])
    rival = "fedavg" if over.is_server else "gossip"
    if name != rival:
        methods[METHODS[rival]["title"]] = ALGORITHMS.build(rival, METHODS[rival]["settings"])
    return {label: path(method, over, personal) for label, method in methods.items()}


def main() -> None:
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "holdfast", "path.simplify_threshold": 0.5}
    FIGURES.mkdir(exist_ok=True)
    record = FIGURES / "results.json"
    results = json.loads(record.read_text()) if record.exists() else {}
    if missing := set(sys.argv[1:]) - METHODS.keys():
        sys.exit(f"methods.toml has no table {', '.join(sorted(missing))}: write it first")
    for name in sys.argv[1:] or METHODS:
        personal = ALGORITHMS.describe(name)["family"] == "personalised"
        curves = computed(name, personal)
        draw(name, curves, personal)
        results[name] = {label: float(f"{errors[-1]:.2g}") for label, errors in curves.items()}
        print(name, results[name])
    record.write_text(json.dumps(dict(sorted(results.items())), indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
