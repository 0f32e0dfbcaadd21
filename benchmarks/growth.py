"""How the time of a round grows with nodes, local steps, parameters and links; writes a table and a figure.

python benchmarks/growth.py [--device cuda] [--output growth]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import networkx as nx
import torch
from matplotlib.figure import Figure
from workloads import METHODS, Workload, linear, make_problem, mlp, network_of, seconds

from holdfast.engines.common.simulation import Simulation
from holdfast.engines.simulate.choice import executor_for
from holdfast.topology import Network

SHORT_RUN = 1  # rounds to prepare for: recorded on a GPU, not compiled, which takes long for so many points


METHOD = "local-gecl"


def time_round(load: Workload, device: str, network: Network | None = None) -> float:
    """Milliseconds per round."""
    where = network or network_of(METHOD, load.nodes)
    executor = executor_for(torch.device(device))
    simulation = Simulation(METHODS[METHOD](load.steps), make_problem(load, device), where, executor=executor)
    simulation.prepare(SHORT_RUN)
    return 1e3 * seconds(simulation.step, device, 5)


def curves(device: str) -> dict[str, list[tuple[float, float]]]:
    """Points (size, milliseconds) for each thing that grows."""
    nodes = [10, 30, 100, 300, 1000, 3000, 10_000]
    steps = [1, 2, 4, 8, 16, 32, 64]
    hidden = [8, 32, 128, 512, 2048]
    graphs = [
        nx.cycle_graph(1000),
        *(nx.gnp_random_graph(1000, p, seed=0) for p in (0.01, 0.03, 0.1, 0.3, 1)),
    ]
    found: dict[str, list[tuple[float, float]]] = {}
    found["nodes"] = [(n, time_round(linear(n, steps=5), device)) for n in nodes]
    found["local steps"] = [(k, time_round(linear(100, steps=k), device)) for k in steps]
    found["parameters of a node"] = [
        (785 * h + 10 * h + 10, time_round(mlp(20, batch=32, steps=5, hidden=h), device)) for h in hidden
    ]
    found["links"] = [
        (g.number_of_edges(), time_round(linear(1000, batch=8, steps=1), device, network=Network.of(g)))
        for g in graphs
    ]
    return found


def draw(found: dict[str, list[tuple[float, float]]], device: str, path: Path) -> None:
    figure = Figure(figsize=(13, 3.4), layout="constrained")
    for axes, (what, points) in zip(figure.subplots(1, len(found)), found.items(), strict=True):
        sizes, times = zip(*points, strict=True)
        axes.loglog(sizes, times, "o-", color="#1f6f8b", label="measured")
        line = [times[-1] * size / sizes[-1] for size in sizes]
        axes.loglog(sizes, line, ":", color="0.6", label="linear")
        axes.set(xlabel=what, ylim=(min(times) / 2, 2 * max(times)))
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("ms per round")
    figure.axes[0].legend(frameon=False)
    figure.suptitle(f"Time of a round ({device})", fontsize=10)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=Path("growth"), help="without the ending")
    given = parser.parse_args()
    found = curves(given.device)
    for what, points in found.items():
        print(what, *(f"{size:,}: {ms:.3g} ms" for size, ms in points), sep="  ")
    given.output.with_suffix(".json").write_text(json.dumps(found, indent=2) + "\n")
    draw(found, given.device, given.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
