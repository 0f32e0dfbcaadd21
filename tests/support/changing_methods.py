"""Toy methods whose hyperparameters change from round to round, in every form that ``at`` may give them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from test_conformance import NODES
from torch import Tensor

import holdfast as hf
from holdfast.contract import Algorithm, Oracle, Peers
from holdfast.contract.parameters import Rate, halving

RING, STAR = hf.Network.of(hf.ring(NODES)), hf.server(NODES)


class Own(NamedTuple):
    x: Tensor
    v: Tensor


@dataclass(frozen=True)
class Damping:
    """A part of a method that has numbers of its own."""

    momentum: float = 0.9
    weights: tuple[float, float] = (1.0, 0.5)


@dataclass(frozen=True)
class OwnMethod(Algorithm):
    """A user's method: momentum, with whatever ``at`` of the classes below changes."""

    lr: float
    steps: int = 2
    order: str = "heavy ball"
    damping: Damping = field(default_factory=Damping)
    scale: Tensor = field(default_factory=lambda: torch.ones(1))

    def init(self, x0: Tensor, oracle: Oracle, peers: Peers) -> Own:
        return Own(x0, torch.zeros_like(x0))

    def round(self, s: Own, oracle: Oracle, peers: Peers) -> Own:
        x, v = s
        for _ in range(self.steps):
            v = self.damping.momentum * v + self.damping.weights[1] * oracle.grad(x)
            x = x - self.lr * self.scale.to(x.device) * v if self.order == "heavy ball" else x - self.lr * v
        return Own(peers.exchange(x).mixed, v)

    def model(self, s: Own) -> Tensor:
        return s.x


class Cooling(OwnMethod):
    def at(self, round: int) -> OwnMethod:
        return dataclasses.replace(self, lr=self.lr / (1 + round))


class NestedCooling(OwnMethod):
    def at(self, round: int) -> OwnMethod:
        damping = Damping(momentum=0.9 * 0.8**round, weights=(1.0, 1 / (1 + round)))
        return dataclasses.replace(self, damping=damping)


class TensorCooling(OwnMethod):
    def at(self, round: int) -> OwnMethod:
        return dataclasses.replace(self, scale=torch.full((1,), 1 / (1 + round)))


class Longer(OwnMethod):
    """How many steps it takes cannot be an input of a program."""

    def at(self, round: int) -> OwnMethod:
        return dataclasses.replace(self, steps=1 + round)


class Alternating(OwnMethod):
    """Neither can a word."""

    def at(self, round: int) -> OwnMethod:
        order = "heavy ball" if round % 2 else "plain"
        return dataclasses.replace(self, order=order, scale=torch.full((1,), 0.5))


class CoolingGossip(hf.Gossip):
    """One of the library's methods, whose declared rate ``at`` changes."""

    def at(self, round: int) -> hf.Gossip:
        return dataclasses.replace(self, lr=self.lr / (1 + round))


@dataclass(frozen=True)
class PlainRate(hf.Gossip):
    """A rate that is scheduled, and declared as something else than ``Rate`` alone."""

    pull: Rate | None = None

    def round(self, s, oracle: Oracle, peers: Peers):
        after = super().round(s, oracle, peers)
        return after if self.pull is None else after._replace(x=after.x - self.pull * s.x)


SCHEDULED = hf.WarmupCosine(
    warmup=2, steps=30, inner=hf.Clip(halving(1.0, every=2), hf.AdamW(weight_decay=halving(0.1, every=1)))
)
REPLAYED = [
    (Cooling(lr=0.1), RING),
    (NestedCooling(lr=0.05), RING),
    (TensorCooling(lr=0.1), RING),
    (CoolingGossip(lr=0.1, local_steps=3), RING),
    (PlainRate(lr=0.1, pull=halving(0.2, every=2)), RING),
    (hf.FedDyn(alpha=1.0, lr=halving(0.1, every=2), local_steps=3), STAR),
    (hf.FedPD(eta=0.5, lr=halving(0.1, every=2), local_steps=3), STAR),
    (hf.LocalGECL(lr=0.01, local_steps=3, optimizer=SCHEDULED), RING),
    (hf.FedAvg(lr=0.05, server_lr=halving(0.1, every=2), server_optimizer=hf.FedYogi()), STAR),
]
REFUSED = [
    (Longer(lr=0.05), RING, "Longer.steps"),
    (Alternating(lr=0.05), RING, "Alternating.order"),
    (hf.FedPD(eta=0.5, lr=0.1, skip=halving(0.5, every=2)), STAR, "FedPD.skip"),
]


def name(algorithm) -> str:
    return type(algorithm).__name__
