"""Which methods bear the noise of differential privacy: test accuracy against epsilon.

python benchmarks/private_utility.py [--seeds 0 1 2] [--epsilons 1 3 10] [--rounds 20]

Softmax regression on the digits of scikit-learn, at ten nodes with two shards of the sorted samples each,
so mostly two of the ten digits; five local steps on Poisson samples of 32 of a node's 142 on average. Each
method has the step size that is best for it at that epsilon on the first seed, from a grid; "inf" has neither
clipping nor noise. Accuracy is that of the average model after the last round. All have the same budget, so
a method that looks at its data more often in a round gets more noise.
"""

from __future__ import annotations

import argparse
import math
import os

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
RATES = [0.03, 0.1, 0.3, 1.0, 3.0]
SERVER = {
    "fedavg": lambda lr: hf.FedAvg(lr=lr, local_steps=STEPS),
    "scaffold": lambda lr: hf.SCAFFOLD(lr=lr, local_steps=STEPS),
    "fedlin": lambda lr: hf.FedLin(lr=lr, local_steps=STEPS),
}
RING = {
    "gossip": lambda lr: hf.Gossip(lr=lr, local_steps=STEPS),
    "local-gecl": lambda lr: hf.LocalGECL(lr=lr, local_steps=STEPS),
    "k-gt": lambda lr: hf.KGT(lr=lr, local_steps=STEPS),
    "led": lambda lr: hf.LED(lr=lr, local_steps=STEPS),
    "net-fleet": lambda lr: hf.NETFLEET(lr=lr, local_steps=STEPS),
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
        correct = 100 * float(self.problem.test(row, self.test)[0]) if row.isfinite().all() else 0.0
        return correct if math.isfinite(correct) else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epsilons", type=float, nargs="+", default=[10.0, 3.0, 1.0])
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    cases = [Case(seed) for seed in arguments.seeds]
    print("| epsilon | method | noise | lr | accuracy of each seed | mean |\n|---|---|---|---|---|---|")
    for epsilon in [math.inf, *arguments.epsilons]:
        for name, make in (SERVER | RING).items():
            network = hf.server(NODES) if name in SERVER else Network.of(hf.ring(NODES))
            noise = [
                None
                if epsilon == math.inf
                else case.multiplier(make(0.1), network, arguments.rounds, epsilon)
                for case in cases
            ]
            tried = {lr: cases[0].accuracy(make(lr), network, arguments.rounds, noise[0]) for lr in RATES}
            lr = max(RATES, key=lambda lr: tried[lr])
            others = [
                case.accuracy(make(lr), network, arguments.rounds, own)
                for case, own in zip(cases[1:], noise[1:], strict=True)
            ]
            found = [tried[lr], *others]
            shown = "none" if noise[0] is None else f"{np.mean(noise):.2f}"
            each = ", ".join(f"{accuracy:.1f}" for accuracy in found)
            print(f"| {epsilon:g} | {name} | {shown} | {lr:g} | {each} | {np.mean(found):.1f} |", flush=True)


if __name__ == "__main__":
    main()
