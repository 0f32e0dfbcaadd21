"""Mistakes in a user's own losses, steps, metrics and data: each is told in a line that says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

import holdfast as hf

X = torch.linspace(-1, 1, 48).reshape(12, 4)
Y = torch.arange(12) % 3
REAL = X[:, 0] ** 2


def nodes(x: Any, y: Any) -> list[Any]:
    return [(x[i::2], y[i::2]) for i in range(2)]


def train(**changes: Any) -> hf.TrainResult:
    given = {"model": nn.Linear(4, 3), "data": nodes(X, Y), "rounds": 1, "progress": False, **changes}
    return hf.train(hf.FedAvg(lr=0.1), **given)


def stepped(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = functional.cross_entropy(model(batch.x), batch.y)
    loss.backward()
    return loss


class Items(Dataset):
    """Of which one cannot be read."""

    def __init__(self, missing: int, times: int = 1) -> None:
        self.missing, self.times = missing, times

    def __len__(self) -> int:
        return len(X) * self.times

    def __getitem__(self, i: int) -> Any:
        if i == self.missing:
            raise KeyError(f"image{i}.png")
        return X[i % len(X)], int(Y[i % len(X)]) if i < 200 else 3


FRAME = pytest.importorskip("pandas").DataFrame({"age": [40, 50], "ill": [0, 1]})
LATE = torch.cat([Y, torch.tensor([3, 3])])  # the first samples have good labels
LATE_X = torch.cat([X, X[:2]])
ONE = nn.Linear(4, 1)
LOADER = DataLoader(TensorDataset(X, Y), 4)

MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    # an own loss
    "broadcast": (
        {"model": ONE, "data": nodes(X, REAL), "loss": lambda z, y: (z - y).square().mean()},
        r"outputs \(2, 1\) and targets \(2,\) are broadcast, so that every output is compared with every",
    ),
    "broadcast labels": (
        {"model": ONE, "data": nodes(X, (Y > 0).float()), "loss": nn.MSELoss()},
        r"loss MSELoss\(\): outputs .* are broadcast",
    ),
    "late label": (
        {"data": [(LATE_X, LATE)], "loss": nn.CrossEntropyLoss()},
        r"Target 3 is out of bounds; labels go up to 3, and the model has 3 outputs: count classes from 0",
    ),
    "own loss, labels [n, 1]": (
        {"data": nodes(X, Y[:, None]), "loss": nn.CrossEntropyLoss()},
        r"fails on outputs \(2, 3\) and targets \(2, 1\) of torch.int64: .*; class .* y.squeeze\(-1\)",
    ),
    "own loss, classes last": (
        {"data": nodes(X[:, None].expand(-1, 5, 4), Y[:, None].expand(-1, 5)), "loss": nn.CrossEntropyLoss()},
        r"\[2, 5\]; losses of torch want classes second, the model has them last: give loss='cross-entropy'",
    ),
    "own loss, float labels": (
        {"data": nodes(X, Y.float()), "loss": nn.CrossEntropyLoss()},
        r"class numbers are int64: give y.long\(\)",
    ),
    "own loss, whole targets": (
        {"model": ONE, "data": nodes(X, Y[:, None] % 2), "loss": nn.BCEWithLogitsLoss()},
        r"real targets are floats: give y.float\(\)",
    ),
    "no gradient": (
        {"loss": lambda z, y: (z.argmax(1) == y).float().mean()},
        r"loss <lambda> has no gradient: leave out what cuts it off",
    ),
    "class of a loss": (
        {"loss": nn.CrossEntropyLoss},
        r"loss: expected an instance, got the class CrossEntropyLoss; write CrossEntropyLoss\(\)",
    ),
    # class labels
    "labels [n, 1]": (
        {"data": nodes(X, Y[:, None])},
        r"outputs are \(2, 3\), targets \(2, 1\) of torch.int64: give y.squeeze\(-1\)",
    ),
    "float labels": (
        {"data": nodes(X, Y.float())},
        r"torch.float32: give y.long\(\), or for real targets a loss such as 'mse'",
    ),
    "one-hot": ({"data": nodes(X, functional.one_hot(Y))}, r"of one-hot rows give y.argmax\(-1\)$"),
    "one-hot floats": (
        {"data": nodes(X, functional.one_hot(Y).float())},
        r"y.argmax\(-1\), or, if rows are probabilities, loss=nn.CrossEntropyLoss\(\)",
    ),
    "words": (
        {"data": nodes(X, np.array(["a", "b", "c"])[Y])},
        r"give words numbers, the same for all nodes",
    ),
    "whole targets": (
        {"model": ONE, "loss": "mse"},
        r"floating-point numbers, got torch.int64; give y.float",
    ),
    # a step
    "step": (
        {"step": lambda model, batch: model(batch["x"]).mean()},
        r"step <lambda> fails on a batch of x torch.float32 \[4\], y torch.int64 \[\]: tuple indices must be",
    ),
    "model in a step": (
        {"model": nn.Linear(5, 3), "step": lambda model, batch: model(batch.x).mean()},
        r"the model \(Linear\) fails on a batch of shape \(2, 4\)",
    ),
    "backward in a step": (
        {"step": stepped},
        r"step stepped fails .*: it calls backward\(\); return the loss",
    ),
    "detached step": (
        {"step": lambda model, batch: model(batch.x).mean().detach()},
        r"step <lambda> fails .*: nothing it returns depends on the parameters; leave out detach",
    ),
    # metrics
    "accuracy of a step": (
        {"step": lambda m, b: m(b.x).mean(), "test": (X, Y), "metrics": ["test_accuracy"]},
        r"metric 'test_accuracy' needs an accuracy, and this loss has none: give your own, metrics=",
    ),
    "accuracy twice": ({"metrics": {"accuracy": lambda z, y: y}, "test": (X, Y)}, "this name is taken"),
    "no test": ({"metrics": ["test_accuracy"]}, r"metric 'test_accuracy' needs a test set: give test="),
    "metric": (
        {"metrics": {"f": lambda z: z}, "test": (X, Y)},
        r"metric 'f' fails: TypeError: .*; it is given outputs and targets",
    ),
    "nameless metric": (
        {"metrics": [functional.l1_loss]},
        r'metrics: .* needs a name, such as \{"mae": mae\}',
    ),
    # data
    "loaders": ({"data": [LOADER]}, r"got DataLoader; give its dataset, loader.dataset"),
    "loader": ({"data": LOADER}, r"got DataLoader; divide loader.dataset by hf.partition_dataset"),
    "dataset": ({"data": LOADER.dataset}, r"got TensorDataset; divide it by hf.partition_dataset\(dataset, "),
    "function": ({"data": lambda node, round, step: (X, Y)}, r"got function; .* hf.Stream\(nodes=10, batch="),
    "pair": ({"data": (X, Y)}, r"got one pair; divide it by hf.partition\(x, y, hf.IID\(\), nodes=10\)"),
    "inputs alone": ({"test": X}, r'got Tensor; give \(x, y\), or for inputs alone \{"x": x\} and step='),
    "targets in a tuple": (
        {"data": [(X, (Y, Y))]},
        r"node 0, y: expected one tensor of targets, got tuple of 2",
    ),
    "targets in a dictionary": (
        {"data": [(X, {"a": Y})]},
        r"y: expected one tensor of targets, got dict of 1",
    ),
    "test sets": (
        {"test": hf.FederatedData(X, Y, np.array([4, 4, 4]))},
        r"test: expected one set, or a list of 2, one for each node, got 3",
    ),
    "nodes by name": ({"data": {"a": (X, Y), "b": (X, Y)}}, r"give hf.from_datasets\(list\(data.values"),
    "frame": ({"data": FRAME}, r"got DataFrame; read a frame by hf.from_frame\(frame, target"),
    "late label when drawn": (
        {"data": hf.from_datasets([Items(missing=-1, times=40)], streaming=True), "rounds": 9},
        r"labels should be class numbers from 0 to 2, got \[3\]; count classes from 0",
    ),
    "reading": (
        {"data": [Items(missing=3)]},
        r"node 0: reading items 3 fails: KeyError: 'image3.png'",
    ),
    "late reading": (
        {"data": [Items(missing=11)]},
        r"node 0: reading items 0, 1, 2, 3, ... fails: KeyError: 'image11.png'",
    ),
    "three parts": ({"data": [TensorDataset(X, Y, Y)]}, r"item 0 is tuple of 3; expected a pair"),
    "empty test": ({"test": (X[:0], Y[:0])}, r"test: there is no sample"),
    "random augmentation": (
        {"augment": lambda samples, key: samples._replace(x=samples.x + torch.randn(samples.x.shape))},
        r"augment fails .*: it draws random numbers by itself; draw from its key",
    ),
    "no augmentation": ({"augment": lambda samples, key: None}, r"it must return samples like those that it"),
    "name of a column": (
        {"data": [{"input": X, "class": Y}]},
        r"unexpected keyword argument 'class'; columns are the model's arguments, but for the targets: l",
    ),
    # a model
    "single samples": (
        {"model": nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), "batch_size": 1},
        r"batch_size = 1: BatchNorm needs more samples in a batch; give 2 or more",
    ),
    "channels last": (
        {"model": nn.Conv2d(3, 2, 1), "data": [(torch.ones(4, 5, 5, 3), torch.zeros(4, 5, 5).long())]},
        r"images are \[channels, height, width\]: give x.movedim\(-1, 1\)",
    ),
    "features": (
        {"model": nn.Linear(5, 3)},
        r"the model \(Linear\) fails on a batch of shape \(2, 4\): (addmm: )?"
        r"mat1 and mat2 .* \(2x4 and 5x3\)",
    ),
    "whole numbers": ({"data": nodes((10 * X).long(), Y)}, r"of measurements give x.float\(\)"),
    "class of a model": (
        {"model": nn.Identity},
        r"model: expected a module, got <class .*; call it, model=Net",
    ),
}


@pytest.mark.parametrize(("changes", "message"), MISTAKES.values(), ids=MISTAKES)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_mistakes(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(hf.HoldfastError, match=message) as caught:
        train(**changes)
    assert "\n" not in str(caught.value)


def shifted(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(z, y.unsqueeze(1))


def ranked(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of all pairs on purpose."""
    return functional.softplus(-(z - z.mT) * (y[:, None] - y).sign()).mean()


OWN = {
    "squeezed": lambda z, y: functional.mse_loss(z.squeeze(-1), y),
    "first column": lambda z, y: functional.mse_loss(z[:, 0], y),
    "unsqueezed targets": shifted,
    "flat": lambda z, y: functional.mse_loss(z.flatten(), y.flatten()),
    "ranking": ranked,
    "in place": lambda z, y: z.squeeze_(-1).sub_(y).square().mean(),
}


@pytest.mark.parametrize("loss", OWN.values(), ids=OWN)
@pytest.mark.filterwarnings("error")
def test_losses_that_mind_their_shapes_are_taken(loss: Any) -> None:
    assert train(model=ONE, data=nodes(X, REAL), loss=loss).status == "done"


def test_own_losses_of_class_labels_have_an_accuracy() -> None:
    losses: list[Any] = [nn.CrossEntropyLoss(), lambda z, y: functional.cross_entropy(z, y), "cross-entropy"]
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    found = [train(model=model, loss=loss, test=(X, Y)).history["test_accuracy"] for loss in losses]
    assert found[0] == found[1] == found[2]


def test_a_step_may_have_an_accuracy_of_its_own() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    expected = train(model=model, test=(X, Y)).history
    own = train(
        model=model,
        test=(X, Y),
        step=lambda model, batch: functional.cross_entropy(model(batch.x), batch.y),
        metrics={"accuracy": lambda outputs, targets: outputs.argmax(-1) == targets},
    ).history
    for name in ("test_accuracy", "average_accuracy", "worst_accuracy"):
        assert own[name] == pytest.approx(expected[name])
    assert own["accuracy"] == own["average_accuracy"]


def test_outputs_that_are_probabilities_are_told() -> None:
    with pytest.warns(UserWarning, match="outputs are probabilities, and CrossEntropy takes scores"):
        train(model=nn.Sequential(nn.Linear(4, 3), nn.Softmax(dim=-1)))


def test_data_of_one_node_are_a_common_test_set() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    common = train(model=model, test=hf.FederatedData(X, Y, np.array([12])))
    assert common.history["test_accuracy"] == train(model=model, test=(X, Y)).history["test_accuracy"]


def test_a_step_size_that_is_far_too_large_is_told() -> None:
    with pytest.warns(RuntimeWarning, match=r"FedAvg: the train_loss grew from .* to 1\.?\d*e\+\d+; try a"):
        hf.train(hf.FedAvg(lr=1e20, local_steps=5), model=nn.Linear(4, 3), data=nodes(X, Y), rounds=10)


def test_an_initial_model_that_is_not_finite_is_told() -> None:
    model = nn.Linear(4, 3)
    nn.init.constant_(model.weight, torch.nan)
    with pytest.warns(RuntimeWarning, match="by round 0: the initial model's are not finite: look at its"):
        assert train(model=model).status == "diverged"


def test_other_files_are_no_results(tmp_path: Path) -> None:
    (tmp_path / "mine.pt").write_text("something else")
    with pytest.raises(hf.HoldfastError, match=r"mine.pt is not a file that result.save wrote, or it is dam"):
        hf.load_result(tmp_path / "mine.pt", nn.Linear(4, 3))


@pytest.mark.parametrize("call", [hf.compare, hf.tune])
def test_unknown_arguments_are_refused(call: Any) -> None:
    methods: Any = {"a": hf.FedAvg(lr=0.1)} if call is hf.compare else hf.FedAvg(lr=0.1)
    given: dict[str, Any] = {"model": nn.Linear(4, 3), "data": nodes(X, Y), "rounds": 1}
    with pytest.raises(
        hf.HoldfastError, match=rf"argument of hf.{call.__name__} 'tests': did you mean 'test'"
    ):
        call(methods, **given, tests=(X, Y))
    with pytest.raises(hf.HoldfastError, match=r"seeds: each once, got \[1, 1\]"):
        call(methods, **given, seeds=[1, 1])
    with pytest.raises(hf.HoldfastError, match=r"seeds: expected a list such as \[0, 1, 2\] or .*, got 3"):
        call(methods, **given, seeds=3)


def test_names_of_a_comparison_are_words() -> None:
    methods: Any = {1: hf.FedAvg(lr=0.1)}
    with pytest.raises(hf.HoldfastError, match="algorithms: expected names and methods, such as"):
        hf.compare(methods, model=nn.Linear(4, 3), data=nodes(X, Y), rounds=1)


@pytest.mark.parametrize("model", [nn.Linear, lambda seed: nn.Linear(4, 3)])
def test_the_function_of_a_model_takes_no_arguments(model: Any) -> None:
    with pytest.raises(
        hf.HoldfastError, match=r"model: expected a function without arguments, .* missing a req"
    ):
        hf.compare({"a": hf.FedAvg(lr=0.1)}, model=model, data=nodes(X, Y), rounds=1)


def test_a_function_of_a_tuning_makes_methods() -> None:
    wrong: Any = lambda lr: 3  # noqa: E731
    with pytest.raises(hf.HoldfastError, match="algorithm: expected the function to make a method, got 3"):
        hf.tune(wrong, model=nn.Linear(4, 3), data=nodes(X, Y), rounds=1, values=[0.1, 0.2])


def test_values_of_a_tuning_are_a_list() -> None:
    with pytest.raises(hf.HoldfastError, match=r"values: expected a list such as .*, got 0.1"):
        hf.tune(hf.FedAvg(lr=0.1), model=nn.Linear(4, 3), data=nodes(X, Y), rounds=1, values=0.1)


def test_early_stopping_knows_near_names() -> None:
    with pytest.raises(
        hf.HoldfastError, match=r"metric 'acuracy': did you mean 'test_accuracy'\? If not, say"
    ):
        hf.EarlyStopping("acuracy")
    with pytest.raises(
        hf.HoldfastError, match=r"no metric 'training_loss' is recorded; .*mean 'train_loss'\?"
    ):
        train(callbacks=[hf.EarlyStopping("training_loss")])


def test_python_itself_suggests_the_nearest_name() -> None:
    with pytest.raises(AttributeError) as caught:
        _ = hf.FedAVG
    assert (caught.value.name, caught.value.obj) == ("FedAVG", hf)
