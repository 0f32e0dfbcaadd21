"""Mistakes in a user's method: one line that names the class and the function."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from command_line import make_plan
from contract_keepers import FUNCTIONS, Memoryless, Own, Right, RightChannel, RightServer, minimize
from federation_runs import describe
from torch import Tensor

import holdfast as hf
from holdfast.algorithms import ALGORITHMS
from holdfast_deploy.federation_file import make_federation


class Other(NamedTuple):
    x: Tensor
    c: Tensor


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


def test_a_network_of_another_size_than_the_functions():
    with pytest.raises(hf.HoldfastError, match="network: it has 4 nodes, but the problem has 3; give both"):
        hf.minimize(FUNCTIONS, [0.0], Right(), 2, topology=hf.ring(4))


def test_train_checks_alike():
    data = [(torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64))] * 3
    with pytest.raises(hf.HoldfastError, match=NODE_METHODS[FlatModel]):
        hf.train(FlatModel(), model=torch.nn.Linear(2, 2), data=data, rounds=1)


def test_a_plan_and_a_federation_check_alike(monkeypatch, tmp_path):
    """What ranks of a cluster and deployed members run."""
    monkeypatch.setitem(ALGORITHMS._makers, "flat-model", FlatModel)
    with pytest.raises(hf.HoldfastError, match=NODE_METHODS[FlatModel]):
        make_plan(tmp_path, "algorithm=flat-model")
    with pytest.raises(hf.HoldfastError, match=NODE_METHODS[FlatModel]):
        make_federation(describe({"name": "flat-model"}), "federation.toml")
