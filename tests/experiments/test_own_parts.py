"""Parts that a user names as ``module:attribute``: in an experiment file or Python, not for a federation."""

from __future__ import annotations

import csv
import sys
from datetime import date
from pathlib import Path

import pytest
import torch
from command_line import experiment_file, holdfast, make_plan
from federation_runs import describe

import holdfast as hf
from holdfast.experiments.experiment_file import with_defaults
from holdfast.experiments.plan import Plan
from holdfast_deploy.federation_file import make_federation

OWN = '''
from dataclasses import dataclass

import numpy as np
import torch

import holdfast as hf
from holdfast.problem.losses import SquaredError


@dataclass(frozen=True)
class Scaled(SquaredError):
    """Squared errors, weighted."""

    weight: float = 2.0

    def values(self, outputs, targets):
        return self.weight * super().values(outputs, targets)


THRICE = Scaled(weight=3.0)


def squared(outputs, targets):
    return 1.5 * (outputs[:, 0] - targets) ** 2


class MeanSquare(torch.nn.MSELoss):
    def forward(self, outputs, targets):
        return super().forward(outputs[:, 0], targets)


@dataclass(frozen=True)
class Halves(hf.LocalOptimizer):
    share: float = 0.5

    def init(self, x):
        return ()

    def update(self, gradient, memory, x):
        return self.share * gradient, memory


@dataclass(frozen=True)
class Rounded(hf.Channel):
    serves = frozenset({"graph", "server", "cohort"})
    digits: int = 3

    def encode(self, message, state, draw):
        return message.round(decimals=self.digits)

    def decode(self, wire, like):
        return wire


class Abstract(hf.Channel):
    pass


def line(seed, slope, noise=0.0):
    """y = slope * x, of 40 samples; 8 more for testing."""
    x = torch.arange(48.0)[:, None] / 48
    y = slope * x[:, 0] + noise * seed
    return hf.Dataset(x[:40], y[:40], x[40:], y[40:], classes=None)


def divided(nodes, seed, data_dir):
    assert data_dir is None
    x = torch.arange(6.0 * nodes)[:, None] / 6
    return hf.FederatedData(x, torch.arange(6 * nodes) % 3, np.full(nodes, 6))


def numbers():
    return 3


def shifted(samples, key):
    return samples._replace(x=samples.x + 0.1 * hf.random_normal(key, samples.x.shape))


NUMBER = 3
'''
LOCAL = {"lr": 0.1, "local_steps": 2}
EXPERIMENT = """\
rounds = 2
dtype = "float64"
channel = "own_parts:Rounded"

[problem]
dataset = { name = "own_parts:line", slope = 2.0 }
nodes = 4
model = "linear"
loss = { name = "own_parts:Scaled", weight = 3.0 }
batch_size = "full"

[network]
topology = "ring"

[[algorithm]]
name = "gossip"
lr = 0.1
local_steps = 2
optimizer = { name = "own_parts:Halves", share = 0.25 }
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The user's module, in the folder where everything happens."""
    (tmp_path / "own_parts.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "own_parts", raising=False)
    import own_parts

    return own_parts


def recorded(folder: Path, metric: str) -> list[float]:
    with (folder / "metrics.csv").open() as file:
        return [float(row[metric]) for row in csv.DictReader(file)]


def test_an_experiment_names_all_its_parts_and_gives_pythons_numbers(tmp_path, own):
    code, _, err = holdfast("run", experiment_file(tmp_path, EXPERIMENT), "-q")
    assert (code, err) == (0, "")
    [run] = tmp_path.glob("runs/*")
    samples = own.line(0, 2.0)
    model = {"name": "linear"}
    options = {"topology": "ring", "rounds": 2, "batch_size": "full", "dtype": "float64"}
    data = hf.partition(samples.x_train, samples.y_train, hf.IID(), nodes=4, seed=0)
    by_object = hf.train(
        hf.Gossip(lr=0.1, local_steps=2, optimizer=own.Halves(0.25)),
        model=model,
        data=data,
        loss=own.THRICE,
        channel=own.Rounded(),
        **options,
    )
    by_name = hf.train(
        {"name": "gossip", **LOCAL, "optimizer": {"name": "own_parts:Halves", "share": 0.25}},
        model=model,
        data=data,
        loss="own_parts:THRICE",
        channel={"name": "own_parts:Rounded", "digits": 3},
        **options,
    )
    assert recorded(run, "train_loss") == pytest.approx(by_object.history["train_loss"], rel=1e-12)
    assert torch.equal(by_name.models, by_object.models)
    plain = hf.train(hf.Gossip(lr=0.1, local_steps=2), model=model, data=data, loss=own.THRICE, **options)
    assert not torch.allclose(plain.models, by_object.models)


@pytest.mark.parametrize(
    "loss", ['"own_parts:squared"', '{ name = "own_parts:MeanSquare", reduction = "mean" }']
)
def test_a_loss_may_be_a_function_or_a_module(tmp_path, own, loss):
    text = EXPERIMENT.replace('{ name = "own_parts:Scaled", weight = 3.0 }', loss)
    plan = make_plan(tmp_path, text=text)
    x, nodes = torch.zeros(1, 2, dtype=torch.float64), torch.tensor([0])
    problem, data = plan.setting(plan.jobs[0]).problem, plan.setting(plan.jobs[0]).data
    expected = data.node(0)[1].double().square().mean() * (1.5 if "squared" in loss else 1.0)
    assert problem.values(x, nodes).item() == pytest.approx(expected.item(), rel=1e-6)


def test_data_that_the_users_function_has_divided(tmp_path, own):
    text = EXPERIMENT.replace('{ name = "own_parts:line", slope = 2.0 }', '"own_parts:divided"')
    text = text.replace('loss = { name = "own_parts:Scaled", weight = 3.0 }', "")
    plan = make_plan(tmp_path, text=text)
    setting = plan.setting(plan.jobs[0])
    assert setting.data.counts.tolist() == [6] * 4
    assert setting.labels.tolist() == [[2, 2, 2]] * 4
    assert setting.dim == 2 * 3
    assert setting.test_data is None
    with pytest.raises(hf.HoldfastError, match=r"problem\.partition: own_parts:divided has divided the data"):
        make_plan(tmp_path, "problem.partition=natural", text=text)


REFUSED = {
    "problem.loss=own_parts:NUMBER": "loss 'own_parts:NUMBER': expected a subclass or an instance of Loss",
    "problem.loss=own_parts:Rounded": "loss 'own_parts:Rounded': expected a subclass or an instance of Loss",
    'problem.loss={name="own_parts:THRICE",weight=1.0}': "loss 'own_parts:THRICE': it is made already",
    'problem.loss={name="own_parts:Scaled",wait=1.0}': "unknown key in loss 'own_parts:Scaled' 'wait'",
    'problem.loss={name="own_parts:Scaled",weight="a"}': "loss 'own_parts:Scaled'.weight: should be a valid",
    "problem.loss=own_parts:Scale": "unknown name in module 'own_parts' 'Scale': did you mean 'Scaled'",
    "channel=own_parts:Abstract": "channel 'own_parts:Abstract': the class lacks decode, encode",
    "channel=nowhere:Rounded": "channel 'nowhere:Rounded': cannot import 'nowhere'",
    "algorithm.optimizer=own_parts:Rounded": "optimizer 'own_parts:Rounded': expected a subclass or",
    "problem.dataset=own_parts:NUMBER": "dataset 'own_parts:NUMBER': expected a function, got 3",
    "problem.dataset=own_parts:numbers": "dataset 'own_parts:numbers': expected it to return hf.Dataset or",
    "problem.dataset=own_parts:line": "dataset 'own_parts:line': missing a required argument: 'slope'",
    'problem.dataset={name="own_parts:line",slope=1.0,seed=1}': "dataset 'own_parts:line': 'seed' comes",
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_is_not_such_a_part_is_refused_in_one_line(tmp_path, own, override):
    with pytest.raises(hf.HoldfastError) as error:
        make_plan(tmp_path, override, text=EXPERIMENT)
    assert str(error.value).startswith(REFUSED[override])
    assert "\n" not in str(error.value)


DANGEROUS = "dangerous:Part"
FOREIGN = {
    "problem.model: 'dangerous:Part' names code": {"problem": {"model": DANGEROUS}},
    "unknown loss": {"problem": {"loss": {"name": DANGEROUS, "weight": 2.0}}},
    "unknown channel": {"channel": DANGEROUS},
    "unknown algorithm": {"algorithm": {"name": DANGEROUS}},
    "unknown optimizer": {"algorithm": {"name": "gossip", **LOCAL, "optimizer": DANGEROUS}},
    "optimizer": {"algorithm": {"name": "gossip", **LOCAL, "optimizer": {"name": DANGEROUS, "keep": True}}},
    "unknown solver": {"algorithm": {"name": "pdmm", "gamma": 1.0, "solver": {"name": DANGEROUS}}},
    "unknown schedule": {"algorithm": {"name": "gossip", "lr": {"schedule": DANGEROUS}}},
    "unknown topology": {"network": {"topology": DANGEROUS}},
    "unknown mixing": {"network": {"mixing": DANGEROUS}},
    "shared_metrics": {"shared_metrics": [DANGEROUS]},
    "dataset": {"problem": {"dataset": DANGEROUS}},
}


@pytest.mark.parametrize("message", FOREIGN)
def test_a_federation_file_names_no_code(tmp_path, monkeypatch, message):
    (tmp_path / "dangerous.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    raw = describe({"name": "gossip", **LOCAL})
    for section, value in FOREIGN[message].items():
        raw[section] = {**raw[section], **value} if section in ("problem", "network") else value
    with pytest.raises(hf.HoldfastError, match=message) as error:
        make_federation(raw, "federation.toml")
    assert "\n" not in str(error.value)
    assert "dangerous" not in sys.modules


def test_an_augmentation_by_name(own, tmp_path) -> None:
    plan = make_plan(tmp_path, "problem.augment=own_parts:shifted", "problem.batch_size=4", text=EXPERIMENT)
    augment = plan.setting(plan.jobs[0]).problem.augment
    assert augment.__name__ == "shifted"
    options = {"model": "linear", "data": {"name": "own_parts:line", "slope": 2.0}, "nodes": 4, "rounds": 1}
    options |= {"loss": "squared-error", "batch_size": 4}
    method = {"name": "fedavg", "lr": 0.1}
    by_name, itself, without = (
        hf.train(method, augment=given, **options).models for given in ("own_parts:shifted", augment, None)
    )
    assert torch.equal(by_name, itself)
    assert not torch.equal(by_name, without)
    with pytest.raises(hf.HoldfastError, match="augment 'own_parts:NUMBER': expected a function, got 3"):
        hf.train(method, augment="own_parts:NUMBER", **options)


def test_a_date_is_a_parameter_of_ones_own_part() -> None:
    def plan(since: date) -> Plan:
        dataset = {"name": "own:load", "since": since}
        raw = {"rounds": 1, "problem": {"dataset": dataset}, "algorithm": {"name": "dsgd", "lr": 0.1}}
        return Plan.of_tables(with_defaults(raw), None, "cpu")

    first, second = plan(date(2020, 1, 1)), plan(date(2020, 1, 2))
    assert first.digest != second.digest
    assert first.shares_setting(first.jobs[0], first.jobs[0])
