"""What users bring: dictionary batches, targets of any shape, their own loss or training step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import holdfast as hf
from holdfast.problem.losses import LOSSES, CrossEntropy

DRAW = torch.Generator().manual_seed(0)
COUNTS = [5, 9, 6]
NODES = torch.arange(3)


class Tagger(nn.Module):
    """Scores [B, T, 4] of tokens in a dictionary, as Hugging Face gives; masked tokens count as token 0."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.score = nn.Embedding(7, 3), nn.Linear(3, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.score(self.embed(input_ids * attention_mask))
        if labels is None:
            return {"logits": logits}
        return {"logits": logits, "loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def sentences(ignored: bool = False) -> list[dict[str, Tensor]]:
    nodes = []
    for count in COUNTS:
        words = torch.randint(7, (count, 6), generator=DRAW)
        labels = torch.randint(4, (count, 6), generator=DRAW)
        if ignored:
            labels[:, 4:] = -100
        nodes.append({"input_ids": words, "attention_mask": (words > 1).long(), "labels": labels})
    return nodes


def problem_of(model: nn.Module, nodes: list[Any], **options: Any) -> Any:
    problem = hf.build_problem(model, hf.FederatedData.of_nodes(nodes), dtype=torch.float64, **options)
    problem.check_model()
    return problem


def torch_gradient(problem: Any, loss: Any) -> Tensor:
    """By plain torch: the gradient of ``loss(model)`` at x0."""
    module = problem.model.module(problem.x0).double()
    for parameter in module.parameters():
        parameter.grad = None
    loss(module).backward()
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.requires_grad])


def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch)["loss"]


@pytest.mark.parametrize("backend", ["stacked", "loop"])
@pytest.mark.parametrize("ignored", [False, True])
def test_a_users_step_on_dictionaries(backend, ignored) -> None:
    torch.manual_seed(0)
    nodes = sentences(ignored)
    problem = problem_of(Tagger(), nodes, step=step, backend=backend, batch_size="full")
    x = problem.x0.expand(3, -1).contiguous()
    for node, gradient in zip(nodes, problem.full_grads(x, NODES), strict=True):
        expected = torch_gradient(problem, lambda model, node=node: step(model, node))
        assert torch.allclose(gradient, expected, rtol=1e-12, atol=1e-14)
    values = problem.values(x, NODES)
    assert torch.allclose(problem.global_value(problem.x0), values.mean(), rtol=1e-12)


@pytest.mark.parametrize("ignored", [False, True])
def test_tokens_with_the_built_in_loss(ignored) -> None:
    torch.manual_seed(0)
    nodes = sentences(ignored)
    problem = problem_of(Tagger(), nodes, batch_size="full")
    own = problem_of(Tagger(), nodes, step=step, batch_size="full")
    x = torch.randn(3, problem.dim, dtype=torch.float64, generator=DRAW)
    # Every sentence counts as many tokens, so the mean over sentences is that over tokens.
    assert torch.allclose(problem.full_grads(x, NODES), own.full_grads(x, NODES), rtol=1e-10)
    accuracy, _ = problem.tester.test(x, problem.test_set(nodes[1]))
    scores = problem.model.module(x[0]).double()(**{k: v for k, v in nodes[1].items() if k != "labels"})
    right = (scores["logits"].argmax(-1) == nodes[1]["labels"]).double()
    counted = nodes[1]["labels"] != -100
    assert accuracy[0].item() == pytest.approx(right[counted].mean().item())


def test_a_sequence_loss_says_which_tokens_count_by_hand() -> None:
    scores = torch.randn(2, 3, 4, dtype=torch.float64, generator=DRAW)
    targets = torch.tensor([[1, -100, 2], [-100, -100, -100]])
    each = [functional.cross_entropy(scores[0, i], targets[0, i]) for i in (0, 2)]
    assert torch.allclose(CrossEntropy().values(scores, targets)[0], torch.stack(each).mean())
    assert CrossEntropy().values(scores, targets)[1].item() == 0
    assert torch.equal(
        CrossEntropy().values(scores, targets), CrossEntropy().values(scores.movedim(-1, 1), targets)
    )


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0])),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        lambda outputs, targets: functional.cross_entropy(outputs, targets, reduction="none"),
    ],
    ids=["weighted", "smoothed", "per sample"],
)
@pytest.mark.parametrize("backend", ["stacked", "loop"])
def test_a_loss_of_torch_is_what_torch_computes(loss, backend) -> None:
    torch.manual_seed(0)
    nodes = [
        (torch.randn(count, 4, generator=DRAW), torch.randint(3, (count,), generator=DRAW))
        for count in COUNTS
    ]
    problem = problem_of(nn.Linear(4, 3), nodes, loss=loss, backend=backend, batch_size="full")
    reference = loss.double() if isinstance(loss, nn.Module) else loss
    gradients = problem.full_grads(problem.x0.expand(3, -1).contiguous(), NODES)
    for (x, y), gradient in zip(nodes, gradients, strict=True):
        expected = torch_gradient(problem, lambda m, x=x, y=y: reference(m(x.double()), y).mean())
        assert torch.allclose(gradient, expected, rtol=1e-6, atol=1e-7)  # x was stored as float32


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 2)])
@pytest.mark.parametrize(
    ("name", "torch_loss"),
    [
        ("mse", nn.MSELoss()),
        ("l1", nn.L1Loss()),
        ("huber", nn.HuberLoss()),
        ("bce", nn.BCEWithLogitsLoss()),
    ],
)
def test_aliases_are_the_losses_of_torch_for_targets_of_any_shape(name, torch_loss, shape) -> None:
    outputs = 2 * torch.randn(5, *shape, dtype=torch.float64, generator=DRAW)
    targets = torch.rand(5, *shape, dtype=torch.float64, generator=DRAW)
    values = LOSSES.build(name, {}).values(outputs, targets)
    assert values.shape == (5,)
    assert torch.allclose(values.mean(), torch_loss(outputs, targets), rtol=1e-12)


def test_column_targets_and_several_outputs_train() -> None:
    weight = torch.randn(4, 2, generator=DRAW)
    x = torch.randn(40, 4, generator=DRAW)
    for targets, outputs in ((x @ weight, 2), ((x @ weight)[:, :1], 1)):
        nodes = [(x[i::2], targets[i::2]) for i in range(2)]
        result = hf.train(
            hf.FedAvg(lr=0.3, local_steps=2), model=nn.Linear(4, outputs), data=nodes, rounds=60, loss="mse"
        )
        assert result.history["train_loss"][-1] < 1e-3 * result.history["train_loss"][0]


def test_masks_of_pixels() -> None:
    images = torch.randn(12, 1, 4, 4, generator=DRAW)
    masks = (images[:, 0] > 0).long()
    nodes = [(images[i::2], masks[i::2]) for i in range(2)]
    result = hf.train(
        hf.LocalGECL(lr=0.5, local_steps=3),
        model=nn.Conv2d(1, 2, 1),
        data=nodes,
        rounds=60,
        topology="ring",
        test=(images, masks),
    )
    assert result.history["test_accuracy"][-1] > 0.95


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": lambda outputs, targets: outputs}, r"gives \(2, 3\) for 2 samples; expected one number"),
        ({"loss": nn.NLLLoss(weight=torch.ones(2))}, r"loss NLLLoss\(\) fails on outputs \(2, 3\)"),
        ({"step": lambda model, batch: 1.0}, "step must return the loss as a tensor"),
        ({"loss": nn.CrossEntropyLoss(reduction="sum")}, "sums over the batch, .* use reduction='mean'"),
        ({"loss": 3}, "loss: expected a name such as 'cross-entropy'"),
        ({"loss": "mse", "step": lambda model, batch: model(batch.x).mean()}, "leave loss= out, or step="),
        ({"model": nn.Linear(4, 1)}, "gives one number for each label, and CrossEntropy needs one for each"),
        ({"callbacks": hf.EarlyStopping("train_loss")}, "callbacks: expected a list such as"),
        (
            {"model": nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), "sampling": "epochs"}
            | {"batch_size": 4},
            "they are padded, and BatchNorm would count the padding",
        ),
    ],
)
def test_mistakes_get_one_line(options, message) -> None:
    x, y = torch.randn(6, 4, generator=DRAW), torch.arange(6) % 3
    given = {"model": nn.Linear(4, 3), "data": [(x, y)], "rounds": 1, **options}
    with pytest.raises(hf.HoldfastError, match=message) as caught:
        hf.train(hf.FedAvg(lr=0.1), **given)
    assert "\n" not in str(caught.value)


def test_a_loss_per_sample_may_be_padded() -> None:
    x, y = torch.randn(6, 4, generator=DRAW), torch.arange(6) % 3
    loss = nn.CrossEntropyLoss(reduction="none")
    options: dict[str, Any] = {"data": [(x, y)], "rounds": 2, "batch_size": 4, "sampling": "epochs"}
    result = hf.train(hf.FedAvg(lr=0.1), model=nn.Linear(4, 3), loss=loss, **options)
    assert result.status == "done"


def test_dictionaries_without_targets_need_a_step() -> None:
    data = [{"input": torch.ones(4, 3)}]
    with pytest.raises(hf.HoldfastError, match="needs targets: call a column one of labels"):
        hf.train(hf.FedAvg(lr=0.1), model=nn.Linear(3, 2), data=data, rounds=1)


def test_a_frozen_part_keeps_its_type() -> None:
    body, head = nn.Linear(4, 8).bfloat16().requires_grad_(False), nn.Linear(8, 3)
    model = nn.Sequential(body, head)
    x, y = torch.randn(30, 4, generator=DRAW), torch.arange(30) % 3

    def run(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model[1](model[0](batch.x.bfloat16()).float()), batch.y)

    result = hf.train(hf.FedAvg(lr=0.1), model=model, data=[(x, y)], rounds=2, step=run)
    assert result.model[0].weight.dtype == torch.bfloat16
    assert np.isfinite(result.history["train_loss"]).all()


# --- labels that do not count --------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (2,)], ids=["one label", "two labels"])
def test_samples_without_a_label_that_counts_are_none(shape: tuple[int, ...]) -> None:
    """Training with them is training without them, in the mean, in minibatches and in tests."""
    x = torch.randn(12, 4, dtype=torch.float64, generator=DRAW)
    y = torch.randint(3, (12, *shape), generator=DRAW)
    y[[1, 4, 9]] = -100
    kept = (y != -100).reshape(12, -1).any(1)
    if shape:
        y[0, 1] = -100  # the other still counts
    model = nn.Linear(4, 3) if not shape else nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (2, 3)))
    parts = [slice(0, 6), slice(6, 12)]
    given = [(x[part], y[part]) for part in parts]
    without = [(x[part][kept[part]], y[part][kept[part]]) for part in parts]
    options: dict[str, Any] = {"model": model, "rounds": 3, "batch_size": 2, "dtype": "float64"}
    method = hf.LocalGECL(lr=0.1, local_steps=2)
    expected = hf.train(method, data=without, test=without, topology="ring", **options)
    with pytest.warns(UserWarning, match=r"data: 3 of 12 samples have no label that counts, all are -100"):
        found = hf.train(method, data=given, test=given, topology="ring", **options)
    assert torch.equal(found.models, expected.models)
    for name in ("train_loss", "average_loss", "test_accuracy"):
        assert found.history[name] == expected.history[name]


def test_a_node_needs_labels_that_count() -> None:
    data = [(torch.ones(2, 3), torch.tensor([0, 1])), (torch.ones(2, 3), torch.tensor([-100, -100]))]
    with pytest.raises(hf.HoldfastError, match="data: node 1 has no sample with a label that counts"):
        hf.train(hf.FedAvg(lr=0.1), model=nn.Linear(3, 2), data=data, rounds=1)


def test_losses_refuse_samples_without_labels() -> None:
    for targets in (torch.tensor([0, -100]), torch.tensor([[0, 1], [-100, -100]])):
        with pytest.raises(hf.HoldfastError, match="sample 1 has no label that counts, all are -100: leave"):
            CrossEntropy().check_targets(targets, classes=2)


def test_an_own_loss_sees_all_samples() -> None:
    """Which may be a loss of samples without labels, and has no accuracy then."""
    x, y = torch.randn(6, 4, generator=DRAW), torch.tensor([0, 1, 2, -100, 0, 1])
    result = hf.train(
        hf.FedAvg(lr=0.1),
        model=nn.Linear(4, 3),
        data=[(x, y)],
        test=(x, y),
        rounds=1,
        loss=nn.CrossEntropyLoss(),
    )
    assert "test_accuracy" not in result.history.rows[0]
    weights, bias = result.model.weight.detach(), result.model.bias.detach()
    counted = functional.cross_entropy(x @ weights.mT + bias, y)  # torch leaves -100 out
    assert result.history["average_loss"][-1] == pytest.approx(counted.item(), rel=1e-5)


def test_samples_without_labels_are_refused_when_they_are_read() -> None:
    x, y = torch.ones(200, 4), torch.arange(200) % 3
    y[100:] = -100
    data = hf.from_datasets([TensorDataset(x, y)], streaming=True)
    with pytest.raises(hf.HoldfastError, match="has no label that counts, all are -100: leave it out"):
        hf.train(hf.FedAvg(lr=0.1), model=nn.Linear(4, 3), data=data, rounds=9)
