"""Data by name in Python: the same nodes, test set and figures as an experiment file gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from command_line import make_plan

import holdfast as hf

MLP = {"name": "mlp", "hidden": [8]}
METHOD = {"name": "local-gecl", "lr": 0.1, "local_steps": 2}
OPTIONS: Any = {"topology": "ring", "batch_size": 8, "rounds": 3}


@pytest.mark.parametrize("partition", [{"name": "dirichlet", "h": 0.5}, hf.Dirichlet(0.5)])
def test_a_call_is_what_an_experiment_is(partition: Any, tmp_path) -> None:
    plan = make_plan(tmp_path)
    job = plan.jobs[0]
    simulation = plan.simulation(job)
    for _ in range(3):
        simulation.step()
    result = hf.train(METHOD, model=MLP, data="digits", nodes=4, partition=partition, **OPTIONS)
    assert torch.equal(result.models, simulation.models)
    expected = plan.setting(job).evaluation
    figures = expected.row(expected.figures(simulation).tolist())
    assert result.history["test_accuracy"][-1] == pytest.approx(figures["test_accuracy"], rel=1e-12)


def test_a_test_set_of_ones_own() -> None:
    """Of one sample per node: accuracies are 0 or 1."""
    own = [(torch.zeros(1, 1, 8, 8), torch.tensor([node])) for node in range(10)]
    result = hf.train(
        METHOD, model=MLP, data="digits", test=own, metrics=["node_accuracy"], **OPTIONS | {"rounds": 1}
    )
    last = result.history.rows[-1]
    assert {last[f"accuracy_node{node}"] for node in range(10)} <= {0.0, 1.0}


def test_data_that_come_with_their_test_set() -> None:
    x, y = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2
    nodes = [(x[:4], y[:4]), (x[4:8], y[4:8])]
    options: Any = {"model": torch.nn.Linear(3, 2), "rounds": 2}
    both = hf.train(METHOD, data=hf.TrainTest(nodes, (x[8:], y[8:])), **options)
    apart = hf.train(METHOD, data=nodes, test=(x[8:], y[8:]), **options)
    assert both.history["average_loss"] == apart.history["average_loss"]


def test_every_seed_draws_its_own_split(tmp_path) -> None:
    methods: Any = {"a": METHOD}
    options: Any = {**OPTIONS, "rounds": 1, "seeds": (0, 1), "metrics": ["train_loss"], "nodes": 3}
    dirichlet = {"name": "dirichlet", "h": 0.3}
    found = hf.compare(methods, model=MLP, data="digits", partition=dirichlet, run_dir=tmp_path, **options)
    assert 'dataset = "digits"' in (tmp_path / "setting.toml").read_text()
    rows = [row for row in found.record.rows if row["round"] == 1]
    for seed, row in enumerate(rows):
        one: Any = {**OPTIONS, "rounds": 1, "nodes": 3, "partition": dirichlet, "seed": seed}
        alone = hf.train(METHOD, model=MLP, data="digits", **one)
        assert row["train_loss"] == alone.history["train_loss"][-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": [(torch.ones(4, 2), torch.arange(4) % 2)], "nodes": 3}, "nodes: only for data by name"),
        ({"data": "digit"}, "unknown dataset 'digit'.*did you mean 'digits'"),
        ({"data": "digits", "partition": "iidd"}, "unknown partition 'iidd'"),
        ({"data": "digits", "nodes": 0}, "nodes: should be greater than or equal to 1, got 0"),
        ({"data": {"name": "digits", "nodes": 3}}, "unknown key in dataset 'digits' 'nodes'"),
    ],
)
def test_what_cannot_be(options: Any, message: str) -> None:
    with pytest.raises(hf.HoldfastError, match=message):
        hf.train(METHOD, model="linear", rounds=1, **options)
