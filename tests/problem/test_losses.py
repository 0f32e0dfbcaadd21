from __future__ import annotations

from math import exp, log, log1p

import pytest
import torch
from torch.func import grad, vmap
from torch.nn import functional

from holdfast.core.errors import HoldfastError
from holdfast.problem.losses import LOSSES, CrossEntropy, Hinge, Logistic, SquaredError


@pytest.fixture
def scores():
    return torch.randn(9, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture
def labels():
    return torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3])


def test_names():
    assert list(LOSSES) == [
        *("bce", "cross-entropy", "hinge", "huber", "l1", "logistic", "mse", "squared-error"),
        "training-step",
    ]
    assert LOSSES.build("hinge", {}) == Hinge()
    assert all(LOSSES.describe(name)["summary"].endswith(".") for name in LOSSES)


def test_by_hand():
    scores, label = torch.tensor([[1.0, 2.0, 0.5]], dtype=torch.float64), torch.tensor([0])
    assert CrossEntropy().values(scores, label).item() == pytest.approx(log(exp(1) + exp(2) + exp(0.5)) - 1)
    assert Hinge().values(scores, label).item() == pytest.approx((2.0 + 0.5) / 3)
    assert Logistic().values(scores[:, 0], torch.tensor([-1.0])).item() == pytest.approx(log(1 + exp(1)))
    assert SquaredError().values(scores[:, 1], torch.tensor([5.0])).item() == 4.5


def test_against_torch(scores, labels):
    hinge = functional.multi_margin_loss(scores, labels, reduction="none")
    torch.testing.assert_close(Hinge().values(scores, labels), hinge, rtol=1e-14, atol=1e-14)
    entropy = functional.nll_loss(scores.log_softmax(-1), labels, reduction="none")
    torch.testing.assert_close(CrossEntropy().values(scores, labels), entropy, rtol=1e-14, atol=1e-14)
    bits = labels % 2
    binary = functional.binary_cross_entropy_with_logits(scores[:, 0], bits.double(), reduction="none")
    torch.testing.assert_close(Logistic().values(scores[:, :1], bits), binary, rtol=1e-14, atol=1e-14)
    half = functional.mse_loss(scores[:, 0], scores[:, 1], reduction="none") / 2
    torch.testing.assert_close(
        SquaredError().values(scores[:, :1], scores[:, 1]), half, rtol=1e-14, atol=1e-14
    )


def test_two_kinds_of_binary_labels_agree(scores, labels):
    bits = labels % 2
    signs = 2.0 * bits - 1
    assert torch.equal(Logistic().values(scores[:, 0], bits), Logistic().values(scores[:, 0], signs))
    assert torch.equal(Logistic().correct(scores[:, 0], bits), Logistic().correct(scores[:, 0], signs))


def test_extreme_outputs_stay_exact():
    z = torch.tensor([30.0, -30.0, 1000.0, -1000.0], dtype=torch.float64, requires_grad=True)
    values = Logistic().values(z, torch.ones(4, dtype=torch.float64))
    expected = [log1p(exp(-30)), 30 + log1p(exp(-30)), 0.0, 1000.0]
    assert values.tolist() == pytest.approx(expected, rel=1e-15, abs=0)
    values.sum().backward()
    assert z.grad.tolist() == pytest.approx(
        [-1 / (1 + exp(30)), -1 / (1 + exp(-30)), 0.0, -1.0], rel=1e-15, abs=0
    )
    scores = torch.tensor([[1000.0, -1000.0]])
    assert CrossEntropy().values(scores, torch.tensor([1])).item() == 2000.0
    slopes = grad(lambda at: CrossEntropy().differentiable(at, torch.tensor([1])).sum())(scores)
    assert slopes.tolist() == [[1.0, -1.0]]


def test_hinge_at_the_margin():
    # As torch has it: a class exactly at the margin contributes no gradient.
    scores, label = torch.tensor([[1.0, 0.0]]), torch.tensor([0])
    slope = grad(lambda s: Hinge().values(s, label).sum())(scores)
    reference = grad(lambda s: functional.multi_margin_loss(s, label, reduction="sum"))(scores)
    assert torch.equal(slope, reference)


def test_correct():
    scores = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
    for loss in (CrossEntropy(), Hinge()):
        assert loss.has_accuracy
        assert loss.correct(scores, torch.tensor([1, 1])).tolist() == [1.0, 0.0]
    assert Logistic().correct(torch.tensor([[0.5], [-0.5], [2.0]]), torch.tensor([1, 0, 0])).tolist() == [
        1,
        1,
        0,
    ]
    assert not SquaredError().has_accuracy
    with pytest.raises(HoldfastError, match="SquaredError has no accuracy"):
        SquaredError().correct(scores[:, 0], torch.ones(2))


def test_outputs():
    assert (CrossEntropy().outputs(10), Hinge().outputs(3), Logistic().outputs(2)) == (10, 3, 1)
    assert (Logistic().outputs(None), SquaredError().outputs(None)) == (1, 1)
    with pytest.raises(HoldfastError, match="needs class labels"):
        CrossEntropy().outputs(None)
    with pytest.raises(HoldfastError, match="takes two classes, this data has 3"):
        Logistic().outputs(3)


def test_good_targets_pass():
    CrossEntropy().check_targets(torch.tensor([0, 2]), classes=3)
    Logistic().check_targets(torch.tensor([0, 1]), classes=2)
    Logistic().check_targets(torch.tensor([-1.0, 1.0]), classes=None)
    SquaredError().check_targets(torch.tensor([0.3]), classes=None)


@pytest.mark.parametrize(
    ("loss", "targets", "classes", "message"),
    [
        (CrossEntropy(), torch.tensor([0, 3]), 3, r"class numbers from 0 to 2, got \[3\]"),
        (Hinge(), torch.tensor([-1, 1]), 3, r"class numbers from 0 to 2, got \[-1\]"),
        (Hinge(), torch.tensor([0.0]), 3, "int64, got torch.float32"),
        (CrossEntropy(), torch.tensor([[0, -1]]), 3, r"class numbers from 0 to 2, got \[-1\]"),
        (
            Logistic(),
            torch.tensor([0.0, 1.0]),
            None,
            r"-1 or 1 where their type is torch.float32, got \[0.0\]",
        ),
        (Logistic(), torch.tensor([-1, 1]), None, r"0 or 1 where their type is torch.int64, got \[-1\]"),
        (Logistic(), torch.tensor([True]), None, "got torch.bool"),
        (SquaredError(), torch.tensor([1]), None, "floating-point numbers, got torch.int64"),
        (SquaredError(), torch.tensor([1.0, float("nan")]), None, r"finite, got \[nan\]"),
    ],
)
def test_bad_targets(loss, targets, classes, message):
    with pytest.raises(HoldfastError, match=message) as error:
        loss.check_targets(targets, classes)
    assert "\n" not in str(error.value)


def test_outputs_never_broadcast():
    with pytest.raises(HoldfastError, match=r"one number for each of 3 samples, got \(3, 2\)"):
        SquaredError().values(torch.zeros(3, 2), torch.zeros(3))
    with pytest.raises(HoldfastError, match=r"shape \(3, classes\), got \(3,\)"):
        CrossEntropy().values(torch.zeros(3), torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "training-step"])
def test_stacked_gradients_equal_the_loop(name, scores, labels):
    loss = LOSSES.build(name, {})
    stacked = torch.stack([scores, 2 * scores, scores - 1])
    if loss.outputs(classes=2) == 1:
        stacked, targets = stacked[..., :1], (2.0 * (labels % 2) - 1).double()
    else:
        targets = labels
    slope = grad(lambda outputs: loss.differentiable(outputs, targets).mean())
    expected = vmap(grad(lambda outputs: loss.values(outputs, targets).mean()))(stacked)
    together, one_by_one = vmap(slope)(stacked), torch.stack([slope(outputs) for outputs in stacked])
    assert together.dtype == torch.float64
    torch.testing.assert_close(together, one_by_one, rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(together, expected, rtol=1e-13, atol=1e-15)
