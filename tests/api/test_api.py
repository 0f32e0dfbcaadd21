"""The Python interface: train, minimize, and what a method costs without training."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import holdfast as hf
from holdfast.api import as_network
from holdfast.data import DATASETS
from holdfast.engines.common.dry_run import dry_run
from holdfast.engines.common.simulation import Simulation
from holdfast.models import mlp
from holdfast.problem.flat import FlatModel
from holdfast.problem.losses import CrossEntropy
from holdfast.problem.model_problem import ModelProblem


class Net(nn.Module):
    """A user's own model, with buffers and a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(64, 12)
        self.backbone.requires_grad_(False)
        self.head = nn.Linear(12, 10)
        self.register_buffer("shift", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.backbone(x.flatten(1) - self.shift)))


@pytest.fixture(scope="module")
def digits():
    return DATASETS.build("digits", {})


def seeded(make) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


# --- train -------------------------------------------------------------------------------------------------


def test_train_as_in_the_readme(digits) -> None:
    x, y, x_test, y_test = digits.x_train, digits.y_train, digits.x_test, digits.y_test
    net = seeded(lambda: mlp(input_shape=(1, 8, 8), outputs=10, hidden=[16]))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    result = hf.train(
        hf.LocalGECL(lr=0.1, local_steps=8),
        model=net,
        data=hf.partition(x, y, hf.Dirichlet(0.5), nodes=5, seed=0),
        topology=hf.ring(5),
        rounds=10,
        batch_size=32,
        test=(x_test, y_test),
        seed=0,
    )
    assert type(result.model) is type(net)
    assert result.models.shape == (5, 64 * 16 + 16 + 16 * 10 + 10)
    assert not result.diverged
    right = (result.model(x_test).argmax(-1) == y_test).double().mean()
    assert result.history["average_accuracy"][-1] == pytest.approx(float(right), abs=1e-12)
    assert right > 0.5 > result.history["average_accuracy"][0]
    # the user's own module is left alone
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.fixture(scope="module")
def result(digits) -> hf.TrainResult:
    data = hf.partition(digits.x_train, digits.y_train, hf.IID(), nodes=3, seed=0)
    model = seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    return hf.train(hf.FedAvg(lr=0.1), model=model, data=data, rounds=5, evaluate_every=2)


def test_history_is_a_table(result) -> None:
    assert result.history["round"] == [0, 2, 4, 5]
    assert len(result.history) == 4
    frame = result.history.to_pandas()
    assert list(frame["round"]) == [0, 2, 4, 5]
    assert list(frame["train_loss"]) == result.history["train_loss"]
    with pytest.raises(hf.HoldfastError, match="no metric 'test_accuracy' was recorded; there are round"):
        result.history["test_accuracy"]


def test_history_is_a_picture(result) -> None:
    [axes] = result.history.plot("train_loss").axes
    assert any(len(line.get_xdata()) == 4 for line in axes.get_lines())
    assert result.history.plot().axes


def test_however_the_data_are_handed_over(digits) -> None:
    """A partition, pairs of tensors or numpy arrays and torch Datasets: the same training."""
    split = hf.partition(digits.x_train, digits.y_train, hf.Unequal(1.0), nodes=3, seed=0)
    pairs = [split.node(i) for i in range(3)]
    model = seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))

    def rows(data, test) -> list:
        history = hf.train(hf.FedAvg(lr=0.1), model=model, data=data, rounds=3, test=test).history
        return [{key: value for key, value in row.items() if key != "seconds"} for row in history.rows]

    test = (digits.x_test, digits.y_test)
    expected = rows(split, test)
    assert rows(pairs, test) == expected
    assert rows([(x.numpy(), y.numpy()) for x, y in pairs], tuple(map(np.asarray, test))) == expected
    assert rows([TensorDataset(x, y) for x, y in pairs], TensorDataset(*test)) == expected


def test_frozen_parameters_stay_and_are_not_sent(digits) -> None:
    net = seeded(Net)
    data = hf.partition(digits.x_train, digits.y_train, hf.IID(), nodes=4, seed=0)
    result = hf.train(
        hf.Gossip(lr=0.1), model=net, data=data, topology=hf.ring(4), rounds=3, evaluate_every=1
    )
    head = 12 * 10 + 10
    assert result.models.shape == (4, head)
    assert result.history["payload_bytes"] == [round * 8 * head * 4 for round in range(4)]  # 8 directed links
    assert isinstance(result.model, Net)
    assert torch.equal(result.model.backbone.weight, net.backbone.weight)
    assert torch.equal(result.model.backbone.bias, net.backbone.bias)
    assert not torch.equal(result.model.head.weight, net.head.weight)
    assert not result.model.backbone.weight.requires_grad


def test_samples_as_weights_make_it_the_pooled_objective(digits) -> None:
    data = hf.partition(digits.x_train, digits.y_train, hf.Dirichlet(0.5), nodes=5, seed=0)
    model = seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10))).double()
    pooled = nn.functional.cross_entropy(model(data.x.double()), data.y)
    squared_norm = sum((g * g).sum() for g in torch.autograd.grad(pooled, list(model.parameters())))
    found = {}
    for weights in ("samples", "uniform"):
        found[weights] = hf.train(
            hf.FedAvg(lr=0.1),
            model=model,
            data=data,
            rounds=1,
            weights=weights,
            metrics=["train_loss", "grad_norm2"],
            dtype=torch.float64,
        ).history.rows[0]
    assert found["samples"]["train_loss"] == pytest.approx(pooled.item(), rel=1e-12)
    assert found["samples"]["grad_norm2"] == pytest.approx(float(squared_norm), rel=1e-12)
    assert found["uniform"]["train_loss"] != pytest.approx(pooled.item(), rel=1e-3)


def test_tokens_go_through_an_embedding() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.out = nn.Embedding(7, 4), nn.Linear(4, 2)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.out(self.embedding(tokens).mean(1))

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 7, (120, 5), generator=generator)
    labels = (tokens.sum(1) > 15).long()
    data = [(tokens[i::3], labels[i::3]) for i in range(3)]
    method = hf.Gossip(lr=0.5, local_steps=5)
    result = hf.train(method, model=seeded(Bag), data=data, topology=hf.ring(3), rounds=20)
    assert result.history["train_loss"][-1] < 0.8 * result.history["train_loss"][0]


def test_divergence_warns_and_keeps_what_was_recorded(digits) -> None:
    data = hf.partition(digits.x_train, digits.y_train, hf.IID(), nodes=3, seed=0)
    model = seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    with pytest.warns(RuntimeWarning, match=r"FedAvg diverged: .* by round 2: try a smaller lr"):
        result = hf.train(
            hf.FedAvg(lr=1e38, local_steps=2), model=model, data=data, rounds=9, evaluate_every=2
        )
    assert result.diverged
    assert result.history["round"] == [0, 2]


# --- a cohort of clients -----------------------------------------------------------------------------------


def test_only_the_cohort_changes_and_is_counted(digits) -> None:
    data = hf.partition(digits.x_train, digits.y_train, hf.IID(), nodes=6, seed=0)
    flat = FlatModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), torch.device("cpu"), torch.float32)
    problem = ModelProblem(flat, CrossEntropy(), data, batch_size=8, seed=0)
    simulation = Simulation(hf.SCAFFOLD(lr=0.1), problem, hf.server(6), seed=0, cohort=2)
    seen = set()
    for round in range(1, 21):
        before = simulation.state.clients.c.clone()
        simulation.step()
        changed = (simulation.state.clients.c != before).any(1).nonzero().squeeze(1).tolist()
        assert len(changed) == 2
        seen |= set(changed)
        # each of the two gets model and control variate and sends two vectors back
        assert simulation.payload_bytes == round * 2 * (2 + 2) * 650 * 4
        assert simulation.work.gradient_evaluations == round * 2
    assert seen == set(range(6))


def test_a_cohort_of_all_is_everybody(digits) -> None:
    data = hf.partition(digits.x_train, digits.y_train, hf.IID(), nodes=3, seed=0)
    model = seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    options = {"model": model, "data": data, "rounds": 3}
    one, other = (hf.train(hf.SCAFFOLD(lr=0.1), cohort=cohort, **options).models for cohort in ("all", 3))
    assert torch.equal(one, other)


# --- minimize ----------------------------------------------------------------------------------------------


def test_minimize_as_in_the_readme() -> None:
    centres = torch.tensor([[1.0, 0.0], [0.0, 2.0], [5.0, 1.0]], dtype=torch.float64)
    f1, f2, f3 = (lambda x, c=c: ((x - c) ** 2).sum() for c in centres)
    x0 = torch.zeros(2)
    result = hf.minimize([f1, f2, f3], x0, hf.FedAvg(lr=0.1, local_steps=4), rounds=200)
    assert result.x.shape == (201, 3, 2)
    assert result.x.dtype == torch.float64
    assert torch.equal(result.x[0], torch.zeros(3, 2, dtype=torch.float64))
    # equal curvatures: even FedAvg finds the mean of the centres; 0.8^4 a round
    assert torch.allclose(result.x[-1], centres.mean(0).expand(3, 2), rtol=1e-12, atol=1e-12)
    assert torch.allclose(result.x[1], (1 - 0.8**4) * centres.mean(0).expand(3, 2), rtol=1e-12)
    assert result.history["grad_norm2"][-1] < 1e-24
    assert not result.diverged


def test_minimize_on_a_graph_keeps_a_path_for_every_node() -> None:
    functions = [lambda x, b=b: ((x - b) ** 2).sum() for b in range(4)]
    result = hf.minimize(functions, [0.0], hf.LocalGECL(lr=0.05, local_steps=3), 300, topology=hf.ring(4))
    assert result.x.shape == (301, 4, 1)
    assert not torch.equal(result.x[1, 0], result.x[1, 2])
    assert torch.allclose(result.x[-1], torch.full((4, 1), 1.5, dtype=torch.float64), atol=1e-10)


def test_minimize_stops_where_it_diverges() -> None:
    with pytest.warns(RuntimeWarning, match="FedAvg diverged"):
        result = hf.minimize([lambda x: (x**2).sum()], [1.0], hf.FedAvg(lr=1e100), rounds=50)
    assert result.diverged
    assert len(result.x) == len(result.history) < 51


# --- traffic without training ------------------------------------------------------------------------------

TABLE_IV = {  # Local G-ECL, Table IV: CIFAR-10, MLP 3072-500-10, n = 10, R = 400; vectors per directed link
    "FedAvg": (hf.FedAvg(lr=0.1, local_steps=128), None, 1, 45.94),
    "SCAFFOLD": (hf.SCAFFOLD(lr=0.1, local_steps=128), None, 2, 91.88),
    "centralised Local G-ECL": (hf.LocalGECLServer(lr=0.1, local_steps=128), None, 1, 45.94),
    "Gossip": (hf.Gossip(lr=0.1, local_steps=128), hf.ring(10), 1, 45.94),
    "decentralised SCAFFOLD": (hf.DSCAFFOLD(lr=0.1, local_steps=128), hf.ring(10), 2, 91.88),
    "Local G-ECL": (hf.LocalGECL(lr=0.1, local_steps=128), hf.ring(10), 2, 91.88),
}


@pytest.mark.parametrize(("method", "topology", "vectors", "gib"), TABLE_IV.values(), ids=TABLE_IV)
def test_payload_of_table_iv(method, topology, vectors: int, gib: float) -> None:
    parameters = sum(p.numel() for p in mlp(input_shape=(3, 32, 32), outputs=10, hidden=[500]).parameters())
    assert parameters == 1_541_510
    footprint = dry_run(method, as_network(topology, 10))
    payload = (footprint.vectors_at_start + 400 * footprint.vectors_per_round) * parameters * 4
    assert (
        payload == 400 * 20 * vectors * 1_541_510 * 4
    )  # 20: ten links both ways, or ten clients up and down
    assert round(payload / 2**30, 2) == gib


# --- topologies by name -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("by_name", "by_graph"),
    [
        ("ring", hf.ring(4)),
        ("complete", hf.complete(4)),
        ("double-ring", hf.double_ring(6)),
        ({"name": "torus", "rows": 3}, hf.torus(6, rows=3)),
        ({"name": "erdos-renyi", "p": 0.5}, hf.erdos_renyi(8, p=0.5, seed=3)),
    ],
    ids=str,
)
def test_a_topology_may_be_a_name(by_name: str | dict, by_graph) -> None:
    functions = [lambda x, i=i: ((x - i) ** 2).sum() for i in range(len(by_graph))]
    named, drawn = (
        hf.minimize(functions, [0.0], hf.LocalGECL(lr=0.05), 5, topology=topology, seed=3).x
        for topology in (by_name, by_graph)
    )
    assert torch.equal(named, drawn)


def test_the_topology_server_by_name() -> None:
    functions = [lambda x: ((x - 1) ** 2).sum(), lambda x: (3 * (x + 1) ** 2).sum()]
    with pytest.raises(hf.HoldfastError, match="FedAvg needs a server: use the topology 'server'"):
        hf.minimize(functions, [0.0], hf.FedAvg(lr=0.05), 3, topology="ring")
    named = hf.minimize(functions, [0.0], hf.FedAvg(lr=0.05), 3, topology="server")
    assert torch.equal(named.x, hf.minimize(functions, [0.0], hf.FedAvg(lr=0.05), 3).x)
