"""A dictionary batch and the model's own training step: the same trajectory on all three engines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tomli_w
import torch
from cluster_ranks import run_worlds
from federation_runs import DeployedRun, describe
from own_models import as_own_model
from tagging import Tagger, sentences
from torch import Tensor

import holdfast as hf
from holdfast.core.world import World
from holdfast.data.tables import Columns, read_columns, write_columns
from holdfast.engines.cluster.exchange import place
from holdfast.engines.cluster.ranks import Ranks
from holdfast.engines.common.simulation import Simulation
from holdfast.experiments.setting import build_simulation
from holdfast.topology import Network
from holdfast_deploy.federation_file import make_federation, read_federation
from holdfast_deploy.site import initial_model

NODES, ROUNDS, SEED = 3, 4, 3
METHOD = {"name": "local-gecl", "lr": 0.3, "local_steps": 2}


def initial() -> Tagger:
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        return Tagger()


def simulated(world: World | None = None) -> Simulation:
    network = Network.of(hf.ring(NODES))
    data = hf.FederatedData.of_nodes([sentences(node) for node in range(NODES)])
    if world is not None:
        data = data.hold(place(network, world.size)[world.rank].tolist())
    problem = hf.build_problem(
        initial(), data, loss="training-step", batch_size=4, seed=SEED, dtype=torch.float64
    )
    method = hf.LocalGECL(lr=0.3, local_steps=2)
    options = {} if world is None else {"world": world}
    simulation = build_simulation(method, problem, network, seed=SEED, **options)
    for _ in range(ROUNDS):
        simulation.step()
    return simulation


def on_rank(world: Ranks, folder: Path) -> None:
    simulation = simulated(world)
    np.savez(folder / f"{world.rank}.npz", nodes=simulation.nodes.numpy(), models=simulation.models.numpy())


@pytest.fixture(scope="module")
def expected() -> Tensor:
    return simulated().models


def test_training_moves(expected: Tensor) -> None:
    start = torch.cat([p.detach().flatten() for p in initial().double().parameters()])
    assert (expected - start).norm(dim=1).min() > 0.1


def test_ranks(expected: Tensor, tmp_path: Path) -> None:
    run_worlds((2, on_rank, (tmp_path,)))
    for rank in range(2):
        with np.load(tmp_path / f"{rank}.npz") as seen:
            assert torch.allclose(
                torch.tensor(seen["models"]), expected[seen["nodes"]], rtol=1e-12, atol=1e-14
            )


@pytest.fixture
def own_tagger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return as_own_model(Tagger, tmp_path, monkeypatch)


def test_a_real_network(expected: Tensor, own_tagger: str, tmp_path: Path) -> None:
    columns = {name: list(column.shape[1:]) for name, column in sentences(0).items()}
    raw = describe(METHOD, nodes=NODES, rounds=ROUNDS, seed=SEED, dtype="float64")
    raw["problem"] = {"columns": columns, "loss": "training-step", "batch_size": 4}
    file = tmp_path / "federation.toml"
    file.write_text(tomli_w.dumps(raw))
    federation = read_federation(file, own_tagger).running()
    assert torch.equal(initial_model(federation).x0, simulated().problem.x0)

    def own(node: int) -> Columns:
        path = tmp_path / f"{node}.npz"
        write_columns(path, Columns(sentences(node), sentences(node)))
        return read_columns(path)

    run = DeployedRun(federation, tmp_path / "run", data_of=own).carry_out()
    assert not run.errors
    found = torch.stack([run.models[name] for name in federation.names])
    assert torch.allclose(found.reshape(expected.shape), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ({"columns": {"a": [2]}, "input_shape": [3]}, "by input_shape or by columns, not both"),
        ({"loss": "cross-entropy"}, "by input_shape or by columns"),
    ],
)
def test_what_samples_look_like_is_said_once(problem, message) -> None:
    raw = describe(METHOD, nodes=NODES)
    raw["problem"] = problem
    with pytest.raises(hf.HoldfastError, match=message):
        make_federation(raw, "test")


def test_other_columns_are_refused(own_tagger: str, tmp_path: Path) -> None:
    raw = describe(METHOD, nodes=NODES)
    raw["problem"] = {"columns": {"input_ids": [9]}, "loss": "training-step"}
    file = tmp_path / "federation.toml"
    file.write_text(tomli_w.dumps(raw))
    federation = read_federation(file, own_tagger).running()
    with pytest.raises(hf.HoldfastError, match=r"data: columns are \{'input_ids': \[6\].* says columns ="):
        DeployedRun(federation, tmp_path, data_of=lambda node: Columns(sentences(node))).member("a")
