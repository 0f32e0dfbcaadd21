"""Which method, which graph: every exact method with its step size tuned, at three levels of heterogeneity.

python benchmarks/which.py [--data digits] [--model linear] [--nodes 16] [--rounds 60] [--output which.jsonl]
python benchmarks/which.py --data mnist fashion-mnist --data-dir DATA --device cuda --part 0/12
python benchmarks/which.py --table which*.jsonl                     # the tables of docs/which.md

Every method takes K local steps a round; those that have but one take K times as many rounds, so that all
compute as many gradients. ``hf.tune`` finds the step size on a grid that widens itself, by the nodes' mean
test accuracy at the end with seed 0. The best one is run again with other seeds, which also divide the data
anew, and measured 50 times. The target is half a point below what the best of all methods with K steps ends
with, servers and graphs apart, as a mean over seeds. The table says when that mean first reached it: rounds,
megabytes that all have sent, and seconds over links of 10 Mbit/s with a delay of 50 ms, without computing.
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
LATENCY, BANDWIDTH = 0.05, 1.25e6  # seconds for one way, bytes a second of one link
MEASURED = 50  # times in a run

Build = Callable[[float], Method]
SERVER: dict[str, Build] = {
    "fedavg": lambda lr: hf.FedAvg(lr, STEPS),
    "scaffold": lambda lr: hf.SCAFFOLD(lr, STEPS),
    "vrl-sgd": lambda lr: hf.VRLSGD(lr, STEPS),
    "fedlin": lambda lr: hf.FedLin(lr, STEPS),
    "feddyn": lambda lr: hf.FedDyn(lr=lr, local_steps=STEPS, alpha=1 / (lr * STEPS)),
    "fedpd": lambda lr: hf.FedPD(lr=lr, local_steps=STEPS, eta=lr * STEPS, solver="sgd"),
    "local-gecl-server": lambda lr: hf.LocalGECLServer(lr, STEPS),
    "scaffnew": lambda lr: hf.Scaffnew(lr, 1 / STEPS),
    "fedavg, 1 step": lambda lr: hf.FedAvg(lr, 1),
}
GRAPH: dict[str, Build] = {
    "gossip": lambda lr: hf.Gossip(lr, STEPS),
    "led, share 0.9": lambda lr: hf.LED(lr, STEPS, share=0.9),
    "led": lambda lr: hf.LED(lr, STEPS),
    "k-gt": lambda lr: hf.KGT(lr, STEPS),
    "local-gecl": lambda lr: hf.LocalGECL(lr, STEPS),
    "d-scaffold": lambda lr: hf.DSCAFFOLD(lr, STEPS),
    "net-fleet": lambda lr: hf.NETFLEET(lr, STEPS),
    "d-scaffnew": lambda lr: hf.DScaffnew(lr, 1 / STEPS),
    "exact-diffusion": lambda lr: hf.ExactDiffusion(lr),
    "gt-sgd": lambda lr: hf.GTSGD(lr),
}
ONE_STEP = {"fedavg, 1 step", "exact-diffusion", "gt-sgd"}
OTHER_GRAPHS = {
    "torus": [
        "gossip",
        "led",
        "k-gt",
    ],  # Metropolis weights there have eigenvalues that share 0.9 does not bear
    "exponential": ["gossip", "led", "k-gt"],
    "equi-dynamic": ["gossip", "k-gt"],
}


def cases(given: argparse.Namespace) -> Iterator[tuple[str, str, str, str, Build]]:
    for level in given.levels:
        for data in given.data:
            yield from ((data, level, "server", name, build) for name, build in SERVER.items())
            yield from ((data, level, "ring", name, build) for name, build in GRAPH.items())
            for graph, names in OTHER_GRAPHS.items() if level == "strong" else ():
                yield from ((data, level, graph, name, GRAPH[name]) for name in names)


def measure(
    given: argparse.Namespace, data: str, level: str, topology: str, name: str, build: Build
) -> dict[str, Any]:
    rounds = given.rounds * (STEPS if name in ONE_STEP else 1)
    options: dict[str, Any] = {
        "model": {"name": given.model},
        "data": data,
        "data_dir": given.data_dir,
        "nodes": given.nodes,
        "partition": hf.Dirichlet(LEVELS[level]),
        "topology": topology,
        "rounds": rounds,
        "batch_size": BATCH,
        "device": given.device,
        "metrics": ("test_accuracy",),
        "progress": False,
    }
    tuned = hf.tune(build, values=given.values, widen=2, seeds=[0], evaluate_every=rounds, **options)
    begun, every = time.perf_counter(), max(1, rounds // MEASURED)
    runs = [hf.train(tuned.best, seed=seed, evaluate_every=every, **options).history for seed in given.seeds]
    return {
        "lr": tuned.best_value,
        "on_edge": tuned.on_edge,
        "rounds": runs[0]["round"],
        "accuracy": [run["test_accuracy"] for run in runs],
        "bytes": runs[0]["payload_bytes"],
        "gradients": runs[0]["gradient_evaluations"],
        "seconds": time.perf_counter() - begun,
    }


def run(given: argparse.Namespace) -> None:
    done = set()
    if given.output.exists():
        done = {tuple(row["case"]) for row in map(json.loads, given.output.read_text().splitlines())}
    part, parts = map(int, given.part.split("/"))
    begun = time.perf_counter()
    for data, level, topology, name, build in list(cases(given))[part::parts]:
        case = [data, given.model, level, topology, name]
        if tuple(case) in done or time.perf_counter() - begun > given.limit:
            continue
        row = {"case": case, "nodes": given.nodes} | measure(given, data, level, topology, name, build)
        with given.output.open("a") as file:
            file.write(json.dumps(row) + "\n")
        ends = " ".join(f"{100 * accuracy[-1]:5.1f}" for accuracy in row["accuracy"])
        passed = time.perf_counter() - begun
        print(f"{' '.join(case):50} lr {row['lr']:<7g} {ends} %  {passed:.0f} s", flush=True)


def table(paths: list[Path]) -> None:
    """Accuracy at the end and what it took to come to the target, a line for each method and network."""
    rows = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    order = [("server", name) for name in SERVER] + [("ring", name) for name in GRAPH]
    order += [(graph, name) for graph, names in OTHER_GRAPHS.items() for name in names]
    for data, model in sorted({tuple(row["case"][:2]) for row in rows}):
        here = [row for row in rows if row["case"][:2] == [data, model]]
        print(
            f"\n{data}, {model}, {here[0]['nodes']} nodes: accuracy / rounds / MB / seconds to the target\n"
        )
        print(f"| network | method | {' | '.join(LEVELS)} |\n|---|---|{'---|' * len(LEVELS)}")
        for topology, name in order:
            cells = [_cell(here, level, topology, name) for level in LEVELS]
            if any(cells):
                print(f"| {topology} | {name} | {' | '.join(cells)} |")


def _cell(rows: list[dict[str, Any]], level: str, topology: str, name: str) -> str:
    family = [row for row in rows if row["case"][2] == level and _kind(row["case"][3]) == _kind(topology)]
    own = [row for row in family if row["case"][3:] == [topology, name]]
    if not own:
        return ""
    target = max(_mean(row)[-1] for row in family if row["case"][4] not in ONE_STEP) - BELOW
    [row] = own
    ends = [100 * accuracy[-1] for accuracy in row["accuracy"]]
    text = f"{sum(ends) / len(ends):.1f} ± {(max(ends) - min(ends)) / 2:.1f}"
    reached = [i for i, accuracy in enumerate(_mean(row)) if accuracy >= target]
    if not reached:
        return f"{text} / –"
    rounds, sent = row["rounds"][reached[0]], row["bytes"][reached[0]]
    return f"{text} / {rounds} / {sent / 1e6:.1f} / {_seconds(row, rounds, sent):.0f}"


def _mean(row: dict[str, Any]) -> list[float]:
    """The accuracy, as a mean over seeds, at each measurement."""
    return [sum(values) / len(values) for values in zip(*row["accuracy"], strict=True)]


def _seconds(row: dict[str, Any], rounds: int, sent: float) -> float:
    """Every node has one link, over which all that it sends goes; a server's answer is a second way."""
    ways = 2 if row["case"][3] == "server" else 1
    return ways * LATENCY * rounds + sent / row["nodes"] / BANDWIDTH


def _kind(topology: str) -> str:
    return "server" if topology == "server" else "graph"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", nargs="+", default=["digits"])
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--model", default="linear")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--levels", nargs="+", default=list(LEVELS), choices=LEVELS)
    parser.add_argument("--values", type=float, nargs="+", default=[0.2, 0.8, 3.2], help="first step sizes")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--part", default="0/1", help="i/n: every n-th case from the i-th on")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which none is begun")
    parser.add_argument("--output", type=Path, default=Path("which.jsonl"))
    parser.add_argument("--table", type=Path, nargs="+")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    if given.table:
        table(given.table)
    else:
        run(given)


if __name__ == "__main__":
    main()
