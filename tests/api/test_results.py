"""What training gives back: models of nodes, files without pickle, short reprs."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import holdfast as hf

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] > 0).long()


class Net(nn.Module):
    """With a frozen layer, a buffer and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.again = self.head
        self.body.requires_grad_(False)
        self.register_buffer("shift", torch.tensor(0.5))

    def forward(self, x):
        return self.again(torch.tanh(self.body(x - self.shift)))


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="module")
def result() -> hf.TrainResult:
    data = [(X[i::4], Y[i::4]) for i in range(4)]
    method = hf.LocalGECL(lr=0.1, local_steps=2)
    options = {"topology": "ring", "rounds": 4, "batch_size": 4, "evaluate_every": 1}
    return hf.train(method, model=net(), data=data, test=(X, Y), **options)


def test_the_model_of_each_node(result: hf.TrainResult) -> None:
    models = [result.node_model(node) for node in range(4)]
    accuracies = [float((model(X).argmax(-1) == Y).double().mean()) for model in models]
    assert all(type(model) is Net for model in models)
    assert result.history["test_accuracy"][-1] == pytest.approx(sum(accuracies) / 4, abs=1e-12)
    assert result.history["worst_accuracy"][-1] == pytest.approx(min(accuracies), abs=1e-12)
    rows = torch.stack([torch.cat([p.flatten() for p in m.head.parameters()]) for m in models])
    assert torch.equal(rows, result.models)
    with pytest.raises(hf.HoldfastError, match=r"node 4 does not exist: expected 0\.\.3"):
        result.node_model(4)


def test_a_personalised_method_gives_every_node_its_own_model() -> None:
    """Those that the figures are of; the common model is FedAvg's."""
    data = [(X[i::4], Y[i::4]) for i in range(4)]
    options = {"data": data, "topology": "server", "rounds": 4, "batch_size": 4, "test": (X, Y)}
    ditto, fedavg = (
        hf.train(method(lr=0.1, local_steps=2), model=net(), **options) for method in (hf.Ditto, hf.FedAvg)
    )
    states = ditto.model.state_dict().values(), fedavg.model.state_dict().values()
    assert all(map(torch.equal, *states))
    models = [ditto.node_model(node) for node in range(4)]
    assert torch.pdist(ditto.models).min() > 1e-3
    accuracies = [float((model(X).argmax(-1) == Y).double().mean()) for model in models]
    assert ditto.history["test_accuracy"][-1] == pytest.approx(sum(accuracies) / 4, abs=1e-12)


def test_saved_and_read_back(result: hf.TrainResult, tmp_path: Path) -> None:
    result.save(tmp_path / "result.safetensors")
    other = Net()
    nn.init.zeros_(other.body.weight)
    found = hf.load_result(tmp_path / "result.safetensors", other)
    assert found.history == result.history
    assert found.status == result.status
    assert torch.equal(found.models, result.models)
    assert torch.equal(found.model(X), result.model(X))
    assert not found.model.body.weight.requires_grad
    # without holdfast: the average model's state_dict, nothing pickled
    tensors = safetensors.torch.load_file(tmp_path / "result.safetensors")
    plain = Net()
    plain.load_state_dict({k.removeprefix("model."): t for k, t in tensors.items() if k != "models"})
    assert torch.equal(plain(X), result.model(X))


def test_nodes_read_back_compute_the_same(result: hf.TrainResult, tmp_path: Path) -> None:
    """The frozen layers of a node's model are those that were trained with, not those of the template."""
    result.save(tmp_path / "result")
    other = Net()
    nn.init.zeros_(other.body.weight)
    found = hf.load_result(tmp_path / "result", other)
    assert torch.equal(found.node_model(2)(X), result.node_model(2)(X))


def test_what_is_no_result_is_refused(result: hf.TrainResult, tmp_path: Path) -> None:
    with pytest.raises(hf.HoldfastError, match=r"there is no file .*nothing"):
        hf.load_result(tmp_path / "nothing", net())
    result.save(tmp_path / "result")
    with pytest.raises(hf.HoldfastError, match="its parameters are not called or shaped like those in"):
        hf.load_result(tmp_path / "result", nn.Linear(4, 2))
    (tmp_path / "other").write_bytes(b"something")
    with pytest.raises(hf.HoldfastError, match="other is not a"):
        hf.load_result(tmp_path / "other", net())
    with pytest.raises(hf.HoldfastError, match="cannot write the result"):
        result.save(tmp_path / "no" / "folder")


def test_reprs_are_short(result: hf.TrainResult) -> None:
    last = result.history.rows[-1]
    assert repr(result) == (
        f"TrainResult(done after round 4: test_accuracy {last['test_accuracy']:.4g}, average_loss "
        f"{last['average_loss']:.4g}, train_loss {last['train_loss']:.4g}; 4 nodes, 10 parameters)"
    )
    assert repr(result.history).startswith("History(5 rows, rounds 0 to 4: test_accuracy, worst_accuracy, ")
    found = hf.minimize([lambda x: (x**2).sum()], [1.0, 2.0], hf.FedAvg(lr=0.5), 2)
    assert repr(found) == "MinimizeResult(done after round 2: train_loss 0; 1 nodes, 2 parameters)"


def test_results_are_pictures(result: hf.TrainResult) -> None:
    [axes] = result.plot("train_loss").axes
    assert axes.get_ylabel() == "training loss"
    assert result.plot().axes
