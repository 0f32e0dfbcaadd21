"""A round of FedAvg by other simulators that are installed: pfl, and flwr with its simulation extra.

python benchmarks/others.py [--device cuda] [--models linear mlp] [--rounds 3]

Each is run for one round and for a few more; the difference is the time of a round without its start.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import logging
import math
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from workloads import Workload, linear, make_problem, make_simulation, mlp, plain_loop, seconds

from holdfast.engines.simulate.executors.rules import executor_for

LR = 0.01
WORKLOADS = {"linear": linear(100), "mlp": mlp(10)}


class Client(nn.Module):
    """A model with the loss that pfl asks its models for."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def loss(self, x: Tensor, y: Tensor, **_: Any) -> Tensor:
        return functional.cross_entropy(self.module((x.float() / 255 - 0.5) / 0.5), y)

    def metrics(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {}


def by_pfl(load: Workload, module: nn.Module, x: Tensor, y: Tensor, device: str) -> Callable[[int], None]:
    """``rounds`` rounds by pfl's simulator in this process; it picks the device by itself."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    nodes = range(load.nodes)
    users = {node: Dataset((x[node], y[node]), user_id=str(node)) for node in nodes}

    def run(rounds: int) -> None:
        client = Client(module).to(device)
        model = PyTorchModel(client, torch.optim.SGD, torch.optim.SGD(client.parameters(), lr=1.0))
        turns = iter(list(nodes) * (rounds + 1))
        backend = SimulatedBackend(
            training_data=FederatedDataset(users.__getitem__, turns.__next__), val_data=None
        )
        FederatedAveraging().run(
            NNAlgorithmParams(
                central_num_iterations=rounds,
                evaluation_frequency=10**9,
                train_cohort_size=load.nodes,
                val_cohort_size=None,
            ),
            backend,
            model,
            NNTrainHyperParams(
                local_num_epochs=None,
                local_num_steps=load.steps,
                local_learning_rate=LR,
                local_batch_size=load.batch,
            ),
            None,
            callbacks=[],
        )

    return run


def by_flwr(load: Workload, module: nn.Module, x: Tensor, y: Tensor, device: str) -> Callable[[int], None]:
    """``rounds`` rounds by flwr's simulator, with one process of ray for every core."""
    from flwr.client import ClientApp, NumPyClient
    from flwr.common import Context
    from flwr.server import ServerApp, ServerAppComponents, ServerConfig
    from flwr.server.strategy import FedAvg
    from flwr.simulation import run_simulation

    samples, labels = x.numpy(), y.numpy()

    class Trainer(NumPyClient):
        def __init__(self, node: int) -> None:
            self.x, self.y = torch.tensor(samples[node]), torch.tensor(labels[node])

        def fit(self, parameters: list[np.ndarray], config: Any) -> tuple[list[np.ndarray], int, dict]:
            torch.set_num_threads(1)
            with torch.no_grad():
                for p, value in zip(module.parameters(), parameters, strict=True):
                    p.copy_(torch.as_tensor(value))
            optimizer = torch.optim.SGD(module.parameters(), lr=LR)
            for _ in range(load.steps):
                picks = torch.randint(len(self.y), (load.batch,))
                inputs = (self.x[picks].float() / 255 - 0.5) / 0.5
                optimizer.zero_grad()
                functional.cross_entropy(module(inputs), self.y[picks]).backward()
                optimizer.step()
            return [p.detach().numpy() for p in module.parameters()], len(self.y), {}

    def client(context: Context) -> Any:
        return Trainer(int(context.node_config["partition-id"])).to_client()

    def run(rounds: int) -> None:
        def server(context: Context) -> ServerAppComponents:
            strategy = FedAvg(fraction_fit=1.0, fraction_evaluate=0.0, min_available_clients=load.nodes)
            return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=rounds))

        run_simulation(
            ServerApp(server_fn=server),
            ClientApp(client_fn=client),
            num_supernodes=load.nodes,
            backend_config={
                "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
                "init_args": {"log_to_driver": False},
            },
        )

    return run


OTHERS = {"pfl": by_pfl, "flwr": by_flwr}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--rounds", type=int, default=3, help="more than one, of which the mean is taken")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    print(f"{'workload':24} {'simulator':10} {'ms a round':>11} {'over ours':>10}")
    for load in [WORKLOADS[name] for name in given.models]:
        problem = make_problem(load, given.device)
        x = problem.source.stored.x.view(load.nodes, load.samples_per_node, *load.shape)
        y = problem.source.stored.y.view(load.nodes, load.samples_per_node)
        executor = executor_for(problem.x0.device)
        simulation = make_simulation(load, "fedavg", given.device, executor=executor)
        simulation.prepare(10**6)
        times = {
            "ours": seconds(simulation.step, given.device, 10),
            "loop": seconds(plain_loop(load, problem, load.nodes), given.device, 2),
        }
        for name, make in OTHERS.items():
            if importlib.util.find_spec(name) is None:
                times[name] = math.nan
                continue
            run = make(load, problem.model.module(problem.x0), x, y, given.device)
            times[name] = (timed(run, 1 + given.rounds) - timed(run, 1)) / given.rounds
        for name, took in times.items():
            shown = (
                "not installed" if math.isnan(took) else f"{1e3 * took:11.1f} {took / times['ours']:10.1f}"
            )
            print(f"{load.title:24} {name:10} {shown}", flush=True)


def timed(run: Callable[[int], None], rounds: int) -> float:
    begun = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):  # they talk
        run(rounds)
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
