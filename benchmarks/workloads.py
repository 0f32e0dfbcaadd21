"""What the speed benchmarks run: models, sizes, methods, and the loop over clients they are compared with.

The data are random images of the right shape: only the time matters.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import holdfast as hf
from holdfast.contract import Method
from holdfast.core.precision import Precision, compute_in
from holdfast.engines.common.simulation import Executor, Simulation
from holdfast.models import MODELS
from holdfast.problem.flat import FlatModel
from holdfast.problem.gradients.backend import BackendName
from holdfast.problem.losses import CrossEntropy
from holdfast.problem.model_problem import ModelProblem
from holdfast.problem.sampling import SamplingName
from holdfast.topology import Network


@dataclass(frozen=True)
class Workload:
    """n nodes that take K local steps on batches of B samples in every round."""

    model: str
    nodes: int
    batch: int
    steps: int
    options: dict = field(default_factory=dict)
    shape: tuple[int, ...] = (1, 28, 28)

    @property
    def title(self) -> str:
        return f"{self.model} n={self.nodes} B={self.batch} K={self.steps}"

    @property
    def samples_per_node(self) -> int:
        return 500 if self.nodes <= 100 else 50


def linear(nodes: int, batch: int = 32, steps: int = 10) -> Workload:
    return Workload("linear", nodes, batch, steps)


def mlp(nodes: int, batch: int = 128, steps: int = 16, hidden: int = 500) -> Workload:
    return Workload("mlp", nodes, batch, steps, {"hidden": [hidden]})


def cnn(nodes: int, batch: int = 32, steps: int = 10) -> Workload:
    return Workload("netfleet-cnn", nodes, batch, steps)


def lenet(nodes: int, batch: int = 32, steps: int = 10) -> Workload:
    return Workload("lenet", nodes, batch, steps, {}, (3, 32, 32))


METHODS: dict[str, Callable[[int], Method]] = {
    "fedavg": lambda steps: hf.FedAvg(lr=0.01, local_steps=steps),
    "scaffold": lambda steps: hf.SCAFFOLD(lr=0.01, local_steps=steps),
    "local-gecl": lambda steps: hf.LocalGECL(lr=0.01, local_steps=steps),
    "net-fleet": lambda steps: hf.NETFLEET(lr=0.01, local_steps=steps),
}


def network_of(method: str, nodes: int) -> Network:
    """A server for the methods that want one, otherwise a ring."""
    return hf.server(nodes) if method in ("fedavg", "scaffold") else Network.of(hf.ring(nodes))


def make_problem(
    load: Workload,
    device: str,
    precision: Precision = "tf32",
    backend: BackendName = "auto",
    sampling: SamplingName = "replacement",
) -> ModelProblem:
    rng = torch.Generator().manual_seed(0)
    total = load.nodes * load.samples_per_node
    x = torch.randint(0, 256, (total, *load.shape), dtype=torch.uint8, generator=rng)
    y = torch.randint(0, 10, (total,), generator=rng)
    data = hf.FederatedData(x, y, np.full(load.nodes, load.samples_per_node))
    torch.manual_seed(0)
    model = MODELS.build(load.model, load.options, input_shape=load.shape, outputs=10)
    flat = FlatModel(model, torch.device(device), torch.float32, compute_in(precision))
    options = {"batch_size": load.batch, "sampling": sampling, "mean": 0.5, "std": 0.5}
    return ModelProblem(flat, CrossEntropy(), data, seed=0, backend=backend, **options)


def make_simulation(
    load: Workload,
    method: str,
    device: str,
    precision: Precision = "tf32",
    executor: Executor | None = None,
    backend: BackendName = "auto",
) -> Simulation:
    problem = make_problem(load, device, precision, backend)
    network = network_of(method, load.nodes)
    return Simulation(METHODS[method](load.steps), problem, network, executor=executor)


def plain_loop(load: Workload, problem: ModelProblem, clients: int) -> Callable[[], None]:
    """FedAvg as a researcher writes it: for every client, K steps of an optimizer; then average."""
    device = problem.x0.device
    server = deepcopy(problem.model.template).to(device)
    client = deepcopy(server)
    x = problem.source.stored.x.view(load.nodes, load.samples_per_node, *load.shape)
    y = problem.source.stored.y.view(load.nodes, load.samples_per_node)

    def round() -> None:
        total = [torch.zeros_like(p) for p in server.parameters()]
        for node in range(clients):
            client.load_state_dict(server.state_dict())
            optimizer = torch.optim.SGD(client.parameters(), lr=0.01)
            for _ in range(load.steps):
                picks = torch.randint(load.samples_per_node, (load.batch,), device=device)
                inputs = (x[node][picks].float() / 255 - 0.5) / 0.5
                optimizer.zero_grad()
                functional.cross_entropy(client(inputs), y[node][picks]).backward()
                optimizer.step()
            for sum_, p in zip(total, client.parameters(), strict=True):
                sum_ += p.detach()
        with torch.no_grad():
            for p, sum_ in zip(server.parameters(), total, strict=True):
                p.copy_(sum_ / clients)

    return round


def seconds(step: Callable[[], object], device: str, repeats: int) -> float:
    """Median time of one call, the device's queue emptied before and after."""
    step()
    times = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        step()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def round_flops(load: Workload, problem: ModelProblem) -> float:
    """Floating-point operations of all nodes' gradients in a round, counted by torch for one node's."""
    first = torch.zeros(1, dtype=torch.int64, device=problem.x0.device)
    with FlopCounterMode(display=False) as counter:
        problem.minibatch_values_and_grads([problem.x0[None]], first, 0, 0)
    return float(counter.get_total_flops()) * load.nodes * load.steps


def round_bytes(load: Workload, problem: ModelProblem) -> float:
    """The least traffic with memory: per step, rows read by the model; gradients written; both read and rows
    written by the update; and activations written and read once."""
    rows = 5 * problem.dim * 4
    activations = 2 * problem.activations.of_sample * load.batch
    return float((rows + activations) * load.nodes * load.steps)


def device_rates(device: str, precision: Precision) -> tuple[float, float]:
    """(FLOP/s of a large product in that precision; bytes/s of a copy, read and written)."""
    kind = compute_in(precision) or torch.float32
    size, numbers = (8192, 2**28) if device.startswith("cuda") else (2048, 2**25)
    matrix = torch.randn(size, size, device=device).to(kind)
    source = torch.randn(numbers, device=device)
    target = torch.empty_like(source)
    product = seconds(lambda: matrix @ matrix, device, 5)
    copy = seconds(lambda: target.copy_(source), device, 5)
    return 2 * size**3 / product, 8 * numbers / copy
