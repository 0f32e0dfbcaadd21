"""A round of FedAvg by other simulators that are installed: flwr with ray, pfl, fluke, NVFlare.

python benchmarks/others.py [--device cuda] [--models linear mlp] [--only pfl fluke] [--rounds 3]

Each does the same work: n clients take K steps of SGD on batches of B of the same random images, and are
averaged. Each is run for one round and for a few more; the difference is the time of a round without its
start. Both are the shortest of ``--repeats`` runs, as others may use the machine, and ours is run anew beside
each of the others. ``lines`` are those of the program in this file without comments: what a user writes who
has a model and each client's arrays.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.metadata
import importlib.util
import inspect
import io
import logging
import os
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from workloads import Workload, linear, make_problem, mlp, plain_loop, seconds

import holdfast as hf

LR = 0.01
WORKLOADS = {"linear": linear(100), "mlp": mlp(10)}
MOST_CLIENTS = {"nvflare": 16}  # a process for each
Run = Callable[[int], Any]


def by_holdfast(load: Workload, net: nn.Module, x: Tensor, y: Tensor, device: str) -> Run:
    def run(rounds: int) -> Any:
        return hf.train(
            hf.FedAvg(lr=LR, local_steps=load.steps),
            model=net,
            data=list(zip(x, y, strict=True)),
            rounds=rounds,
            batch_size=load.batch,
            device=device,
            metrics=("minibatch_loss",),
            progress=False,
        )

    return run


def by_flwr(load: Workload, net: nn.Module, x: Tensor, y: Tensor, device: str) -> Run:
    """One process of ray for every core; models travel as Flower's messages."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    samples, labels = x.numpy(), y.numpy()
    client = ClientApp()

    @client.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        node = int(context.node_config["partition-id"])
        own, targets = torch.tensor(samples[node]).to(device), torch.tensor(labels[node]).to(device)
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        net.to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=LR)
        for _ in range(load.steps):
            picks = torch.randint(len(targets), (load.batch,), device=device)
            optimizer.zero_grad()
            functional.cross_entropy(net(own[picks]), targets[picks]).backward()
            optimizer.step()
        metrics = MetricRecord({"num-examples": len(targets)})
        content = RecordDict({"arrays": ArrayRecord(net.cpu().state_dict()), "metrics": metrics})
        return Message(content=content, reply_to=message)

    def run(rounds: int) -> None:
        server = ServerApp()

        @server.main()
        def main(grid: Grid, context: Context) -> None:
            strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=load.nodes)
            strategy.start(grid, ArrayRecord(net.cpu().state_dict()), num_rounds=rounds)

        gpus = 1 / (os.cpu_count() or 1) if device == "cuda" else 0.0
        run_simulation(
            server,
            client,
            num_supernodes=load.nodes,
            backend_config={"client_resources": {"num_cpus": 1, "num_gpus": gpus}},
        )

    return run


class Client(nn.Module):
    """A model with the loss that pfl asks its models for."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def loss(self, x: Tensor, y: Tensor, **_: Any) -> Tensor:
        return functional.cross_entropy(self.module(x), y)

    def metrics(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {}


def by_pfl(load: Workload, net: nn.Module, x: Tensor, y: Tensor, device: str) -> Run:
    """In this process, on a device that it picks. A round is one pass, so users have what K steps take."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    nodes = range(load.nodes)
    rows = torch.arange(load.batch * load.steps) % y.shape[1]
    users = {node: Dataset((x[node][rows], y[node][rows]), user_id=str(node)) for node in nodes}

    def run(rounds: int) -> None:
        client = Client(net).to(device)
        model = PyTorchModel(client, torch.optim.SGD, torch.optim.SGD(client.parameters(), lr=1.0))
        turns = iter(list(nodes) * (rounds + 1))
        data = FederatedDataset(users.__getitem__, turns.__next__)
        FederatedAveraging().run(
            NNAlgorithmParams(
                central_num_iterations=rounds,
                evaluation_frequency=10**9,
                train_cohort_size=load.nodes,
                val_cohort_size=None,
            ),
            SimulatedBackend(training_data=data, val_data=None),
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


def by_fluke(load: Workload, net: nn.Module, x: Tensor, y: Tensor, device: str) -> Run:
    """In this process. It counts epochs, so each client has as many samples as it takes in K steps."""
    from fluke import DDict, FlukeENV
    from fluke.algorithms.fedavg import FedAVG
    from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader

    FlukeENV().set_device(device)
    rows = torch.arange(load.batch * load.steps) % y.shape[1]
    loaders = [
        FastDataLoader(x[i][rows], y[i][rows], num_labels=10, batch_size=load.batch, shuffle=True)
        for i in range(load.nodes)
    ]
    none: list[Any] = [None] * load.nodes
    settings = {
        "model": net,
        "client": {
            "batch_size": load.batch,
            "local_epochs": 1,
            "loss": "CrossEntropyLoss",
            "optimizer": {"lr": LR},
            "scheduler": {"gamma": 1, "step_size": 1},
        },
        "server": {"weighted": False},
    }

    def run(rounds: int) -> None:
        splitter = DataSplitter(DummyDataContainer(loaders, none, None, 10))
        FedAVG(load.nodes, splitter, DDict(settings)).run(rounds, 1.0)

    return run


NVFLARE_CLIENT = """
import sys
import numpy as np
import torch
import nvflare.client as flare
from bench_net import Net

_, file, steps, batch, lr, device = sys.argv
steps, batch, lr = int(steps), int(batch), float(lr)
torch.set_num_threads(1)
flare.init()
node = int(flare.get_site_name().split("-")[1]) - 1
own = np.load(file, mmap_mode="r")
x, y = (torch.from_numpy(own[name][node]).to(device) for name in "xy")
net = Net().to(device)
while flare.is_running():
    received = flare.receive()
    net.load_state_dict({name: torch.as_tensor(value) for name, value in received.params.items()})
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    for _ in range(steps):
        picks = torch.randint(len(y), (batch,), device=device)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x[picks]), y[picks]).backward()
        optimizer.step()
    state = {name: value.cpu() for name, value in net.state_dict().items()}
    flare.send(flare.FLModel(params=state, meta={"NUM_STEPS_CURRENT_ROUND": steps}))
"""


def by_nvflare(load: Workload, net: nn.Module, x: Tensor, y: Tensor, device: str) -> Run:
    """A process for every client, as many at once as there are cores."""
    from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
    from nvflare.recipe import SimEnv

    folder = Path(tempfile.mkdtemp())
    layers = ", ".join(f"nn.{layer}" for layer in net)
    text = f"class Net(nn.Sequential):\n    def __init__(self): super().__init__({layers})\n"
    (folder / "bench_net.py").write_text(f"from torch import nn\n{text}")
    (folder / "client.py").write_text(NVFLARE_CLIENT)
    np.savez(folder / "data.npz", x=x.numpy(), y=y.numpy())
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    from bench_net import Net

    def run(rounds: int) -> None:
        recipe = FedAvgRecipe(
            name=f"job{rounds}",
            model=Net(),
            min_clients=load.nodes,
            num_rounds=rounds,
            train_script=str(folder / "client.py"),
            train_args=f"{folder / 'data.npz'} {load.steps} {load.batch} {LR} {device}",
        )
        threads = min(load.nodes, os.cpu_count() or 1)
        env = SimEnv(num_clients=load.nodes, num_threads=threads, workspace_root=str(folder / "work"))
        recipe.execute(env)

    return run


OTHERS = {"flwr": by_flwr, "pfl": by_pfl, "fluke": by_fluke, "nvflare": by_nvflare}
PACKAGES = {"fluke": "fluke-fl"}
PARTS: dict[str, list[Any]] = {"pfl": [Client], "nvflare": [NVFLARE_CLIENT]}  # what else a user writes


def lines(name: str) -> int:
    """Lines of code of a program, without its docstring; the header of the function is not the user's."""
    program = by_holdfast if name == "holdfast" else OTHERS[name]
    texts = [part if isinstance(part, str) else inspect.getsource(part) for part in PARTS.get(name, [])]
    return _lines(inspect.getsource(program)) - 1 + sum(map(_lines, texts))


def _lines(source: str) -> int:
    tree = ast.parse(textwrap.dedent(source))
    documented = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    docs = sum(len((ast.get_docstring(node) or "").splitlines()) for node in documented)
    code = [line for line in source.splitlines() if line.strip() and not line.strip().startswith("#")]
    return len(code) - docs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--only", nargs="+", default=list(OTHERS), choices=OTHERS)
    parser.add_argument("--rounds", type=int, default=3, help="so many, of which the mean is taken")
    parser.add_argument("--repeats", type=int, default=2, help="of which the shortest counts")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; torch {torch.__version__}")
    print(f"{'workload':24} {'simulator':16} {'ms a round':>11} {'ours then':>10} {'ratio':>7} {'lines':>6}")
    for load in [WORKLOADS[name] for name in given.models]:
        problem = make_problem(load, given.device)
        x = problem.source.stored.x.view(load.nodes, load.samples_per_node, *load.shape).cpu()
        x = (x.float() / 255 - 0.5) / 0.5
        y = problem.source.stored.y.view(load.nodes, load.samples_per_node).cpu()
        net = problem.model.module(problem.x0)

        def ours(load: Workload = load, data: Any = (net, x, y, given.device)) -> float:
            return per_round(by_holdfast(load, *data), 10 * given.rounds, given.repeats)

        def show(name: str, took: float, beside: float, count: Any, load: Workload = load) -> None:
            ratio = f"{1e3 * took:11.1f} {1e3 * beside:10.1f} {took / beside:7.1f} {count:>6}"
            print(f"{load.title:24} {name:16} {ratio}", flush=True)

        loop = seconds(plain_loop(load, problem, load.nodes), given.device, 3)
        show("plain loop", loop, ours(), "")
        for name in given.only:
            if importlib.util.find_spec(name) is None or load.nodes > MOST_CLIENTS.get(name, load.nodes):
                why = "not installed" if importlib.util.find_spec(name) is None else "too many clients"
                print(f"{load.title:24} {name:16} {why}", flush=True)
                continue
            version = importlib.metadata.version(PACKAGES.get(name, name))
            took = per_round(OTHERS[name](load, net, x, y, given.device), given.rounds, given.repeats)
            show(f"{name} {version}", took, ours(), lines(name))
    print(f"lines of holdfast: {lines('holdfast')}; load {os.getloadavg()[0]:.1f}")


def per_round(run: Run, rounds: int, repeats: int) -> float:
    few, many = (min(timed(run, count) for _ in range(repeats)) for count in (1, 1 + rounds))
    return (many - few) / rounds


def timed(run: Run, rounds: int) -> float:
    begun = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):  # they talk
        run(rounds)
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
