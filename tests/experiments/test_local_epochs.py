"""``local_epochs``: local steps counted in passes over the nodes' data, in Python, files and federations."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import torch
from command_line import make_plan
from federation_runs import describe

import holdfast as hf
from holdfast.experiments.setting import LocalEpochs
from holdfast_deploy.federation_file import make_federation


def nodes(*counts: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [(torch.randn(count, 3, generator=draw), torch.arange(count) % 2) for count in counts]


def trained(algorithm: Any, data: Any, **options: Any) -> hf.TrainResult:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    return hf.train(algorithm, model=model, data=data, rounds=2, sampling="epochs", metrics=[], **options)


@pytest.mark.parametrize("method", [hf.FedAvg, hf.LocalGECL, hf.SCAFFOLD, hf.FedRep])
def test_nodes_of_equal_size(method: Any) -> None:
    """Ten samples in batches of four are three steps."""
    own = {"head": 2} if method is hf.FedRep else {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = trained(method(lr=0.1, **own), nodes(10, 10, 10), batch_size=4, local_epochs=2)
    expected = trained(method(lr=0.1, local_steps=6, **own), nodes(10, 10, 10), batch_size=4)
    assert torch.equal(found.models, expected.models)


def test_nodes_of_different_size() -> None:
    """2, 3 and 5 steps for an epoch: 10/3 on average, and 7 for two, rounded up."""
    with pytest.warns(RuntimeWarning, match=r"take 7 local steps .* 1\.4 times, and the smallest 3\.5 times"):
        found = trained(hf.FedAvg(lr=0.1), nodes(8, 12, 20), batch_size=4, local_epochs=2)
    expected = trained(hf.FedAvg(lr=0.1, local_steps=7), nodes(8, 12, 20), batch_size=4)
    assert torch.equal(found.models, expected.models)


def test_a_method_with_epochs_of_its_own(tmp_path) -> None:
    table = {"name": "fedavg", "lr": 0.1, "local_epochs": 2}
    expected = trained(hf.FedAvg(lr=0.1, local_steps=6), nodes(10, 10), batch_size=4).models
    assert torch.equal(trained(table, nodes(10, 10), batch_size=4).models, expected)
    methods: Any = {"two": table, "one": hf.FedAvg(lr=0.1)}
    options: Any = {"model": torch.nn.Linear(3, 2), "data": nodes(10, 10), "rounds": 1, "batch_size": 4}
    found = hf.compare(methods, metrics=["consensus"], local_epochs=1, **options)
    gradients = {row["algorithm"]: row["gradient_evaluations"] for row in found.record.rows}
    assert gradients == {"two": 12, "one": 6}
    options |= {"values": [0.1, 0.2], "widen": 0, "metric": "train_loss", "run_dir": tmp_path / "run"}
    with pytest.warns(RuntimeWarning, match=r"the best lr, 0\.2, is the largest tried"):
        hf.tune(table, **options)
    summaries = [json.loads(file.read_text()) for file in (tmp_path / "run").rglob("summary.json")]
    assert ["local_steps=6" in job["method"] for each in summaries for job in each["jobs"]] == [True, True]


def test_full_batches() -> None:
    assert LocalEpochs(3, [5, 7], "full").steps == 3


def test_an_experiment(tmp_path) -> None:
    """1,400 digits on four nodes in batches of 100: three or four steps."""
    text = """\
rounds = 1
[problem]
dataset = "digits"
nodes = 4
batch_size = 100
[[algorithm]]
name = "fedavg"
lr = 0.1
[network]
topology = "server"
"""
    plan = make_plan(tmp_path, "algorithm.local_epochs=[1,3]", text=text)
    counts = plan.setting(plan.jobs[0]).data.counts
    steps = -(-counts // 100)
    assert [plan.method(job).local_steps for job in plan.jobs] == [  # type: ignore[attr-defined]
        -(-int(epochs * steps.sum()) // 4) for epochs in (1, 3)
    ]


def test_a_federation_needs_everybodys_samples() -> None:
    raw = describe({"name": "local-gecl", "lr": 0.1, "local_epochs": 2})
    with pytest.raises(hf.HoldfastError, match="local_epochs: say how many samples 'a' has"):
        make_federation(raw, "test")
    for node, count in zip(raw["node"], (8, 12, 20), strict=True):
        node["samples"] = count
    federation = make_federation(raw, "test")
    assert federation.method.local_steps == 7  # type: ignore[attr-defined]
    without = make_federation(raw | {"algorithm": {"name": "local-gecl", "lr": 0.1}}, "test")
    assert without.id != federation.id


@pytest.mark.parametrize(
    ("algorithm", "data", "message"),
    [
        (hf.DSGD(lr=0.1), nodes(4), "DSGD takes no local_steps"),
        (hf.FedAvg(lr=0.1, local_steps=3), nodes(4), "FedAvg has local_steps already; give one of them"),
    ],
)
def test_what_cannot_be(algorithm: Any, data: Any, message: str) -> None:
    with pytest.raises(hf.HoldfastError, match=message):
        trained(algorithm, data, local_epochs=1)


def test_a_stream_has_no_epochs() -> None:
    stream = hf.Stream(nodes=2, batch=lambda node, round, step: nodes(4)[0])
    with pytest.raises(hf.HoldfastError, match="not known how many samples"):
        hf.train(hf.FedAvg(lr=0.1), model=torch.nn.Linear(3, 2), data=stream, rounds=1, local_epochs=1)
