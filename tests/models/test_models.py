from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from devices import on_gpu
from torch import nn
from torch.func import functional_call, grad, vmap

from holdfast.core.errors import HoldfastError
from holdfast.models import MODELS, Dropout, dropout_keys, import_model, linear, load_model, mlp, resnet18
from holdfast.problem.gradients.support import check_supported

MNIST, CIFAR = (1, 28, 28), (3, 32, 32)


@pytest.mark.parametrize(
    ("name", "options", "input_shape", "outputs", "parameters"),
    [
        ("linear", {}, MNIST, 10, 7_850),
        ("linear", {}, CIFAR, 10, 30_730),
        ("linear", {"bias": False}, (20,), 1, 20),
        ("mlp", {}, MNIST, 10, 397_510),
        ("mlp", {}, CIFAR, 10, 1_541_510),
        ("mlp", {"hidden": [8, 4]}, (2,), 3, 2 * 8 + 8 + 8 * 4 + 4 + 4 * 3 + 3),
        ("lenet", {}, CIFAR, 10, 62_006),
        ("lenet", {}, MNIST, 10, 44_426),  # one channel: 156; 4x4 pixels left: 256 * 120 + 120
        ("netfleet-cnn", {}, MNIST, 10, 10_330),
        ("netfleet-cnn", {"padding": 0}, MNIST, 10, 6_490),
        ("dspodfl-cnn", {}, MNIST, 10, 61_706),
        ("femnist-cnn", {}, MNIST, 62, 6_603_710),
        ("resnet18", {}, CIFAR, 10, 11_173_962),
        ("resnet18", {"stem": "imagenet"}, CIFAR, 10, 11_181_642),
    ],
)
def test_parameter_counts(name, options, input_shape, outputs, parameters):
    with torch.device("meta"):  # sizes only
        module = MODELS.build(name, options, input_shape=input_shape, outputs=outputs)
        assert module(torch.empty(2, *input_shape)).shape == (2, outputs)
    assert sum(p.numel() for p in module.parameters()) == parameters


def test_names():
    assert list(MODELS) == [
        "dspodfl-cnn",
        "femnist-cnn",
        "lenet",
        "linear",
        "mlp",
        "netfleet-cnn",
        "resnet18",
    ]
    assert MODELS.describe("mlp")["parameters"][0]["default"] == [500]


def test_resnet_stems_differ_in_resolution():
    for stem, side in (("cifar", 4), ("imagenet", 1)):
        with torch.device("meta"):
            body = resnet18(CIFAR, 10, stem=stem)[:-3]  # without average, flatten and linear layer
            assert body(torch.empty(1, *CIFAR)).shape == (1, 512, side, side)


# Small widths and images: what is tested is that stacking changes nothing.
SMALL = {
    "linear": ({}, (7,)),
    "mlp": ({"hidden": [5, 4]}, (2, 3)),
    "lenet": ({}, (1, 16, 16)),
    "netfleet-cnn": ({}, (2, 8, 8)),
    "dspodfl-cnn": ({}, (1, 8, 8)),
    "femnist-cnn": ({}, (1, 4, 4)),
    "resnet18": ({"width": 4}, (1, 16, 16)),
}


@pytest.mark.parametrize("name", list(MODELS))
def test_stacked_gradients_equal_the_loop(name):
    torch.manual_seed(0)
    options, input_shape = SMALL[name]
    module = MODELS.build(name, options, input_shape=input_shape, outputs=3).double()
    check_supported(module)
    nodes = 3
    weights = {
        key: torch.stack([p.detach() * (1 + 0.1 * node) for node in range(nodes)])
        for key, p in module.named_parameters()
    }
    node_keys = torch.tensor([[5, node, 2, 1] for node in range(nodes)])
    keys = dict.fromkeys(dropout_keys(module), node_keys)
    x, y = torch.randn(nodes, 4, *input_shape).double(), torch.randint(3, (nodes, 4))

    def loss(weights, keys, x, y):
        return nn.functional.cross_entropy(functional_call(module, {**weights, **keys}, (x,)), y)

    together = vmap(grad(loss))(weights, keys, x, y)
    for node in range(nodes):
        alone = grad(loss)(
            {key: value[node] for key, value in weights.items()},
            {key: value[node] for key, value in keys.items()},
            x[node],
            y[node],
        )
        for key, value in alone.items():
            torch.testing.assert_close(together[key][node], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "input_shape", "message"),
    [
        ("lenet", (30,), r"takes images of shape \(channels, height, width\), got \(30,\)"),
        ("lenet", (1, 8, 8), "needs larger images than 8x8"),
        ("netfleet-cnn", (1, 3, 28), "needs larger images than 3x28"),
        ("dspodfl-cnn", (3, 64, 64), "at most 32x32, got 64x64"),
        ("femnist-cnn", (28, 28), r"got \(28, 28\)"),
        ("resnet18", (30,), r"got \(30,\)"),
        ("linear", (), "at least 1 item"),
        ("mlp", (0,), "greater than or equal to 1, got 0"),
    ],
)
def test_wrong_input_shapes(name, input_shape, message):
    with pytest.raises(HoldfastError, match=message) as error:
        MODELS.build(name, {}, input_shape=input_shape, outputs=10)
    assert "\n" not in str(error.value)


def test_direct_calls_are_checked_too():
    with pytest.raises(HoldfastError, match=r"model 'mlp'\.hidden: should have at least 1 item"):
        mlp((2,), 2, hidden=[])
    with pytest.raises(
        HoldfastError, match=r"model 'linear'\.outputs: should be greater than or equal to 1, got 0"
    ):
        linear((2,), 0)
    with pytest.raises(HoldfastError, match="width: should be even"):
        resnet18(CIFAR, 10, width=3)
    with pytest.raises(HoldfastError, match="stem: should be 'cifar' or 'imagenet', got 'mnist'"):
        resnet18(CIFAR, 10, stem="mnist")


class TestDropout:
    x = torch.ones(8, 50)

    def mask(self, layer, key, x=None):
        return functional_call(layer, {"key": torch.tensor(key)}, (self.x if x is None else x,))

    def test_masks_depend_on_everything_in_the_key_and_on_the_layer(self):
        layer = Dropout(0.5)
        first = self.mask(layer, [1, 2, 3, 4])
        assert torch.equal(first, self.mask(layer, [1, 2, 3, 4]))
        for other in ([0, 2, 3, 4], [1, 0, 3, 4], [1, 2, 0, 4], [1, 2, 3, 0]):
            assert not torch.equal(first, self.mask(layer, other))
        assert not torch.equal(first, self.mask(Dropout(0.5, layer=1), [1, 2, 3, 4]))

    def test_elements_are_dropped_independently_and_scaled(self):
        out = self.mask(Dropout(0.2), [0, 0, 0, 0], torch.ones(100, 401))
        assert out.unique().tolist() == [0.0, 1.25]
        assert abs((out == 0).double().mean() - 0.2) < 4 * (0.2 * 0.8 / out.numel()) ** 0.5
        assert len(out.unique(dim=0)) == 100  # each sample has its own mask

    def test_stacked_masks_equal_those_of_each_node_alone(self):
        layer, keys = Dropout(0.5), torch.tensor([[7, node, 3, 1] for node in range(5)])
        together = vmap(lambda key: functional_call(layer, {"key": key}, (self.x,)))(keys)
        for node, key in enumerate(keys.tolist()):
            assert torch.equal(together[node], self.mask(layer, key))

    def test_gradient_follows_the_mask(self):
        layer = Dropout(0.5)
        assert torch.equal(grad(lambda x: layer(x).sum())(self.x), layer(self.x))

    def test_identity_where_nothing_is_dropped(self):
        assert torch.equal(Dropout(0.5).eval()(self.x), self.x)
        assert torch.equal(Dropout(0)(self.x), self.x)

    def test_key_is_no_part_of_the_model(self):
        module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(Dropout(0.5)))
        assert dropout_keys(module) == ["1.0.key"]
        assert list(module.state_dict()) == ["0.weight", "0.bias"]
        assert dropout_keys(Dropout(0.5)) == ["key"]

    def test_bad_values(self):
        for p in (-0.1, 1.0, float("nan")):
            with pytest.raises(HoldfastError, match=r"Dropout\.p"):
                Dropout(p)
        with pytest.raises(HoldfastError, match=r"Dropout\.layer"):
            Dropout(0.5, layer=-1)

    @on_gpu
    def test_the_gpu_drops_the_same(self):
        layer, key = Dropout(0.3), torch.tensor([1, 2, 3, 4])
        gpu = functional_call(layer, {"key": key.cuda()}, (self.x.cuda(),))
        assert torch.equal(gpu.cpu(), functional_call(layer, {"key": key}, (self.x,)))


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "user_models.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Linear):\n"
        "    def __init__(self, outputs, width=3):\n"
        "        super().__init__(width, outputs)\n"
        "def make():\n"
        "    raise SystemExit('called')\n"
        "class Plain: pass\n"
        "number = 3\n"
    )
    (tmp_path / "user_broken.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "user_models", raising=False)


@pytest.mark.usefixtures("user_module")
class TestUserModels:
    def test_a_class(self):
        net = load_model("user_models:Net", {"width": 4}, input_shape=(4,), outputs=2)
        assert (net.in_features, net.out_features) == (4, 2)
        assert import_model("user_models:Net") is type(net)

    def test_registered_names_still_work(self):
        assert load_model("linear", {"bias": False}, input_shape=(4,), outputs=2)(torch.ones(1, 4)).shape == (
            1,
            2,
        )

    @pytest.mark.parametrize(
        ("name", "options", "message"),
        [
            ("no_such_module:Net", {}, "cannot import 'no_such_module'.*No module named 'no_such_module'"),
            ("user_broken:Net", {}, "cannot import 'user_broken'.*a_package_that_is_not_there"),
            ("user_models:net", {}, "unknown name in module 'user_models' 'net': did you mean 'Net'"),
            ("user_models:Plain", {}, "expected a subclass of torch.nn.Module, got"),
            ("user_models:number", {}, "expected a subclass of torch.nn.Module, got 3"),
            ("user_models:make", {}, "expected a subclass of torch.nn.Module, got <function make"),
            (
                "os:system",
                {"command": "touch PWNED"},
                "expected a subclass of torch.nn.Module, got <built-in",
            ),
            ("user_models:Net", {"widht": 4}, "unexpected keyword argument 'widht'; its signature is"),
            ("user_models:Net", {"outputs": 4}, "'outputs' comes from the data"),
            (":Net", {}, "expected module:Class"),
            ("lenett", {}, "unknown model 'lenett': did you mean 'lenet'"),
        ],
    )
    def test_mistakes(self, name, options, message):
        with pytest.raises(HoldfastError, match=message) as error:
            load_model(name, options, input_shape=(4,), outputs=2)
        assert "\n" not in str(error.value)
        assert not Path("PWNED").exists()


def test_a_linear_model_may_start_at_zero() -> None:
    module = load_model("linear", {"zero": True}, MNIST, 10)
    assert all(not parameter.any() for parameter in module.parameters())
    assert any(parameter.any() for parameter in load_model("linear", {}, MNIST, 10).parameters())
