"""Mistakes in a user's optimiser or channel: one line that names the class and the function."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from contract_keepers import Memoryless, Right, RightChannel, RightServer, minimize
from federation_runs import describe

import holdfast as hf
from holdfast.channels import CHANNELS
from holdfast.core.tree import tree_map
from holdfast_deploy.federation_file import make_federation


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


def test_a_simulation_checks_alike():
    data = [(torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64))] * 3
    problem = hf.build_problem(torch.nn.Linear(2, 2), hf.FederatedData.of_nodes(data))
    with pytest.raises(hf.HoldfastError, match=OPTIMIZERS[OneThing]):
        hf.Simulation(hf.Gossip(lr=0.1, optimizer=OneThing()), problem, hf.Network.of(hf.ring(3)))


def test_a_federation_checks_alike(monkeypatch):
    monkeypatch.setitem(CHANNELS._makers, "forgetful", ForgetfulSender)
    with pytest.raises(hf.HoldfastError, match=CHANNELS_ON[ForgetfulSender, "ring"]):
        make_federation(describe({"name": "dsgd", "lr": 0.1}) | {"channel": "forgetful"}, "federation.toml")
