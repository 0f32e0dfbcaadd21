from __future__ import annotations

import pytest
import torch
from torch import nn

from holdfast.core.errors import HoldfastError
from holdfast.data.samples import Pair
from holdfast.models import Dropout
from holdfast.problem.forward import forward
from holdfast.problem.gradients.support import NarrowLinear, PlaneConv2d, check_supported, probe


class Stateful(nn.Module):
    """A layer that does in forward what ``how`` says."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.how == "in place":
            self.seen += 1
        elif self.how == "rebind":
            self.seen = self.seen + x.mean()
        elif self.how == "item" and x.mean().item() > 0:
            return x + 1
        elif self.how == "random":
            return x + torch.rand_like(x)
        elif self.how == "tuple":
            return x, x
        return x


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))


def frozen(layer):
    return layer.requires_grad_(False)


X = torch.ones(4, 3)


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(3, 4), nn.GroupNorm(2, 4), nn.ReLU(inplace=True)),
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False)),
        nn.Sequential(frozen(nn.Linear(3, 4)), nn.BatchNorm1d(4).eval(), nn.Linear(4, 4)),
        nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.0), Dropout(0.5), Dropout(0.5, layer=1)),
        nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1), nn.Sequential(nn.AlphaDropout(0.1))),
        nn.Sequential(Tied(), nn.Linear(3, 4)),
        nn.Sequential(nn.Linear(3, 4), Stateful("nothing")),
    ],
)
def test_fine(module):
    check_supported(module)
    assert probe(module, forward, Pair(X, X)).shape == (4, 4)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.InstanceNorm1d(3, track_running_stats=True), r"layer '1' \(InstanceNorm1d\).*GroupNorm"),
        (nn.SyncBatchNorm(3), r"layer '1' \(SyncBatchNorm\).*GroupNorm"),
        (nn.Embedding(3, 3, max_norm=1.0), r"layer '1' \(Embedding\).*leave max_norm out"),
        (nn.LazyLinear(3), r"layer '1' \(LazyLinear\).*'weight' has no shape yet"),
        (nn.Sequential(Dropout(0.1), Dropout(0.1)), r"layer '1.1' \(Dropout\).*what '1.0' drops"),
        (nn.Linear(3, 3).double(), "'0.weight' is torch.float32, '1.weight' torch.float64"),
        (nn.Linear(3, 3, dtype=torch.complex64), "'1.weight' is torch.complex64"),
    ],
)
def test_unsupported_layers(module, message):
    with pytest.raises(HoldfastError, match=message) as error:
        check_supported(nn.Sequential(nn.Linear(3, 3), module))
    assert "\n" not in str(error.value)


def test_nothing_to_train():
    with pytest.raises(HoldfastError, match="no parameter to train"):
        check_supported(frozen(nn.Linear(3, 3)))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Stateful("in place"), r"layer '1' \(Stateful\) fails.*changes a buffer in place"),
        (Stateful("rebind"), "replaces its buffer '1.seen' in forward"),
        (Stateful("item"), r"layer '1' \(Stateful\) fails.*reads the value of a tensor"),
        (Stateful("random"), r"layer '1' \(Stateful\) fails.*draws random numbers"),
        (
            nn.Sequential(nn.Linear(5, 3)),
            r"layer '1.0' \(Linear\) fails on a batch of shape \(4, 3\): (addmm: )?mat1",
        ),
    ],
)
def test_probe_names_the_layer(layer, message):
    module = nn.Sequential(nn.Linear(3, 3), layer)
    check_supported(module)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    with pytest.raises(HoldfastError, match=message) as error:
        probe(module, forward, Pair(X, X))
    assert "\n" not in str(error.value)
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert not layer._forward_hooks


@pytest.mark.parametrize(
    ("layer", "kind", "x"),
    [
        (nn.Linear(4, 3), NarrowLinear, torch.zeros(2, 5)),
        (nn.Linear(4, 3), NarrowLinear, torch.zeros(5)),
        (nn.Conv2d(1, 2, 3), PlaneConv2d, torch.zeros(2, 3, 6, 6)),  # not the first of three planes
        (nn.Conv2d(1, 2, 3), PlaneConv2d, torch.zeros(2, 6)),
    ],
)
def test_layers_in_another_form_refuse_the_same(layer, kind, x):
    with pytest.raises(RuntimeError) as plain:
        layer(x)
    layer.__class__ = kind
    with pytest.raises(RuntimeError) as other:
        layer(x)
    assert str(other.value) == str(plain.value)


def test_layers_in_another_form_take_single_samples():
    for layer, kind, x in (
        (nn.Linear(4, 3), NarrowLinear, torch.randn(4)),
        (nn.Conv2d(1, 2, 3), PlaneConv2d, torch.randn(1, 6, 6)),
    ):
        expected = layer(x)
        layer.__class__ = kind
        assert torch.equal(layer(x), expected)
