"""Which method, which graph: every exact method with its step size tuned, at three levels of heterogeneity.

python benchmarks/which.py [--data digits] [--model linear] [--nodes 16] [--rounds 60] [--output which.jsonl]
python benchmarks/which.py --data mnist --data-dir DATA --device cuda --model mlp --values 0.03 0.1 0.3
python benchmarks/which.py --table which.jsonl                      # the tables of docs/which.md

Every method takes K local steps a round; ``hf.tune`` finds its step size on a grid that widens itself, by the
nodes' mean test accuracy at the end. The best one is run again with another seed, and measured every other
round. The target is half a point below what the best of all methods with a server, or of all on graphs, ends
with. The table says after how many rounds, and with how many megabytes in all, a method first reached it.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import holdfast as hf
from holdfast.contract import Method

LEVELS = {"mild": 10.0, "medium": 0.5, "strong": 0.1}
STEPS, BATCH, BELOW = 8, 32, 0.005

Build = Callable[[float], Method]
SERVER: dict[str, Build] = {
    "fedavg": lambda lr: hf.FedAvg(lr, STEPS),
    "scaffold": lambda lr: hf.SCAFFOLD(lr, STEPS),
    "vrl-sgd": lambda lr: hf.VRLSGD(lr, STEPS),
    "fedlin": lambda lr: hf.FedLin(lr, STEPS),
    "feddyn": lambda lr: hf.FedDyn(lr=lr, local_steps=STEPS, alpha=1 / (lr * STEPS)),
    "fedpd": lambda lr: hf.FedPD(lr=lr, local_steps=STEPS, eta=lr * STEPS, solver="sgd"),
    "local-gecl-server": lambda lr: hf.LocalGECLServer(lr, STEPS),
}
GRAPH: dict[str, Build] = {
    "gossip": lambda lr: hf.Gossip(lr, STEPS),
    "led, share 0.9": lambda lr: hf.LED(lr, STEPS, share=0.9),
    "led": lambda lr: hf.LED(lr, STEPS),
    "k-gt": lambda lr: hf.KGT(lr, STEPS),
    "local-gecl": lambda lr: hf.LocalGECL(lr, STEPS),
    "d-scaffold": lambda lr: hf.DSCAFFOLD(lr, STEPS),
    "net-fleet": lambda lr: hf.NETFLEET(lr, STEPS),
}
OTHER_GRAPHS = {
    "torus": [
        "gossip",
        "led",
        "k-gt",
    ],  # Metropolis weights there have eigenvalues that share 0.9 does not bear
    "exponential": ["gossip", "led", "k-gt"],
    "equi-dynamic": ["gossip", "k-gt"],
}


def cases(levels: list[str]) -> Iterator[tuple[str, str, str, Build]]:
    for level in levels:
        yield from ((level, "server", name, build) for name, build in SERVER.items())
        yield from ((level, "ring", name, build) for name, build in GRAPH.items())
    for graph, names in OTHER_GRAPHS.items():
        yield from (("strong", graph, name, GRAPH[name]) for name in names)


def measure(given: argparse.Namespace, level: str, topology: str, build: Build) -> dict[str, Any]:
    options: dict[str, Any] = {
        "model": {"name": given.model},
        "data": given.data,
        "data_dir": given.data_dir,
        "nodes": given.nodes,
        "partition": hf.Dirichlet(LEVELS[level]),
        "topology": topology,
        "rounds": given.rounds,
        "batch_size": BATCH,
        "device": given.device,
        "progress": False,
    }
    quick = {"metrics": ("test_accuracy",), "evaluate_every": given.rounds}
    tuned = hf.tune(build, values=given.values, widen=2, seeds=[0], **options, **quick)
    options |= {"metrics": ("test_accuracy",), "evaluate_every": 2}
    begun = time.perf_counter()
    history = hf.train(tuned.best, seed=1, **options).history
    return {
        "lr": tuned.best_value,
        "on_edge": tuned.on_edge,
        "rounds": history["round"],
        "accuracy": history["test_accuracy"],
        "bytes": history["payload_bytes"],
        "gradients": history["gradient_evaluations"][-1],
        "seconds": time.perf_counter() - begun,
    }


def run(given: argparse.Namespace) -> None:
    done = set()
    if given.output.exists():
        done = {tuple(row["case"]) for row in map(json.loads, given.output.read_text().splitlines())}
    begun = time.perf_counter()
    for level, topology, name, build in cases(given.levels):
        case = [given.data, given.model, level, topology, name]
        if tuple(case) in done or time.perf_counter() - begun > given.limit:
            continue
        row = {"case": case, "nodes": given.nodes} | measure(given, level, topology, build)
        with given.output.open("a") as file:
            file.write(json.dumps(row) + "\n")
        last = row["accuracy"][-1]
        print(
            f"{' '.join(case):50} lr {row['lr']:<7g} {100 * last:5.1f} %  {row['seconds']:.1f} s", flush=True
        )


def table(path: Path) -> None:
    """Accuracy at the end / rounds / megabytes to the target, a line for each method and network."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for data, model in sorted({tuple(row["case"][:2]) for row in rows}):
        here = [row for row in rows if row["case"][:2] == [data, model]]
        print(f"\n{data}, {model}, {here[0]['nodes']} nodes: accuracy / rounds / MB to the target\n")
        print(f"| network | method | {' | '.join(LEVELS)} |\n|---|---|{'---|' * len(LEVELS)}")
        for topology, name in dict.fromkeys((row["case"][3], row["case"][4]) for row in here):
            cells = [_cell(here, level, topology, name) for level in LEVELS]
            print(f"| {topology} | {name} | {' | '.join(cells)} |")


def _cell(rows: list[dict[str, Any]], level: str, topology: str, name: str) -> str:
    family = [row for row in rows if row["case"][2] == level and _kind(row["case"][3]) == _kind(topology)]
    own = [row for row in family if row["case"][3:] == [topology, name]]
    if not own:
        return ""
    target = max(row["accuracy"][-1] for row in family) - BELOW
    [row] = own
    reached = [i for i, accuracy in enumerate(row["accuracy"]) if accuracy >= target]
    costs = f"{row['rounds'][reached[0]]} / {row['bytes'][reached[0]] / 1e6:.1f}" if reached else "–"
    return f"{100 * row['accuracy'][-1]:.1f} / {costs}"


def _kind(topology: str) -> str:
    return "server" if topology == "server" else "graph"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="digits")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--model", default="linear")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--levels", nargs="+", default=list(LEVELS), choices=LEVELS)
    parser.add_argument("--values", type=float, nargs="+", default=[0.2, 0.8, 3.2], help="first step sizes")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which none is begun")
    parser.add_argument("--output", type=Path, default=Path("which.jsonl"))
    parser.add_argument("--table", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    if given.table:
        table(given.table)
    else:
        run(given)


if __name__ == "__main__":
    main()
