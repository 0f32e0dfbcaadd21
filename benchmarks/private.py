"""What privacy costs: a round of DP-SGD by 100 clients, stacked, against a loop over clients with Opacus.

python benchmarks/private.py [--device cuda] [--models linear cnn] [--clients 10] [--rounds 20]

All clients take K private steps of SGD on Poisson samples of mean size B of the same random images, clipped
sample by sample and noised, and are averaged (FedAvg). Opacus does so as its users write it: a model, an
optimizer and a loader of each client made private once (``make_private``), then client after client. Of its
loop ``--clients`` are timed, and scaled to all. The third column is the same round of ours without privacy:
minibatches of B drawn with replacement.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from copy import deepcopy

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from workloads import Workload, cnn, linear, make_problem, seconds, synchronize

import holdfast as hf
from holdfast.engines.simulate.choice import executor_for
from holdfast.problem.model_problem import ModelProblem
from holdfast.problem.private import Release, counted_noise

CLIP, NOISE, LR = 1.0, 1.1, 0.01


def ours(load: Workload, device: str, private: bool, rounds: int) -> tuple[float, str]:
    """Seconds of a round, the median of ``rounds``, and how it is run."""
    problem = make_problem(load, device, sampling="poisson" if private else "replacement")
    if private:
        problem = problem.protected(Release(CLIP, NOISE, counted_noise(0)))
    method = hf.FedAvg(lr=LR, local_steps=load.steps)
    executor = executor_for(problem.x0.device)
    simulation = hf.Simulation(method, problem, hf.server(load.nodes), executor=executor)
    how = simulation.prepare(10**6)  # as long a run as it takes to have rounds compiled
    for _ in range(3):
        simulation.step()
    return seconds(simulation.step, device, rounds), how


def by_opacus(load: Workload, device: str, clients: int) -> Callable[[], None]:
    """A round of ``clients`` of them, with Opacus."""
    from opacus import PrivacyEngine

    problem: ModelProblem = make_problem(load, "cpu")
    x = (problem.source.stored.x.float() / 255 - 0.5) / 0.5
    x, y = x.to(device), problem.source.stored.y.to(device)
    server = deepcopy(problem.model.template).to(device)
    own = []
    for node in range(clients):
        rows = slice(node * load.samples_per_node, (node + 1) * load.samples_per_node)
        model = deepcopy(server)
        loader = DataLoader(TensorDataset(x[rows], y[rows]), batch_size=load.batch)
        own.append(
            PrivacyEngine().make_private(
                module=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=LR),
                data_loader=loader,
                noise_multiplier=NOISE,
                max_grad_norm=CLIP,
            )
        )

    def round() -> None:
        total = [torch.zeros_like(p) for p in server.parameters()]
        for model, optimizer, loader in own:
            with torch.no_grad():
                for mine, common in zip(model.parameters(), server.parameters(), strict=True):
                    mine.copy_(common)
            for _, (inputs, labels) in zip(range(load.steps), loader, strict=False):
                optimizer.zero_grad()
                functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
            for sum_, p in zip(total, model.parameters(), strict=True):
                sum_ += p.detach()
        with torch.no_grad():
            for p, sum_ in zip(server.parameters(), total, strict=True):
                p.copy_(sum_ / clients)

    return round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", nargs="+", default=["linear", "cnn"])
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--without-opacus", action="store_true")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    device = arguments.device
    print(f"torch {torch.__version__}, {device}")
    for name in arguments.models:
        load = {"linear": linear, "cnn": cnn}[name](arguments.nodes)
        begun = time.perf_counter()
        private, how = ours(load, device, True, arguments.rounds)
        plain, _ = ours(load, device, False, arguments.rounds)
        print(
            f"{load.title}: private {1e3 * private:.2f} ms a round, not private {1e3 * plain:.2f} ms, ",
            end="",
        )
        print(f"{private / plain:.2f} times as long ({how})", flush=True)
        if not arguments.without_opacus:
            clients = min(arguments.clients, load.nodes)
            round = by_opacus(load, device, clients)
            theirs = seconds(round, device, 3) * load.nodes / clients
            print(f"  Opacus in a loop {1e3 * theirs:.0f} ms: {theirs / private:.0f} times as long as ours")
        synchronize(device)
        print(f"  measured in {time.perf_counter() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
