"""Which methods bear the noise of differential privacy: test accuracy against epsilon.

    python benchmarks/private_utility.py --out private-utility.png [--seeds 0 1 2] [--epsilons 10 3 1]

Softmax regression on the digits of scikit-learn, at ten nodes with two shards of the sorted samples each,
so mostly two of the ten digits; five local steps on Poisson samples of 32 of a node's 142 on average. Each
method has the step size that is best for it at that epsilon on the first seed, from a grid that is widened as
long as the best is at its edge; "inf" has neither clipping nor noise. Accuracy is that of the average model
after the last round. All have the same budget, so a method that looks at its data more often in a round gets
more noise. Takes ten minutes on two cores. Figures already in the JSON file beside the image are kept.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch

import holdfast as hf
from holdfast.data import DATASETS
from holdfast.data.samples import Pair
from holdfast.engines.common.dry_run import planned_accesses
from holdfast.engines.common.simulation import Simulation
from holdfast.models import MODELS
from holdfast.privacy import DP, protection
from holdfast.problem.flat import FlatModel
from holdfast.problem.losses import CrossEntropy
from holdfast.problem.model_problem import ModelProblem
from holdfast.problem.private import Release, counted_noise
from holdfast.topology import Network

NODES, STEPS, BATCH, CLIP, DELTA = 10, 5, 32, 1.0, 1e-4
SHARDS = hf.Shards(per_node=2, size=71)
EXPONENTS = range(-2, 2)  # of the grid to begin with: step sizes 0.1, 0.3, 1 and 3
SERVER = {
    "FedAvg": lambda lr: hf.FedAvg(lr=lr, local_steps=STEPS),
    "SCAFFOLD": lambda lr: hf.SCAFFOLD(lr=lr, local_steps=STEPS),
    "FedLin": lambda lr: hf.FedLin(lr=lr, local_steps=STEPS),
}
RING = {
    "Gossip": lambda lr: hf.Gossip(lr=lr, local_steps=STEPS),
    "Local G-ECL": lambda lr: hf.LocalGECL(lr=lr, local_steps=STEPS),
    "K-GT": lambda lr: hf.KGT(lr=lr, local_steps=STEPS),
    "LED": lambda lr: hf.LED(lr=lr, local_steps=STEPS),
    "NET-FLEET": lambda lr: hf.NETFLEET(lr=lr, local_steps=STEPS),
}


class Case:
    """The digits at ten nodes, drawn from ``seed``."""

    def __init__(self, seed: int) -> None:
        self.digits, self.seed = DATASETS.build("digits", {}), seed
        data = hf.partition(self.digits.x_train, self.digits.y_train, SHARDS, nodes=NODES, seed=seed)
        torch.manual_seed(seed)
        model = MODELS.build("linear", {}, input_shape=self.digits.input_shape, outputs=10)
        flat = FlatModel(model, torch.device("cpu"), torch.float32)
        options = {"batch_size": BATCH, "sampling": "poisson"}
        self.problem = ModelProblem(flat, CrossEntropy(), data, seed=seed, **options)
        self.counts = np.asarray(data.counts)
        self.test = self.problem.test_set(Pair(self.digits.x_test, self.digits.y_test))

    def multiplier(self, method: object, network: Network, rounds: int, epsilon: float) -> float:
        """The noise with which all rounds stay within ``epsilon``."""
        planned = planned_accesses(method, network, "all", rounds, self.seed)
        budget = DP(epsilon=epsilon, delta=DELTA, clip=CLIP)
        return protection(budget, planned, self.counts, BATCH).multiplier

    def accuracy(self, method: object, network: Network, rounds: int, multiplier: float | None) -> float:
        """Of the average model on the test set, in per cent; 0 if it diverged."""
        problem = self.problem
        if multiplier is not None:
            problem = problem.protected(Release(CLIP, multiplier, counted_noise(self.seed)))
        run = Simulation(method, problem, network, seed=self.seed)
        for _ in range(rounds):
            run.step()
        row = run.models.mean(0, keepdim=True)
        correct = 100 * float(self.problem.tester.test(row, self.test)[0]) if row.isfinite().all() else 0.0
        return correct if math.isfinite(correct) else 0.0


class Results:
    """Accuracies by case, written down as they come."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}

    def get(self, key: str, compute: Callable[[], float]) -> float:
        if key not in self.known:
            self.known[key] = compute()
            self.path.write_text(json.dumps(self.known, indent=0))
        return self.known[key]


def step_size(exponent: int) -> float:
    """..., 0.1, 0.3, 1, 3, 10, ..."""
    return float(f"{10.0 ** (exponent / 2):.0e}")


def tuned(accuracy: Callable[[float], float]) -> float:
    """The step size with the best ``accuracy``; the grid is widened until that is inside."""
    found = {k: accuracy(step_size(k)) for k in EXPONENTS}
    while True:
        best = max(found, key=lambda k: found[k])
        beyond = {min(found): min(found) - 1, max(found): max(found) + 1}.get(best)
        if beyond is None:
            return step_size(best)
        found[beyond] = accuracy(step_size(beyond))


def measured(
    name: str, epsilon: float, cases: list[Case], rounds: int, results: Results
) -> tuple[float | None, float, list[float]]:
    """The noise multiplier, the step size, and the accuracy of every seed."""
    make: Any = (SERVER | RING)[name]
    network = hf.server(NODES) if name in SERVER else Network.of(hf.ring(NODES))
    noise = None
    if epsilon < math.inf:  # partitions are of equal sizes, so it is that of every seed
        key = f"noise {name} {epsilon:g} {rounds}"
        noise = results.get(key, lambda: cases[0].multiplier(make(0.1), network, rounds, epsilon))

    def accuracy(case: Case, lr: float) -> float:
        key = f"{name} {epsilon:g} {rounds} {lr:g} {case.seed}"
        return results.get(key, lambda: case.accuracy(make(lr), network, rounds, noise))

    lr = tuned(lambda lr: accuracy(cases[0], lr))
    return noise, lr, [accuracy(case, lr) for case in cases]


def draw(found: dict[str, dict[float, list[float]]], out: Path) -> None:
    """Accuracy against epsilon, a curve for each method; no privacy is at the right."""
    epsilons = sorted(next(iter(found.values())))
    places = {epsilon: i for i, epsilon in enumerate(epsilons)}
    figure, panels = plt.subplots(1, 2, figsize=(10, 4.4), sharey=True)
    for axes, (title, names) in zip(
        panels, {"with a server": SERVER, "on a ring": RING}.items(), strict=True
    ):
        for i, name in enumerate(names):
            values = found[name]
            x = [places[epsilon] + 0.05 * (i - len(names) / 2 + 0.5) for epsilon in epsilons]
            y = [mean(values[epsilon]) for epsilon in epsilons]
            (line,) = axes.plot(x, y, marker="o", markersize=4, label=name)
            for at, epsilon in zip(x, epsilons, strict=True):
                ends = min(values[epsilon]), max(values[epsilon])
                axes.plot([at, at], ends, color=line.get_color(), linewidth=1, alpha=0.5)
        labels = ["no privacy" if epsilon == math.inf else f"{epsilon:g}" for epsilon in epsilons]
        axes.set_xticks(range(len(epsilons)), labels)
        axes.set_xlabel("epsilon")
        axes.set_title(title, fontsize=10)
        axes.grid(axis="y", alpha=0.3)
        axes.legend(frameon=False, fontsize=9, loc="lower right")
    panels[0].set_ylabel("test accuracy, %")
    figure.tight_layout()
    figure.savefig(out, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epsilons", type=float, nargs="+", default=[10.0, 3.0, 1.0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("private-utility.png"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cases, results = [Case(seed) for seed in arguments.seeds], Results(arguments.out.with_suffix(".json"))
    found: dict[str, dict[float, list[float]]] = {name: {} for name in SERVER | RING}
    print("| epsilon | method | noise | lr | accuracy of each seed | mean |\n|---|---|---|---|---|---|")
    for epsilon in [math.inf, *arguments.epsilons]:
        for name in SERVER | RING:
            noise, lr, values = measured(name, epsilon, cases, arguments.rounds, results)
            found[name][epsilon] = values
            shown = "none" if noise is None else f"{noise:.2f}"
            each = ", ".join(f"{value:.1f}" for value in values)
            print(f"| {epsilon:g} | {name} | {shown} | {lr:g} | {each} | {mean(values):.1f} |", flush=True)
    draw(found, arguments.out)


if __name__ == "__main__":
    main()
