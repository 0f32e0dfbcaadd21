"""A method in a Flower app computes what ``hf.train`` computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

import holdfast as hf

pytest.importorskip("flwr", reason="needs flwr: pip install '.[flower]' in an environment of its own")

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from holdfast import flower

NODES, ROUNDS = 3, 5


@pytest.fixture(autouse=True)
def _server_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages say who sends them, which a process of Flower's is told when it starts."""
    identity = pytest.importorskip(
        "flwr.supercore.task_identity", reason="another version of flwr"
    ).TaskIdentity
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(identity, name, 7)


class LocalGrid(Grid):
    """Messages between real apps in this process; every client has its own context, as in a SuperNode."""

    def __init__(self, app: ClientApp, lost: Callable[[int, Message], bool] = lambda i, m: False) -> None:
        self.app, self.lost, self.sent = app, lost, 0
        self.contexts = {
            1000 + i: Context(7, 1000 + i, {"partition-id": i}, RecordDict(), {}) for i in range(NODES)
        }

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        replies = []
        for number, message in enumerate(messages):
            self.sent += 1
            message.metadata.__dict__["_message_id"] = str(number)
            try:
                reply = self.app(message, self.contexts[message.metadata.dst_node_id])
            except hf.HoldfastError as error:
                reply = Message(Error(code=2, reason=str(error)), reply_to=message)
            if not self.lost(message.metadata.dst_node_id - 1000, message):
                replies.append(reply)
        return replies

    run = property(lambda self: None)
    set_run = create_message = push_messages = pull_messages = None


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    draws = torch.Generator().manual_seed(0)
    sizes = [20, 30, 25]
    return [
        (
            torch.randn(n, 4, generator=draws, dtype=torch.float64) + i,
            torch.arange(n) % 3 if i else torch.arange(n) % 2,
        )
        for i, n in enumerate(sizes)
    ]


def net() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Linear(4, 3, dtype=torch.float64)


def client_app(method: Any, **options: Any) -> ClientApp:
    app, parts = ClientApp(), data()
    client = flower.Client(
        method, model=net(), data=lambda context: parts[flower.partition_id(context)], **options
    )
    app.train()(client)
    return app


def by_flower(method: Any, grid: Grid, rounds: int = ROUNDS, **given: Any) -> dict[str, torch.Tensor]:
    strategy = flower.Strategy(method, model=net(), nodes=NODES, dtype="float64", **given)
    return strategy.start(grid, num_rounds=rounds).arrays.to_torch_state_dict()


def simulated(method: Any, rounds: int = ROUNDS, **given: Any) -> dict[str, torch.Tensor]:
    result = hf.train(
        method, model=net(), data=data(), rounds=rounds, dtype="float64", progress=False, **given
    )
    return result.model.state_dict()


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=1e-12)


METHODS = {
    "fedavg": (hf.FedAvg(lr=0.1, local_steps=3), {"batch_size": 8}),
    "scaffold": (hf.SCAFFOLD(lr=0.1, local_steps=3), {"batch_size": 8}),
    "schedule": (
        hf.SCAFFOLD(lr=hf.cosine(0.1, rounds=5), local_steps=3, optimizer=hf.Momentum(keep=True)),
        {},
    ),
    "samples": (hf.SCAFFOLD(lr=0.1, local_steps=3), {"weights": "samples"}),
    "feddyn": (hf.FedDyn(lr=0.1, local_steps=3, alpha=0.1), {"batch_size": 8}),
    "fedpd": (hf.FedPD(eta=0.5, lr=0.1, local_steps=3), {"batch_size": 8}),
    "fedpd that skips": (hf.FedPD(eta=0.5, lr=0.1, local_steps=3, skip=0.5), {"batch_size": 8}),
    "dualfl": (hf.DualFL(nu=0.1, rho=0.01), {"l2": 0.1}),
    "fedlin, which exchanges twice": (hf.FedLin(lr=0.1, local_steps=3), {"batch_size": 8}),
    "local-gecl": (hf.LocalGECL(lr=0.1, local_steps=3), {"batch_size": 8}),
    "gt-sgd, which exchanges at the start": (hf.GTSGD(lr=0.1), {"batch_size": 8}),
}


@pytest.mark.parametrize("name", METHODS)
def test_equals_the_simulator(name: str) -> None:
    method, options = METHODS[name]
    assert_equal(by_flower(method, LocalGrid(client_app(method, **options))), simulated(method, **options))


def test_cohorts_are_the_simulators() -> None:
    method = hf.SCAFFOLD(lr=0.1, local_steps=3)
    ours = by_flower(method, LocalGrid(client_app(method)), cohort=2, seed=3)
    assert_equal(ours, simulated(method, cohort=2, seed=3))


def test_a_round_takes_one_message_per_client() -> None:
    method = hf.FedPD(eta=0.5, lr=0.1)
    grid = LocalGrid(client_app(method))
    by_flower(method, grid)
    assert grid.sent == NODES * (2 + ROUNDS)  # who is there, the start, and the rounds


def test_a_lost_answer_leaves_no_trace() -> None:
    """The server's control variate stays the mean of the clients', whatever got lost on the way."""
    method = hf.SCAFFOLD(lr=0.1, local_steps=3)
    lost = {(1, "2"), (0, "3"), (1, "3"), (2, "1"), (2, "5")}
    grid = LocalGrid(client_app(method), lambda i, message: (i, message.metadata.group_id) in lost)
    strategy = flower.Strategy(method, model=net(), nodes=NODES, dtype="float64")
    strategy.start(grid, num_rounds=ROUNDS)
    assert strategy.taken == {0: 5, 1: 5, 2: 4}
    states = [grid.contexts[1000 + i].state for i in range(NODES)]
    own = [
        torch.from_numpy(states[i].array_records[f"holdfast.state.{strategy.taken[i]}"]["c"].numpy()[0])
        for i in range(NODES)
    ]
    torch.testing.assert_close(strategy.state.c, torch.stack(own).mean(0), rtol=0, atol=1e-14)
    assert all(len(each.array_records) == 2 for each in states)  # not more than it may need again


def test_a_client_that_fails_is_left_out_or_ends_the_run() -> None:
    def lost(i: int, message: Message) -> bool:
        return i == 1 and message.metadata.group_id == "2"

    method = hf.FedPD(eta=0.5, lr=0.1)
    with pytest.raises(hf.HoldfastError, match=r"2 of 3 clients answered.*FedPD cannot do without"):
        by_flower(method, LocalGrid(client_app(method), lost))
    method = hf.FedAvg(lr=0.1)
    by_flower(method, LocalGrid(client_app(method), lost))


def test_a_client_that_lost_its_state_is_told_apart() -> None:
    method = hf.FedPD(eta=0.5, lr=0.1)
    grid = LocalGrid(client_app(method))
    strategy = flower.Strategy(method, model=net(), nodes=NODES, dtype="float64")
    strategy.start(grid, num_rounds=1)
    grid.contexts[1001].state = RecordDict()
    with pytest.raises(hf.HoldfastError, match=r"no state of stage 1.*started anew"):
        strategy.configure_train(2, strategy.initial_arrays, None, grid)


def test_what_an_earlier_run_left_is_not_used() -> None:
    method = hf.FedPD(eta=0.5, lr=0.1, local_steps=3)
    grid = LocalGrid(client_app(method))
    by_flower(method, grid, rounds=2)
    for context in grid.contexts.values():
        context.run_id = 8
    strategy = flower.Strategy(method, model=net(), nodes=NODES, dtype="float64")
    assert_equal(strategy.start(grid, num_rounds=ROUNDS).arrays.to_torch_state_dict(), simulated(method))
    grid.contexts[1001].run_id = 9  # what it holds is of run 8, and of the stage that is asked for
    with pytest.raises(hf.HoldfastError, match=f"no state of stage {ROUNDS}"):
        strategy.configure_train(ROUNDS + 1, strategy.initial_arrays, None, grid)


def test_the_models_weights_are_flowers_state_dict() -> None:
    """A round can begin from any weights, and ends in a state_dict that the plain module loads."""
    method, begin = hf.FedAvg(lr=0.1), torch.nn.Linear(4, 3, dtype=torch.float64)
    from flwr.app import ArrayRecord

    strategy = flower.Strategy(method, model=net(), nodes=NODES, dtype="float64")
    arrays = strategy.start(
        LocalGrid(client_app(method)), ArrayRecord(begin.state_dict()), num_rounds=1
    ).arrays
    result = hf.train(method, model=begin, data=data(), rounds=1, dtype="float64", progress=False)
    loaded = net()
    loaded.load_state_dict(arrays.to_torch_state_dict())
    assert_equal(loaded.state_dict(), result.model.state_dict())


def test_mistakes_are_explained() -> None:
    method = hf.FedAvg(lr=0.1)
    with pytest.raises(hf.HoldfastError, match="BatchNorm"):
        flower.Strategy(method, model=torch.nn.BatchNorm1d(4), nodes=NODES)
    with pytest.raises(hf.HoldfastError, match="works along links"):
        flower.Strategy(hf.ECL(lr=0.1), model=net(), nodes=NODES)
    with pytest.raises(hf.HoldfastError, match=r"lr=0.2.*give both the same"):
        by_flower(method, LocalGrid(client_app(hf.FedAvg(lr=0.2))))
    with pytest.raises(hf.HoldfastError, match="seed: the strategy says that"):
        client_app(method, seed=1)
    grid = LocalGrid(client_app(method))
    grid.contexts[1000].node_config = {"partition-id": 1}
    with pytest.raises(hf.HoldfastError, match="two clients have partition-id 1"):
        by_flower(method, grid)
    grid.contexts[1000].node_config = {}
    with pytest.raises(hf.HoldfastError, match="--node-config"):
        by_flower(method, grid)
