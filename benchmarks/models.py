"""Models that users bring: time per round, over that of a plain loop over clients in the same run.

20 nodes, Local G-ECL on a ring, batches of 32 samples, 5 local steps. ``first call`` is the time until the
first round is done: tracing, compiling and recording; run twice, the second finds compiled kernels on disk.

python benchmarks/models.py [--device cuda] [--models lstm ...] [--backends stacked loop] [--profile]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from workloads import seconds, synchronize

import holdfast as hf
from holdfast.engines.common.simulation import Simulation
from holdfast.engines.simulate.choice import executor_for
from holdfast.topology import Network

NODES, BATCH, STEPS, SAMPLES, CLASSES = 20, 32, 5, 200, 10
LONG_RUN = 10**4  # rounds to prepare for: compiling pays


class Block(nn.Module):
    """Two convolutions with GroupNorm beside a shortcut."""

    def __init__(self, planes: int, out: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(planes, out, 3, stride, 1, bias=False),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
        )
        self.norms = nn.ModuleList([nn.GroupNorm(8, out), nn.GroupNorm(8, out)])
        same = planes == out and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(planes, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.norms[0](self.first(x)))
        return functional.relu(self.norms[1](self.second(inner)) + self.shortcut(x))


def resnet8() -> nn.Module:
    """He et al. (2016) for CIFAR, with one block for each of three widths."""
    start = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.GroupNorm(8, 16), nn.ReLU()]
    blocks = [Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)]
    return nn.Sequential(*start, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))


class Transformer(nn.Module):
    """Two layers on 32 tokens, and a class for the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.score = nn.Linear(64, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.score(self.body(self.embed(tokens)).mean(1))


class Recurrent(nn.Module):
    """An LSTM with 64 units on 32 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.read = nn.Embedding(1000, 32), nn.LSTM(32, 64, batch_first=True)
        self.score = nn.Linear(64, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.score(self.read(self.embed(tokens))[0][:, -1])


def frozen_body() -> nn.Module:
    """ResNet-8 of which only the last layer trains."""
    model = resnet8().requires_grad_(False)
    model[-1].requires_grad_(True)
    return model


def images(draw: torch.Generator) -> Tensor:
    return torch.randn(SAMPLES, 3, 32, 32, generator=draw)


def tokens(draw: torch.Generator) -> Tensor:
    return torch.randint(1000, (SAMPLES, 32), generator=draw)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Tensor]]] = {
    "resnet8": (resnet8, images),
    "transformer": (Transformer, tokens),
    "lstm": (Recurrent, tokens),
    "frozen": (frozen_body, images),
}


def plain_loop(model: nn.Module, data: list[Any], device: str) -> Callable[[], None]:
    """FedAvg as a researcher writes it."""
    server = deepcopy(model).to(device)
    client = deepcopy(server)
    there = [(x.to(device), y.to(device)) for x, y in data]

    def round() -> None:
        total = [torch.zeros_like(p) for p in server.parameters() if p.requires_grad]
        for x, y in there:
            client.load_state_dict(server.state_dict())
            own = [p for p in client.parameters() if p.requires_grad]
            optimizer = torch.optim.SGD(own, lr=0.01)
            for _ in range(STEPS):
                picks = torch.randint(SAMPLES, (BATCH,), device=device)
                optimizer.zero_grad()
                functional.cross_entropy(client(x[picks]), y[picks]).backward()
                optimizer.step()
            for sum_, p in zip(total, own, strict=True):
                sum_ += p.detach()
        with torch.no_grad():
            trained = [p for p in server.parameters() if p.requires_grad]
            for p, sum_ in zip(trained, total, strict=True):
                p.copy_(sum_ / len(there))

    return round


def measure(name: str, backend: str, given: argparse.Namespace) -> None:
    make, samples = MODELS[name]
    torch.manual_seed(0)
    model, draw = make(), torch.Generator().manual_seed(0)
    data = [(samples(draw), torch.randint(CLASSES, (SAMPLES,), generator=draw)) for _ in range(NODES)]
    loop = seconds(plain_loop(model, data, given.device), given.device, 2)
    begun = time.perf_counter()
    options = {"batch_size": BATCH, "device": given.device, "backend": backend}
    problem = hf.build_problem(model, hf.FederatedData.of_nodes(data), **options)
    problem.check_model()
    checked = time.perf_counter()
    network, executor = Network.of(hf.ring(NODES)), executor_for(torch.device(given.device))
    simulation = Simulation(
        hf.LocalGECL(lr=0.01, local_steps=STEPS), problem, network, seed=0, executor=executor
    )
    note = simulation.prepare(given.prepare_for)
    simulation.step()
    synchronize(given.device)
    first = time.perf_counter() - begun
    ours = seconds(simulation.step, given.device, given.rounds)
    print(
        f"{name:12} {loop / ours:7.2f} {1e3 * loop:9.1f} {1e3 * ours:9.2f} {first:11.1f} "
        f"{checked - begun:7.1f}  {note}; {problem.description}",
        flush=True,
    )
    if given.profile:
        kinds = [torch.profiler.ProfilerActivity.CPU]
        kinds += [torch.profiler.ProfilerActivity.CUDA] if given.device != "cpu" else []
        with torch.profiler.profile(activities=kinds) as profile:
            simulation.step()
            synchronize(given.device)
        by = "self_cuda_time_total" if given.device != "cpu" else "self_cpu_time_total"
        print(profile.key_averages().table(sort_by=by, row_limit=30, max_name_column_width=70))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5, help="of which the median time is taken")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--backends", nargs="+", default=["auto"])
    parser.add_argument("--prepare-for", type=int, default=LONG_RUN, help="rounds; few: nothing is compiled")
    parser.add_argument("--profile", action="store_true", help="where the time of a round goes")
    given = parser.parse_args()
    columns = f"{'loop/ours':>7} {'loop ms':>9} {'ours ms':>9} {'first call':>11} {'checks':>7}"
    print(f"{'model':10} {columns}")
    for name in given.models:
        for backend in given.backends:
            measure(name, backend, given)


if __name__ == "__main__":
    main()
