"""Time per round: a plain loop over clients, the stacked simulator, and our executor; ratios in one run.

    python benchmarks/speed.py [--device cuda] [--rounds 20] [--output table.json]

The data are random images of the right shape: only the time matters here.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

import holdfast as hf
from holdfast.algorithms.base import Method
from holdfast.api import as_network
from holdfast.engines.simulate.captured import CapturedSimulation
from holdfast.engines.simulate.simulation import Simulation
from holdfast.models import MODELS
from holdfast.objective.flat import FlatModel
from holdfast.objective.losses import CrossEntropy
from holdfast.objective.model_objective import ModelObjective

SAMPLES_PER_NODE = 500


@dataclass(frozen=True)
class Workload:
    model: str
    options: dict
    shape: tuple[int, ...]
    nodes: int
    batch: int
    steps: int

    @property
    def title(self) -> str:
        return f"{self.model} n={self.nodes} B={self.batch} K={self.steps}"


LINEAR = ("linear", {}, (1, 28, 28))
MLP = ("mlp", {"hidden": [500]}, (1, 28, 28))
CNN = ("netfleet-cnn", {}, (1, 28, 28))
LENET = ("lenet", {}, (3, 32, 32))
TARGETS = [
    Workload(*LINEAR, 100, 32, 10),
    Workload(*MLP, 10, 128, 16),
    Workload(*MLP, 100, 128, 16),
    Workload(*CNN, 50, 32, 5),
    Workload(*CNN, 100, 32, 10),
]
METHODS: dict[str, Callable[[int], Method]] = {
    "fedavg": lambda steps: hf.FedAvg(lr=0.01, local_steps=steps),
    "scaffold": lambda steps: hf.SCAFFOLD(lr=0.01, local_steps=steps),
    "local-gecl": lambda steps: hf.LocalGECL(lr=0.01, local_steps=steps),
    "net-fleet": lambda steps: hf.NETFLEET(lr=0.01, local_steps=steps),
}


def make_objective(load: Workload, device: str) -> ModelObjective:
    rng = np.random.default_rng(0)
    total = load.nodes * SAMPLES_PER_NODE
    x = rng.integers(0, 256, (total, *load.shape), dtype=np.uint8)
    y = rng.integers(0, 10, total)
    data = hf.FederatedData(torch.as_tensor(x), torch.as_tensor(y), np.full(load.nodes, SAMPLES_PER_NODE))
    torch.manual_seed(0)
    model = MODELS.build(load.model, load.options, input_shape=load.shape, outputs=10)
    flat = FlatModel(model, torch.device(device), torch.float32)
    return ModelObjective(flat, CrossEntropy(), data, batch_size=load.batch, seed=0, mean=0.5, std=0.5)


def plain_loop(load: Workload, objective: ModelObjective) -> Callable[[], None]:
    """FedAvg as a researcher writes it: for every client, K steps of an optimizer; then average."""
    device = objective.x0.device
    server = deepcopy(objective.model.template).to(device)
    client = deepcopy(server)
    x = objective.x.view(load.nodes, SAMPLES_PER_NODE, *load.shape)
    y = objective.y.view(load.nodes, SAMPLES_PER_NODE)

    def round() -> None:
        total = [torch.zeros_like(p) for p in server.parameters()]
        for node in range(load.nodes):
            client.load_state_dict(server.state_dict())
            optimizer = torch.optim.SGD(client.parameters(), lr=0.01)
            for _ in range(load.steps):
                picks = torch.randint(SAMPLES_PER_NODE, (load.batch,), device=device)
                inputs = (x[node][picks].float() / 255 - 0.5) / 0.5
                optimizer.zero_grad()
                functional.cross_entropy(client(inputs), y[node][picks]).backward()
                optimizer.step()
            for sum_, p in zip(total, client.parameters(), strict=True):
                sum_ += p.detach()
        with torch.no_grad():
            for p, sum_ in zip(server.parameters(), total, strict=True):
                p.copy_(sum_ / load.nodes)

    return round


def seconds(step: Callable[[], object], device: str, repeats: int) -> float:
    """Median time of one call, the device's queue emptied before and after."""
    step()
    times = []
    for _ in range(repeats):
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


@dataclass(frozen=True)
class Result:
    workload: str
    method: str
    loop_ms: float
    stacked_ms: float
    ours_ms: float
    note: str
    peak_mib: float

    @property
    def ratio(self) -> float:
        return self.loop_ms / self.ours_ms


def measure(load: Workload, method_name: str, device: str, rounds: int, loop_s: float) -> Result:
    make = METHODS[method_name]
    network = None if method_name in ("fedavg", "scaffold") else hf.ring(load.nodes)
    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    eager = Simulation(make(load.steps), make_objective(load, device), as_network(network, load.nodes))
    stacked = seconds(eager.step, device, max(3, rounds // 4))
    del eager
    note, ours, peak = "stacked", stacked, 0.0
    if cuda:
        simulation = CapturedSimulation(
            make(load.steps), make_objective(load, device), as_network(network, load.nodes)
        )
        note = simulation.prepare(rounds=10**6)
        ours = seconds(simulation.step, device, rounds)
        peak = torch.cuda.max_memory_allocated() / 2**20
    return Result(load.title, method_name, 1e3 * loop_s, 1e3 * stacked, 1e3 * ours, note, peak)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--methods", nargs="+", default=["fedavg", "local-gecl"], choices=METHODS)
    given = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    results = []
    print(f"{'workload':32} {'method':12} {'loop/ours':>9} {'loop ms':>9} {'stacked ms':>10} {'ours ms':>9}")
    for load in TARGETS:
        objective = make_objective(load, given.device)
        loop_s = seconds(plain_loop(load, objective), given.device, 3)
        for name in given.methods:
            result = measure(load, name, given.device, given.rounds, loop_s)
            results.append({**asdict(result), "ratio": result.ratio})
            print(
                f"{load.title:32} {name:12} {result.ratio:9.1f} {result.loop_ms:9.2f} "
                f"{result.stacked_ms:10.2f} {result.ours_ms:9.3f}  {result.note}",
                flush=True,
            )
    if given.output:
        given.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
