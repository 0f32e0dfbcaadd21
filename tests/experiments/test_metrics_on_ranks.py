"""Figures of single nodes, percentiles, classes and personal models: two ranks find what one process does."""

from __future__ import annotations

from pathlib import Path

import noisy_clouds
import numpy as np
import pytest
import torch
from cluster_ranks import run_worlds
from command_line import experiment_file
from torch import Tensor

import holdfast as hf
from holdfast.core.world import ALONE, World
from holdfast.engines.cluster.ranks import Ranks
from holdfast.experiments.experiment_file import read_experiment
from holdfast.experiments.plan import Plan

NAMES = [
    *("test_accuracy", "test_loss", "worst_accuracy", "worst_loss", "p10_loss", "p75_accuracy", "node_loss"),
    *("personal_loss", "worst_personal_accuracy", "p25_personal_loss", "node_personal_accuracy"),
    *("class_accuracy", "average_accuracy", "train_loss", "margin", "node_margin", "p50_personal_margin"),
]
EXPERIMENT = f"""\
rounds = 2
dtype = "float64"
personalize = 2
metrics = [{", ".join(f'"{name}"' for name in NAMES)}, {{ margin = "{__name__}:margin" }}]

[problem]
dataset = "{__name__}:common"
nodes = 5
model = {{ name = "mlp", hidden = [4] }}
batch_size = 4

[[algorithm]]
name = "local-gecl"
lr = 0.2
local_steps = 2

[[algorithm]]
name = "fedavg"
lr = 0.2
local_steps = 2

[[algorithm]]
name = "ditto"
lr = 0.2

[[algorithm]]
name = "fedrep"
lr = 0.2
head = "3"

[network]
topology = "server"
"""


def margin(outputs: Tensor, targets: Tensor) -> Tensor:
    """By how much the right class is ahead of the mean, for each sample."""
    return outputs.gather(1, targets[:, None])[:, 0] - outputs.mean(1)


def parts(nodes: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [
        (torch.randn(8 + node, 4, generator=draw) + node, (torch.arange(8 + node) * (node + 1)) % 3)
        for node in range(nodes)
    ]


def common(nodes: int) -> hf.TrainTest:
    """All nodes are tested on the same samples."""
    return hf.TrainTest(parts(nodes), noisy_clouds.tested())


def apart(nodes: int) -> hf.TrainTest:
    """Each node is tested on its own, of which the others have not the same number."""
    return hf.TrainTest(
        parts(nodes), [(x[: 3 + node], y[: 3 + node]) for node, (x, y) in enumerate(parts(nodes))]
    )


def figures(folder: Path, dataset: str, world: World = ALONE) -> dict[str, list[float]]:
    raw = read_experiment(folder / "small.toml", [f"problem.dataset={__name__}:{dataset}"])
    plan = Plan.of_tables(raw, None, "cpu", world)
    plan.check()
    found = {}
    for job in plan.jobs:
        simulation = plan.simulation(job)
        for _ in range(job.rounds):
            simulation.step()
        found[job.label] = plan.setting(job).evaluation.figures(simulation).tolist()
    return found


def on_rank(world: Ranks, folder: Path) -> None:
    for dataset in ("common", "apart"):
        np.savez(folder / f"{dataset}-{world.rank}.npz", **figures(folder, dataset, world))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = experiment_file(tmp_path_factory.mktemp("metrics"), EXPERIMENT)
    run_worlds((2, on_rank, (file.parent,)))
    return file.parent


@pytest.mark.parametrize("dataset", ["common", "apart"])
def test_two_ranks_find_what_one_process_finds(dataset: str, folder: Path) -> None:
    expected = figures(folder, dataset)
    assert list(expected) == ["local-gecl", "fedavg", "ditto", "fedrep"]
    for rank in range(2):
        with np.load(folder / f"{dataset}-{rank}.npz") as seen:
            for name, values in expected.items():
                assert len(values) > 30
                assert np.allclose(seen[name], values, rtol=1e-10, atol=1e-12, equal_nan=True), name
