"""Metrics of the user's own, of nodes, classes and personal models."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.core.errors import HoldfastError
from holdfast.experiments.metrics import choose_metrics
from holdfast.experiments.record_files import better

NODES = 4
DRAW = torch.Generator().manual_seed(0)
X = torch.randn(80, 5, generator=DRAW, dtype=torch.float64)
Y = (X[:, :3] + 0.5 * torch.randn(80, 3, generator=DRAW)).argmax(-1)
DATA = hf.FederatedData(X[:60], Y[:60], np.array([10, 20, 15, 15]))
TEST = (X[60:], Y[60:])
OWN = [(X[60:64], Y[60:64]), (X[64:70], Y[64:70]), (X[70:71], Y[70:71]), (X[71:], Y[71:])]


def train(metrics, algorithm=None, test=TEST, **options):
    torch.manual_seed(0)
    method = algorithm or hf.Gossip(lr=0.5, local_steps=2)
    topology = options.pop("topology", "ring")
    given = {"model": nn.Linear(5, 3), "data": DATA, "rounds": 3, "evaluate_every": 1, "dtype": "float64"}
    return hf.train(method, topology=topology, test=test, metrics=metrics, **{**given, **options})


def outputs(row, x):
    return x @ row[:15].view(3, 5).T + row[15:]


def margin(scores, labels):
    """How far the right score is above the mean of all."""
    return scores.gather(-1, labels[:, None]).squeeze(-1) - scores.mean(-1)


def mean_margin(scores, labels):
    return margin(scores, labels).mean()


def test_a_function_of_outputs_and_targets_is_averaged_over_samples(monkeypatch) -> None:
    monkeypatch.setattr("holdfast.problem.model_problem.CHUNK_SAMPLES", 7)  # batches of unequal size
    result = train({"margin": margin, "mean_margin": mean_margin})
    expected = margin(outputs(result.models.mean(0), TEST[0]), TEST[1]).mean().item()
    last = result.history.rows[-1]
    assert last["margin"] == pytest.approx(expected, rel=1e-12)
    assert last["mean_margin"] == pytest.approx(expected, rel=1e-12)
    assert {"train_loss", "test_accuracy"} <= set(last)  # a dictionary adds to the default


def test_names_and_functions_mix_in_the_order_given() -> None:
    result = train(["consensus", {"margin": margin}, "p50_margin", "test_margin"])
    assert list(result.history.rows[0])[1:5] == ["consensus", "margin", "p50_margin", "test_margin"]


@pytest.mark.parametrize("backend", ["stacked", "loop"])
def test_figures_of_the_nodes_and_what_is_said_of_them(backend) -> None:
    names = ["test_margin", "p0_margin", "p25_margin", "p100_margin", "node_margin", "node_accuracy"]
    names += ["worst_accuracy", "p10_accuracy", "test_loss", "worst_loss", "test_accuracy"]
    result = train([{"margin": margin}, *names], backend=backend)
    last = result.history.rows[-1]
    scores = [outputs(row, TEST[0]) for row in result.models]
    margins = torch.stack([margin(s, TEST[1]).mean() for s in scores])
    accuracies = torch.stack([(s.argmax(-1) == TEST[1]).double().mean() for s in scores])
    losses = torch.stack([nn.functional.cross_entropy(s, TEST[1]) for s in scores])
    assert margins.std() > 1e-3
    expected = {
        "test_margin": margins.mean(),
        "p0_margin": margins.min(),
        "p25_margin": margins.quantile(0.25),
        "p100_margin": margins.max(),
        "worst_accuracy": accuracies.min(),
        "p10_accuracy": accuracies.quantile(0.1),
        "test_accuracy": accuracies.mean(),
        "test_loss": losses.mean(),
        "worst_loss": losses.max(),
        **{f"margin_node{i}": margins[i] for i in range(NODES)},
        **{f"accuracy_node{i}": accuracies[i] for i in range(NODES)},
    }
    assert {name: last[name] for name in expected} == pytest.approx(
        {name: value.item() for name, value in expected.items()}, rel=1e-9
    )


@pytest.mark.parametrize("algorithm", [hf.Gossip(lr=0.5), hf.FedAvg(lr=0.5, local_steps=2)], ids=str)
def test_each_node_on_its_own_test_set(algorithm) -> None:
    names = ["node_accuracy", "test_accuracy", "average_accuracy", {"margin": margin}, "node_margin"]
    topology = "server" if isinstance(algorithm, hf.FedAvg) else "ring"
    result = train(names, algorithm, test=OWN, topology=topology)
    last = result.history.rows[-1]
    for i, (x, y) in enumerate(OWN):
        scores = outputs(result.models[i], x)
        assert last[f"accuracy_node{i}"] == pytest.approx((scores.argmax(-1) == y).double().mean().item())
        assert last[f"margin_node{i}"] == pytest.approx(margin(scores, y).mean().item())
    assert last["test_accuracy"] == pytest.approx(np.mean([last[f"accuracy_node{i}"] for i in range(NODES)]))
    # The average model on the samples of all.
    common = outputs(result.models.mean(0), TEST[0])
    assert last["average_accuracy"] == pytest.approx((common.argmax(-1) == TEST[1]).double().mean().item())
    assert last["margin"] == pytest.approx(margin(common, TEST[1]).mean().item())


def test_accuracy_of_each_class() -> None:
    last = (result := train(["class_accuracy", "average_accuracy"])).history.rows[-1]
    right = outputs(result.models.mean(0), TEST[0]).argmax(-1) == TEST[1]
    for c in range(3):
        assert last[f"accuracy_class{c}"] == pytest.approx(right[TEST[1] == c].double().mean().item())
    assert len({last[f"accuracy_class{c}"] for c in range(3)}) > 1


def test_a_class_without_samples_is_not_a_number_and_no_divergence() -> None:
    seen = TEST[1] != 2
    result = train(["class_accuracy"], test=(TEST[0][seen], TEST[1][seen]))
    assert result.status == "done"
    assert math.isnan(result.history.rows[-1]["accuracy_class2"])


def test_personal_models_are_a_few_local_steps_away() -> None:
    names = ["personal_loss", "node_personal_accuracy", "worst_personal_accuracy", "average_loss"]
    result = train(names, hf.FedAvg(lr=0.5, local_steps=2), topology="server", test=OWN, personalize=3)
    problem = hf.build_problem(nn.Linear(5, 3), DATA, dtype=torch.float64)
    x, nodes = result.models.contiguous(), torch.arange(NODES)
    for step in range(3):
        [(_, gradient)] = problem.minibatch_values_and_grads([x], nodes, 3, 2**31 + 2**30 + step)
        x = x - 0.5 * gradient
    last = result.history.rows[-1]
    losses = [nn.functional.cross_entropy(outputs(x[i], a), b).item() for i, (a, b) in enumerate(OWN)]
    right = [(outputs(x[i], a).argmax(-1) == b).double().mean().item() for i, (a, b) in enumerate(OWN)]
    assert last["personal_loss"] == pytest.approx(np.mean(losses), rel=1e-9)
    assert [last[f"personal_accuracy_node{i}"] for i in range(NODES)] == pytest.approx(right)
    assert last["worst_personal_accuracy"] == pytest.approx(min(right))
    plain = train(["average_loss"], hf.FedAvg(lr=0.5, local_steps=2), topology="server", test=OWN)
    assert torch.equal(plain.models, result.models)  # looking changes nothing


def test_torchmetrics_objects_and_classes() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    options = {"task": "multiclass", "num_classes": 3}
    auc, f1 = torchmetrics.AUROC(**options), torchmetrics.F1Score(**options, average="macro")
    result = train([{"auc": auc, "f1": f1}, "test_f1"])
    last = result.history.rows[-1]
    for name, make in (("auc", torchmetrics.AUROC(**options)), ("f1", f1.clone())):
        make.update(outputs(result.models.mean(0), TEST[0]), TEST[1])
        assert last[name] == pytest.approx(make.compute().item(), rel=1e-6)
    own = []
    for row in result.models:
        make = f1.clone()
        make.update(outputs(row, TEST[0]), TEST[1])
        own.append(make.compute().item())
    assert last["test_f1"] == pytest.approx(np.mean(own), rel=1e-6)
    assert auc.update_count == 0  # the user's own object stays as it was


def test_scores_for_regression() -> None:
    target = X[:, 0].clone()
    data = hf.FederatedData(X[:60], target[:60], np.array([30, 30]))
    result = hf.train(
        hf.FedAvg(lr=0.1, local_steps=2),
        model=nn.Linear(5, 1),
        data=data,
        rounds=2,
        loss="squared-error",
        dtype="float64",
        test=(X[60:], target[60:]),
        metrics={"mae": lambda z, y: (z.squeeze(-1) - y).abs()},
    )
    away = (X[60:] @ result.models[0, :5] + result.models[0, 5] - target[60:]).abs()
    assert result.history["mae"][-1] == pytest.approx(away.mean().item(), rel=1e-9)


def test_an_experiment_file_names_metrics_by_module(tmp_path, monkeypatch) -> None:
    (tmp_path / "my_scores.py").write_text(
        "def top(z, y):\n    return z.amax(-1)\n\ndef low(z, y):\n    return z.amin(-1)\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    chosen = choose_metrics(
        ["my_scores:top", {"bottom": "my_scores:low"}, "p10_top"], has_test=True, classes=3
    )
    assert list(chosen) == ["top", "bottom", "p10_top"]
    name, score = chosen["bottom"].score
    assert name == "bottom"
    assert score(torch.tensor([[1.0, 3.0]]), None).item() == 1


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (["test_acuracy"], "did you mean 'test_accuracy'"),
        ([{"mae": 3}], "metric 'mae': expected a function of .outputs, targets., got 3"),
        ([{"train_loss": margin}], "metric 'train_loss': this name is taken"),
        ([{"wide": lambda z, y: z}], "metric 'wide': expected one number for each of 20 samples"),
        (["p101_accuracy"], "a percentile lies between 0 and 100"),
        ([{"margin": margin}, "worst_margin"], "whether a high margin is bad is not known"),
        (["personal_accuracy"], "Gossip has no personal models; give personalize=steps"),
    ],
)
def test_mistakes_are_told(metrics, message) -> None:
    with pytest.raises(HoldfastError, match=message):
        train(metrics)


def test_as_many_test_sets_as_nodes() -> None:
    with pytest.raises(HoldfastError, match="one set, or a list of 4, one for each node, got 2"):
        train("default", test=OWN[:2])


class Words(nn.Module):
    """Reads two named inputs and answers with a dictionary, as a Hugging Face model does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, values, mask):
        return {"logits": self.linear(values * mask)}


@pytest.mark.parametrize(
    "step",
    [None, lambda m, b: nn.functional.cross_entropy(m(b["values"], b["mask"])["logits"], b["labels"])],
    ids=["loss", "step"],
)
def test_columns_by_name_and_a_step_of_ones_own(step) -> None:
    mask = (torch.arange(400).view(80, 5) % 3 > 0).double()
    columns = {"values": X, "mask": mask, "labels": Y}
    data = [{name: column[i : i + 15] for name, column in columns.items()} for i in (0, 15, 30, 45)]
    test = [{name: column[i : i + 5] for name, column in columns.items()} for i in (60, 65, 70, 75)]
    torch.manual_seed(0)
    result = hf.train(
        hf.FedAvg(lr=0.5, local_steps=2),
        model=Words(),
        data=data,
        rounds=2,
        step=step,
        test=test,
        dtype="float64",
        metrics=[{"margin": margin}, "node_margin", "average_loss", "minibatch_loss"],
    )
    last = result.history.rows[-1]
    scores = outputs(result.models[0], X * mask)
    assert last["margin"] == pytest.approx(margin(scores[60:], Y[60:]).mean().item(), rel=1e-9)
    assert last["margin_node2"] == pytest.approx(margin(scores[70:75], Y[70:75]).mean().item(), rel=1e-9)
    assert last["average_loss"] == pytest.approx(nn.functional.cross_entropy(scores[60:], Y[60:]).item())
    assert 0 < last["minibatch_loss"] < result.history["minibatch_loss"][0]


def test_scores_need_targets() -> None:
    data = [{"values": X[:30]}, {"values": X[30:60]}]
    with pytest.raises(HoldfastError, match="metrics of outputs need targets: call a column"):
        hf.train(
            hf.FedAvg(lr=0.1),
            model=nn.Linear(5, 1, dtype=torch.float64),
            data=data,
            rounds=1,
            step=lambda m, b: m(b["values"]).square().mean(),
            test={"values": X[60:]},
            dtype="float64",
            metrics={"margin": margin},
        )


def test_partitioned_test_data_are_the_nodes_own() -> None:
    split = hf.FederatedData(*TEST, np.array([4, 6, 1, 9]))
    names = ["node_accuracy", "average_accuracy"]
    apart, listed = train(names, test=split), train(names, test=OWN)
    assert {**apart.history.rows[-1], "seconds": 0} == {**listed.history.rows[-1], "seconds": 0}


def test_a_method_with_personal_models_is_measured_by_them() -> None:
    ditto = hf.Ditto(lr=0.5, local_steps=2, personal_steps=2)
    names = ["node_loss", "node_personal_loss", "average_loss", "p10_personal_accuracy"]
    model = nn.Linear(5, 3)
    problem = hf.build_problem(model, DATA, dtype=torch.float64)
    simulation = hf.Simulation(ditto, problem, hf.server(NODES))
    for _ in range(3):
        simulation.step()
    options = {"model": model, "data": DATA, "rounds": 3, "dtype": "float64", "test": OWN}
    last = hf.train(ditto, **options, metrics=names).history.rows[-1]
    for i, (x, y) in enumerate(OWN):
        loss = nn.functional.cross_entropy(outputs(simulation.personal_models[i], x), y).item()
        assert last[f"loss_node{i}"] == last[f"personal_loss_node{i}"] == pytest.approx(loss, rel=1e-9)
    common = nn.functional.cross_entropy(outputs(simulation.models[0], TEST[0]), TEST[1]).item()
    assert last["average_loss"] == pytest.approx(common, rel=1e-9)


def test_which_way_a_figure_is_better() -> None:
    for name in ("worst_personal_accuracy", "accuracy_node12", "accuracy_class0"):
        assert better(name, None) == "max"
    for name in ("minibatch_loss", "personal_loss_node3", "consensus"):
        assert better(name, None) == "min"
    with pytest.raises(HoldfastError, match="metric 'mae': say mode='max'"):
        better("mae", None)


def test_an_undefined_figure_of_one_node_leaves_the_table_and_the_report(tmp_path: Path) -> None:
    """A node without a sample of class 2 has no recall of it."""
    own = [(x[y != 2], y[y != 2]) if i == 1 else (x, y) for i, (x, y) in enumerate(OWN)]

    def recall(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (scores.argmax(-1) == 2)[y == 2].double().mean()

    found = hf.compare(
        {"FedAvg": hf.FedAvg(lr=0.1), "Local G-ECL": hf.LocalGECL(lr=0.1)},
        model=nn.Linear(5, 3),
        data=DATA,
        test=own,
        rounds=5,
        metrics=["default", {"recall": recall}, "node_recall"],
        progress=False,
    )
    assert set(found.statuses.values()) == {"done"}
    rows = {row.algorithm: row for row in found.record.final_table()}
    assert {row.round for row in rows.values()} == {5}
    assert math.isnan(rows["FedAvg"].values["recall_node1"].mean)
    text, page = found.table(), found.report(tmp_path / "report.html").read_text()
    assert "Nothing was recorded yet" not in page
    for shown in (text, page):
        assert "FedAvg" in shown
        assert "–/5" not in shown
    assert "nan: undefined in that round" in page


def test_where_the_only_figure_is_undefined_the_report_says_so(tmp_path: Path) -> None:
    found = hf.compare(
        {"FedAvg": hf.FedAvg(lr=0.1)},
        model=nn.Linear(5, 3),
        data=DATA,
        test=TEST,
        rounds=1,
        metrics=[{"ratio": lambda scores, y: torch.tensor(torch.nan)}],
        progress=False,
    )
    assert "The ratio is undefined." in found.report(tmp_path / "report.html").read_text()
