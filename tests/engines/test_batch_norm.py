"""BatchNorm's statistics on ranks and in real federations: what the simulator gives its models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import tomli_w
import torch
from cluster_ranks import run_worlds
from command_line import make_plan
from federation_runs import DeployedRun, describe, make_data
from normalised import Net
from own_models import as_own_model
from torch import Tensor, nn

import holdfast as hf
from holdfast.core.world import ALONE, World
from holdfast.engines.cluster.ranks import Ranks
from holdfast.experiments.plan import Plan
from holdfast_deploy.federation_file import read_federation

NODES, ROUNDS, SEED = 4, 3, 3
GRAPH: dict[str, Any] = {"topology": "line"}
SERVER = {"topology": "server"}
METHODS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "graph": ({"name": "local-gecl", "lr": 0.1, "local_steps": 2}, GRAPH),
    "averaging": ({"name": "local-gecl", "lr": 0.1, "local_steps": 2}, SERVER),
    "server": ({"name": "fedavg", "lr": 0.1, "local_steps": 2}, SERVER),
    "personal": ({"name": "ditto", "lr": 0.1, "local_steps": 2}, SERVER),
    "fedbn": ({"name": "fedbn", "lr": 0.1, "local_steps": 2, "local": ["1"]}, GRAPH),
}


def expected(case: str, buffers: str) -> hf.TrainResult:
    """The simulator's answer."""
    method, network = METHODS[case]
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        model = Net()
    options: Any = {"topology": network["topology"], "rounds": ROUNDS, "batch_size": 4, "seed": SEED}
    data = [(own.x_train, own.y_train) for own in map(make_data, range(NODES))]
    return hf.train(method, model=model, data=data, buffers=buffers, dtype="float64", metrics=[], **options)


@pytest.fixture
def own_net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return as_own_model(Net, tmp_path, monkeypatch)


def deployed(case: str, buffers: str, own_net: str, folder: Path) -> DeployedRun:
    method, network = METHODS[case]
    raw = describe(method, nodes=NODES, rounds=ROUNDS, seed=SEED, dtype="float64", network=network)
    raw["problem"] |= {"buffers": buffers}
    del raw["problem"]["model"]
    file = folder / "federation.toml"
    file.write_text(tomli_w.dumps(raw))
    return DeployedRun(read_federation(file, own_net).running(), folder / "run")


def assert_same(module: nn.Module, file: Path) -> None:
    found = safetensors.torch.load_file(file)
    wanted = module.state_dict()
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert torch.allclose(found[name], tensor, rtol=1e-6, atol=1e-7), name
    assert not torch.equal(wanted["1.running_mean"], torch.zeros_like(wanted["1.running_mean"]))


@pytest.mark.parametrize(
    ("case", "buffers"),
    [
        ("graph", "average"),
        ("server", "average"),
        *(
            pytest.param(*rest, marks=pytest.mark.slow)
            for rest in (
                ("averaging", "average"),
                ("personal", "average"),
                ("server", "local"),
                ("fedbn", "local"),
            )
        ),
    ],
)
def test_a_real_federation(case: str, buffers: str, own_net: str, tmp_path: Path) -> None:
    run = deployed(case, buffers, own_net, tmp_path).carry_out()
    assert not run.errors
    wanted = expected(case, buffers)
    kind = "personal" if case == "personal" else "model"
    for node, name in enumerate(run.federation.names):
        assert_same(wanted.node_model(node), tmp_path / "run" / name / f"{kind}.safetensors")
    if buffers == "average" and case == "graph":
        statistics = [wanted.node_model(node).state_dict()["1.running_var"] for node in range(NODES)]
        assert torch.equal(statistics[0], statistics[1])
    if case in ("server", "personal"):
        assert_server(buffers, wanted.model, tmp_path / "run" / "hub" / "model.safetensors")


def assert_server(buffers: str, module: nn.Module, file: Path) -> None:
    """With local statistics, which stay at home, the file has none: loading it says so."""
    if buffers == "average":
        assert_same(module, file)
        return
    with pytest.raises(RuntimeError, match=r'Missing key.*"1.running_mean", "1.running_var"'):
        Net().load_state_dict(safetensors.torch.load_file(file))


@pytest.mark.slow
def test_members_that_stop_before_statistics_have_travelled(own_net: str, tmp_path: Path) -> None:
    """Everybody is stopped when the first has finished its rounds; started again, all end alike."""
    run = deployed("graph", "average", own_net, tmp_path)

    class Log(list[dict[str, Any]]):
        def append(self, entry: dict[str, Any]) -> None:
            super().append(entry)
            if entry["event"] == "round done" and entry["round"] == ROUNDS:
                for member in list(run.members.values()):
                    member.stop()

    run.log = Log()
    run.carry_out()
    assert run.errors
    again = deployed_again(run, tmp_path)
    assert not again.errors
    wanted = expected("graph", "average")
    for node, name in enumerate(run.federation.names):
        assert_same(wanted.node_model(node), tmp_path / "run" / name / "model.safetensors")


def deployed_again(run: DeployedRun, folder: Path) -> DeployedRun:
    return DeployedRun(run.federation, folder / "run").carry_out()


EXPERIMENT = f"""\
rounds = 3
seeds = [3]
dtype = "float64"
metrics = ["test_accuracy", "average_loss", "node_loss", "p10_accuracy", "personal_loss", "train_loss"]
personalize = 2

[problem]
dataset = "digits"
nodes = 3
batch_size = 16
partition = {{ name = "dirichlet", h = 0.5 }}
model = "{__name__}:Digits"

[network]
topology = "ring"

[[algorithm]]
name = "local-gecl"
lr = 0.1
local_steps = 2
"""


class Digits(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 10))


def figures(folder: Path, buffers: str, world: World = ALONE) -> tuple[Tensor, list[float]]:
    plan = Plan.of_file(folder / "small.toml", [f"problem.buffers={buffers}"], None, "cpu", world)
    plan.check()
    [job] = plan.jobs
    simulation = plan.simulation(job)
    for _ in range(job.rounds):
        simulation.step()
    return simulation.models, plan.setting(job).evaluation.figures(simulation).tolist()


def on_rank(world: Ranks, folder: Path) -> None:
    for buffers in ("local", "average"):
        models, found = figures(folder, buffers, world)
        np.savez(folder / f"{buffers}-{world.rank}.npz", figures=found, models=len(models))


def test_ranks(tmp_path: Path) -> None:
    """Percentiles, single nodes and personalised models are measured with the right statistics, too."""
    make_plan(tmp_path, text=EXPERIMENT)
    run_worlds((2, on_rank, (tmp_path,)))
    seen = {}
    for buffers in ("local", "average"):
        _, seen[buffers] = figures(tmp_path, buffers)
        for rank in range(2):
            with np.load(tmp_path / f"{buffers}-{rank}.npz") as file:
                assert file["models"] < 3
                assert np.allclose(file["figures"], seen[buffers], rtol=1e-9)
    assert not np.allclose(seen["local"], seen["average"], rtol=1e-3)
