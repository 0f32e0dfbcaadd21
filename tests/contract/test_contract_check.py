"""Mistakes in a user's method, optimiser or channel: one line that names the class and the function."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from command_line import make_plan
from federation_runs import describe
from torch import Tensor

import holdfast as hf
from holdfast.algorithms import ALGORITHMS
from holdfast.channels import CHANNELS
from holdfast.core.tree import tree_map
from holdfast.experiments.federation import make_federation


class Own(NamedTuple):
    x: Tensor
    t: Tensor  # rounds so far, [..., 1]


class Other(NamedTuple):
    x: Tensor
    c: Tensor


@dataclass(frozen=True)
class Right(hf.Algorithm):
    """A method as it should be; each of the classes below breaks one rule."""

    lr: float = 0.1

    def init(self, x0: Tensor, oracle: hf.Oracle, peers: hf.Peers) -> Any:
        return Own(x0, torch.zeros_like(x0[..., :1]))

    def round(self, s: Any, oracle: hf.Oracle, peers: hf.Peers) -> Any:
        return Own(peers.exchange(s.x - self.lr * oracle.grad(s.x)).mixed, s.t + 1)

    def model(self, s: Any) -> Any:
        return s.x


class FlatModel(Right):
    def model(self, s):
        return s.x.mean(0)


class OneRow(Right):
    def model(self, s):
        return s.x[:1]


class NoModel(Right):
    def model(self, s):
        return None


class NarrowModel(Right):
    def model(self, s):
        return s.x.float()


class NoneInState(Right):
    def init(self, x0, oracle, peers):
        return Own(x0, None)


class ScalarCounter(Right):
    def init(self, x0, oracle, peers):
        return Own(x0, torch.tensor(0))


class FlatCounter(Right):
    def init(self, x0, oracle, peers):
        return Own(x0, torch.zeros(len(x0)))


class NumberInState(Right):
    def init(self, x0, oracle, peers):
        return Own(x0, 0)


class ListState(Right):
    def init(self, x0, oracle, peers):
        return [x0, torch.zeros_like(x0)]

    def round(self, s, oracle, peers):
        return s


class FewerParts(Right):
    def round(self, s, oracle, peers):
        return (peers.exchange(s.x).mixed,)


class OtherState(Right):
    def round(self, s, oracle, peers):
        return Other(s.x, s.t)


class NoState(Right):
    def round(self, s, oracle, peers):
        peers.exchange(s.x)


class WiderCounter(Right):
    def round(self, s, oracle, peers):
        return Own(s.x, s.t + s.x)


class CounterBecomesFloat(Right):
    def init(self, x0, oracle, peers):
        return Own(x0, torch.zeros(len(x0), 1, dtype=torch.int64))

    def round(self, s, oracle, peers):
        return Own(s.x, s.t + 0.5)


class AlwaysSingle(Right):  # right only as long as models are float32
    def round(self, s, oracle, peers):
        return Own(s.x.float(), s.t)


class AlwaysDouble(Right):
    def round(self, s, oracle, peers):
        return Own(s.x.double(), s.t)


class NumberInMessage(Right):
    def round(self, s, oracle, peers):
        return Own(peers.exchange(Other(s.x, 0.5)).mixed.x, s.t)


class NormInMessage(Right):
    def round(self, s, oracle, peers):
        return Own(peers.exchange(Other(s.x, s.x.norm(dim=-1))).mixed.x, s.t)


class FlatDual(Right):
    def dual(self, s):
        return s.x[0]


class OnePersonalModel(Right):
    def personal(self, s):
        return s.x[0]


@dataclass(frozen=True)
class RightServer(hf.ServerAlgorithm[Any]):
    lr: float = 0.1

    def init(self, x0: Tensor) -> Any:
        return Own(torch.zeros_like(x0), torch.zeros_like(x0[..., :1]))

    def init_server(self, x0: Tensor) -> Any:
        return (x0,)

    def broadcast(self, server: Any) -> Any:
        return server[0]

    def client(self, s: Any, received: Any, oracle: hf.Oracle) -> Any:
        return Own(s.x, s.t + 1), -self.lr * oracle.grad(received)

    def server(self, server: Any, mean: Any, share: float) -> Any:
        return (server[0] + mean,)

    def model(self, server: Any) -> Any:
        return server[0]


class OnlyMessage(RightServer):
    def client(self, s, received, oracle):
        return oracle.grad(received)


class OnlyState(RightServer):
    def client(self, s, received, oracle):
        return s


class FlatMessage(RightServer):
    def client(self, s, received, oracle):
        return s, received


class ClientForgets(RightServer):
    def client(self, s, received, oracle):
        return (), oracle.grad(received)


class NoBroadcast(RightServer):
    def broadcast(self, server):
        return None


class BareServer(RightServer):
    def server(self, server, mean, share):
        return server[0] + mean


class ServerRows(RightServer):
    def model(self, server):
        return server[0][None]


class ServerCounts(RightServer):
    def init_server(self, x0):
        return (x0, torch.tensor(0))


NODE_METHODS = {
    FlatModel: r"FlatModel\.model: the model is a float32 tensor \[d\], expected a float32 tensor \[m, d\]; ",
    OneRow: r"OneRow\.model: the model is a float32 tensor \[1, d\], expected a float32 tensor \[m, d\]; ",
    NoModel: r"NoModel\.model: the model is None, expected a float32 tensor \[m, d\]; ",
    NarrowModel: r"NarrowModel\.model: .* float32 tensor \[m, d\], expected a float64 .*; keep the number",
    NoneInState: r"NoneInState\.init: the state's 't' is None, expected a tensor .*; return a tensor, or l",
    ScalarCounter: r"ScalarCounter\.init: the state's 't' is an int64 tensor \[\], .* as \[m, 1\]; reshape",
    FlatCounter: r"FlatCounter\.init: the state's 't' is a float32 tensor \[m\], .* as \[m, 1\]; reshape it",
    NumberInState: r"NumberInState\.init: the state's 't' is 0, expected a tensor .*; put tensors into a N",
    ListState: r"ListState\.init: the state is \[tensor.*, expected a tensor .*; put tensors into a NamedT",
    FewerParts: r"FewerParts\.round: the state is tuple\(0\), init gave Own\(x, t\); return the same parts",
    OtherState: r"OtherState\.round: the state is Other\(x, c\), init gave Own\(x, t\); return the same pa",
    NoState: r"NoState\.round: the state is None, expected a tensor",
    WiderCounter: r"WiderCounter\.round: the state's 't' is .* \[m, d\], init gave .* \[m, 1\]; keep the s",
    CounterBecomesFloat: r"CounterBecomesFloat\.round: the state's 't' is a float32 .*, init gave an int",
    AlwaysSingle: r"AlwaysSingle\.round: the state's 'x' is a float32 tensor .*, init gave a float64 tensor",
    AlwaysDouble: r"AlwaysDouble\.round: the state's 'x' is a float64 tensor .*, init gave a float32 tensor",
    NumberInMessage: r"NumberInMessage\.round: the message's 'c' is 0\.5, expected a tensor",
    NormInMessage: r"NormInMessage\.round: the message's 'c' is a float32 tensor \[m\], expected .* \[m, 1\]",
    OnePersonalModel: r"OnePersonalModel\.personal: the personal model is a float32 tensor \[d\], expected",
    FlatDual: r"FlatDual\.dual: the dual is a float32 tensor \[d\], expected None or a float32 tensor \[m",
}
SERVER_METHODS = {
    OnlyMessage: r"OnlyMessage\.client: it returned a float32 tensor \[m, d\], expected two things: the cl",
    OnlyState: r"OnlyState\.client: the state is a float32 tensor \[m, d\], init gave Own\(x, t\)",
    FlatMessage: r"FlatMessage\.client: the message is a float32 tensor \[d\], expected a tensor \[m, d\]",
    ClientForgets: r"ClientForgets\.client: the state is tuple\(\), init gave Own\(x, t\); return the same",
    NoBroadcast: r"NoBroadcast\.broadcast: the message is None, expected a tensor \[d\]",
    BareServer: r"BareServer\.server: the state is a float32 tensor \[d\], init_server gave tuple\(0\)",
    ServerRows: r"ServerRows\.model: the model is a float32 tensor \[1, d\], expected a float32 tensor \[d\]",
    ServerCounts: r"ServerCounts\.init_server: the state's '1' is an int64 tensor \[\], .* number as",
}


@dataclass(frozen=True)
class Memoryless(hf.LocalOptimizer):
    def init(self, x: Tensor) -> Any:
        return (torch.zeros_like(x), torch.zeros_like(x[..., :1]))

    def update(self, gradient: Tensor, memory: Any, x: Tensor) -> Any:
        return gradient, memory


class OneThing(Memoryless):
    def update(self, gradient, memory, x):
        return gradient


class FlatDirection(Memoryless):
    def update(self, gradient, memory, x):
        return gradient.mean(0), memory


class Forgets(Memoryless):
    def update(self, gradient, memory, x):
        return gradient, ()


class CountsFlat(Memoryless):
    def init(self, x):
        return (torch.tensor(0),)


@dataclass(frozen=True)
class Around(Memoryless):
    inner: Any = field(default_factory=OneThing)


OPTIMIZERS = {
    OneThing: r"OneThing\.update: it returned a float64 tensor \[m, d\], expected two things: the directio",
    FlatDirection: r"FlatDirection\.update: the direction is a float64 tensor \[d\], expected, like x",
    Forgets: r"Forgets\.update: the memory is tuple\(\), init gave tuple\(0, 1\); return the same parts",
    CountsFlat: r"CountsFlat\.init: the memory's '0' is an int64 tensor \[\], expected .* as \[m, 1\]; res",
    Around: r"OneThing\.update: it returned a float64 tensor",
}


@dataclass(frozen=True)
class RightChannel(hf.Channel):
    serves = frozenset({"graph", "server", "cohort"})

    def encode(self, message: Any, state: Any, draw: Any) -> Any:
        return tree_map(torch.clone, message)

    def decode(self, wire: Any, like: Any) -> Any:
        return wire

    def init(self, message: Any) -> Any:
        return tree_map(torch.zeros_like, message)

    init_receiver = init


class DropsColumns(RightChannel):
    serves = RightChannel.serves

    def decode(self, wire, like):
        return tree_map(lambda t: t[..., :1], wire)


class StaysNarrow(RightChannel):
    serves = RightChannel.serves

    def encode(self, message, state, draw):
        return tree_map(lambda t: t.half(), message)


class Unpacks(RightChannel):
    serves = RightChannel.serves

    def decode(self, wire, like):
        return (wire,)


class NothingTravels(RightChannel):
    serves = RightChannel.serves

    def encode(self, message, state, draw):
        return None


class FlatWire(RightChannel):
    serves = RightChannel.serves

    def encode(self, message, state, draw):
        return message.sum(-1)


class ForgetfulSender(RightChannel):
    serves = RightChannel.serves

    def update(self, message, own, state):
        return ()


class NoneToRemember(RightChannel):
    serves = RightChannel.serves

    def init(self, message):
        return None


class OnlyMixed(RightChannel):
    serves = RightChannel.serves

    def combine(self, message, own, mixed, sender, receiver):
        return mixed

    def average(self, message, own, mean, sender, receiver):
        return mean

    def gather(self, mean, receiver, share):
        return mean


class ForgetfulReceiver(RightChannel):
    serves = RightChannel.serves

    def combine(self, message, own, mixed, sender, receiver):
        return mixed, ()


class BadAnswers(RightChannel):
    serves = RightChannel.serves

    @property
    def down(self):
        return Unpacks()


CHANNELS_ON = {
    (
        DropsColumns,
        "ring",
    ): r"DropsColumns\.decode: the message is .* \[m, 1\], encode was given .* \[m, d\]; keep",
    (
        StaysNarrow,
        "ring",
    ): r"StaysNarrow\.decode: the message is a float16 .*, encode was given a float64 tensor",
    (
        Unpacks,
        "ring",
    ): r"Unpacks\.decode: the message is tuple\(0\), encode was given a float64 tensor \[m, d\]",
    (NothingTravels, "ring"): r"NothingTravels\.encode: the wire is None, expected a tensor \[m, \.\.\.\]",
    (
        FlatWire,
        "ring",
    ): r"FlatWire\.encode: the wire is a float64 tensor \[m\], expected a tensor \[m, \.\.\.\]",
    (ForgetfulSender, "ring"): r"ForgetfulSender\.update: the state is tuple\(\), init gave a float64 tensor",
    (NoneToRemember, "ring"): r"NoneToRemember\.init: the state is None, expected a tensor",
    (
        OnlyMixed,
        "ring",
    ): r"OnlyMixed\.combine: it returned a float64 tensor .*, expected two things: the message",
    (
        OnlyMixed,
        "server",
    ): r"OnlyMixed\.average: it returned a float64 tensor .*, expected two things: the mess",
    (
        ForgetfulReceiver,
        "ring",
    ): r"ForgetfulReceiver\.combine: the state is tuple\(\), init_receiver gave a float",
    (BadAnswers, "server"): r"Unpacks\.decode: the message is tuple\(0\), encode was given a float64 tensor",
}

FUNCTIONS = [lambda x: x.square().sum(), lambda x: (x - 1).square().sum(), lambda x: (x + 2).square().sum()]


def minimize(method: Any, topology: str = "ring", channel: Any = "identity") -> hf.MinimizeResult:
    return hf.minimize(FUNCTIONS, [0.0, 1.0], method, 2, topology=topology, channel=channel)


def test_parts_that_keep_the_contract_run():
    assert minimize(Right()).status == minimize(RightServer(), "server").status == "done"
    for topology in ("ring", "server"):
        assert minimize(Right(), topology, RightChannel()).status == "done"
    assert minimize(RightServer(), "server", RightChannel()).status == "done"
    assert minimize(hf.FedAvg(lr=0.1, optimizer=Memoryless(keep=True)), "server").status == "done"


@pytest.mark.parametrize("method", NODE_METHODS, ids=lambda m: m.__name__)
def test_mistakes_in_a_method(method):
    with pytest.raises(hf.HoldfastError, match=NODE_METHODS[method]) as error:
        minimize(method())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("method", SERVER_METHODS, ids=lambda m: m.__name__)
def test_mistakes_in_a_server_method(method):
    with pytest.raises(hf.HoldfastError, match=SERVER_METHODS[method]):
        minimize(method(), "server")


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.__name__)
def test_mistakes_in_an_optimizer(optimizer):
    with pytest.raises(hf.HoldfastError, match=OPTIMIZERS[optimizer]):
        minimize(hf.Gossip(lr=0.1, optimizer=optimizer()))


@pytest.mark.parametrize(("channel", "topology"), CHANNELS_ON, ids=lambda c: getattr(c, "__name__", c))
def test_mistakes_in_a_channel(channel, topology):
    with pytest.raises(hf.HoldfastError, match=CHANNELS_ON[channel, topology]):
        minimize(Right(), topology, channel())


def test_mistakes_of_a_leading_servers_channel():
    with pytest.raises(
        hf.HoldfastError, match=r"OnlyMixed\.gather: it returned a float64 tensor \[d\], expected"
    ):
        minimize(RightServer(), "server", OnlyMixed())


def test_train_and_a_simulation_check_alike():
    data = [(torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64))] * 3
    with pytest.raises(hf.HoldfastError, match=NODE_METHODS[FlatModel]):
        hf.train(FlatModel(), model=torch.nn.Linear(2, 2), data=data, rounds=1)
    problem = hf.build_problem(torch.nn.Linear(2, 2), hf.FederatedData.of_nodes(data))
    with pytest.raises(hf.HoldfastError, match=OPTIMIZERS[OneThing]):
        hf.Simulation(hf.Gossip(lr=0.1, optimizer=OneThing()), problem, hf.Network.of(hf.ring(3)))


def test_a_plan_and_a_federation_check_alike(monkeypatch, tmp_path):
    """What ranks of a cluster and deployed members run."""
    monkeypatch.setitem(ALGORITHMS._makers, "flat-model", FlatModel)
    monkeypatch.setitem(CHANNELS._makers, "forgetful", ForgetfulSender)
    with pytest.raises(hf.HoldfastError, match=NODE_METHODS[FlatModel]):
        make_plan(tmp_path, "algorithm=flat-model")
    with pytest.raises(hf.HoldfastError, match=NODE_METHODS[FlatModel]):
        make_federation(describe({"name": "flat-model"}), "federation.toml")
    with pytest.raises(hf.HoldfastError, match=CHANNELS_ON[ForgetfulSender, "ring"]):
        make_federation(describe({"name": "dsgd", "lr": 0.1}) | {"channel": "forgetful"}, "federation.toml")


def test_a_network_of_another_size_than_the_functions():
    with pytest.raises(hf.HoldfastError, match="network: it has 4 nodes, but the problem has 3; give both"):
        hf.minimize(FUNCTIONS, [0.0], Right(), 2, topology=hf.ring(4))
