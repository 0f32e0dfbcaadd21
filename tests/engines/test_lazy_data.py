"""Items read when they are drawn, and streams: the same trajectory from a file, on ranks and at sites."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import noisy_clouds
import numpy as np
import pytest
import torch
from cluster_ranks import run_worlds
from command_line import experiment_file, holdfast, make_plan
from federation_runs import DeployedRun, describe
from noisy_clouds import CLASSES, NAMES, SHAPE
from torch import Tensor

import holdfast as hf
from holdfast.core.world import ALONE, World
from holdfast.data.lazy import LazyData
from holdfast.engines.cluster.ranks import Ranks
from holdfast.engines.common.simulation import Simulation
from holdfast.experiments.experiment_file import read_experiment
from holdfast.experiments.plan import Plan
from holdfast_deploy.federation_file import make_federation
from holdfast_deploy.site import open_site, own_data

EXPERIMENT = """\
rounds = 3
seeds = [3]
dtype = "float64"
metrics = ["minibatch_loss", "test_accuracy", "node_accuracy"]

[problem]
dataset = "noisy_clouds:everybody"
nodes = 3
batch_size = 4

[network]
topology = "ring"

[[algorithm]]
name = "local-gecl"
lr = 0.3
local_steps = 2
"""
METHOD = {"name": "local-gecl", "lr": 0.3, "local_steps": 2}
KINDS = ["everybody", "streams"]


def simulated(folder: Path, kind: str, world: World = ALONE) -> tuple[Simulation, list[float]]:
    raw = read_experiment(folder / "small.toml", [f"problem.dataset=noisy_clouds:{kind}"])
    plan = Plan.of_tables(raw, None, "cpu", world)
    plan.check()
    [job] = plan.jobs
    simulation = plan.simulation(job)
    for _ in range(job.rounds):
        simulation.step()
    return simulation, plan.setting(job).evaluation.figures(simulation).tolist()


def on_rank(world: Ranks, folder: Path) -> None:
    for kind in KINDS:
        simulation, figures = simulated(folder, kind, world)
        data = simulation.problem.source.data
        assert data.here.tolist() == simulation.nodes.tolist()
        assert len(data.here) < data.nodes
        file = folder / f"{kind}-{world.rank}.npz"
        np.savez(file, nodes=simulation.nodes, models=simulation.models, figures=figures)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return experiment_file(tmp_path_factory.mktemp("lazy"), EXPERIMENT).parent


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, tuple[Tensor, list[float]]]:
    """Models and figures of the simulator."""
    found = {kind: simulated(folder, kind) for kind in KINDS}
    return {kind: (simulation.models, figures) for kind, (simulation, figures) in found.items()}


def test_an_experiment_trains_as_a_call_does(expected: dict[str, Any]) -> None:
    data = hf.from_datasets([noisy_clouds.Noisy(node) for node in range(3)], classes=CLASSES)
    assert isinstance(data, LazyData)
    options: Any = {"data": data, "topology": "ring", "batch_size": 4, "dtype": "float64", "seed": 3}
    result = hf.train(METHOD, model="linear", rounds=3, **options)
    assert torch.equal(result.models, expected["everybody"][0])
    assert result.models.norm() > 0.5


def test_ranks(folder: Path, expected: dict[str, Any]) -> None:
    run_worlds((2, on_rank, (folder,)))
    for kind in KINDS:
        models, figures = expected[kind]
        for rank in range(2):
            with np.load(folder / f"{kind}-{rank}.npz") as seen:
                own = models[torch.tensor(seen["nodes"])]
                assert torch.allclose(torch.tensor(seen["models"]), own, rtol=1e-12, atol=1e-14)
                assert np.allclose(seen["figures"], figures, rtol=1e-12)


@pytest.mark.parametrize(("kind", "own"), [("everybody", "own"), ("streams", "stream")])
def test_a_real_network(kind: str, own: str, expected: dict[str, Any], tmp_path: Path) -> None:
    raw = describe(METHOD, nodes=3, rounds=3, seed=3, dtype="float64")
    raw["problem"] |= {"input_shape": [SHAPE], "classes": CLASSES}
    federation = make_federation(raw, "test")
    run = DeployedRun(
        federation, tmp_path, data_of=lambda node: own_data(f"noisy_clouds:{own}", NAMES[node])
    ).carry_out()
    assert not run.errors
    found = torch.stack([run.models[name] for name in federation.names])
    assert torch.allclose(found, expected[kind][0], rtol=1e-12, atol=1e-14)
    assert ("local_loss" in run.members["a"].accounts.metrics) == (kind == "everybody")


def test_a_site_goes_on_with_its_own_data_only(tmp_path: Path) -> None:
    raw = describe(METHOD, nodes=3)
    raw["problem"] |= {"input_shape": [SHAPE], "classes": CLASSES}
    federation = make_federation(raw, "test")
    a, b = (open_site(federation, "a", own_data("noisy_clouds:own", name)) for name in "ab")
    again = open_site(federation, "a", own_data("noisy_clouds:own", "a"))
    assert a.digest == again.digest != b.digest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_shape": [5], "classes": 3}, r"samples are \[4\], the federation file says \[5\]"),
        ({"input_shape": [4], "classes": 2}, "y_train"),
        ({"input_shape": [4]}, "the federation file says real targets"),
    ],
)
def test_data_that_the_file_does_not_describe(changes: dict[str, Any], message: str) -> None:
    raw = describe(METHOD, nodes=3)
    raw["problem"] = {"model": "linear", "loss": "squared-error", **changes}
    if "classes" in changes:
        del raw["problem"]["loss"]
    with pytest.raises(hf.HoldfastError, match=message):
        open_site(make_federation(raw, "test"), "a", own_data("noisy_clouds:own", "a"))


def test_a_site_has_one_node() -> None:
    raw = describe(METHOD, nodes=3)
    with pytest.raises(hf.HoldfastError, match="a site has the data of one node, these are of 3"):
        open_site(make_federation(raw, "test"), "a", noisy_clouds.everybody(3))


def test_a_data_set_is_divided(folder: Path, tmp_path: Path) -> None:
    plan = make_plan(tmp_path, "problem.dataset=noisy_clouds:whole", "metrics=default", text=MODEL)
    data = plan.setting(plan.jobs[0]).data
    assert isinstance(data, LazyData)
    assert data.counts.tolist() == [10, 10, 10]


MODEL = EXPERIMENT + '\n[problem.model]\nname = "torch.nn:Linear"\nin_features = 4\nout_features = 3\n'


def test_inspect_says_how_data_are_read(folder: Path, tmp_path: Path) -> None:
    shown = holdfast("inspect", folder / "small.toml", "-o", tmp_path)
    assert shown.code == 0
    assert "data: items read when they are drawn, as they are drawn at random" in " ".join(shown.out.split())


def test_a_model_by_name_needs_the_number_of_classes(tmp_path: Path) -> None:
    with pytest.raises(hf.HoldfastError, match="model 'linear': nobody knows how many classes there are"):
        make_plan(tmp_path, "problem.dataset=noisy_clouds:whole", "metrics=default", text=EXPERIMENT)
