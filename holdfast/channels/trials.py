"""Trials of a step of error feedback on random vectors: how far nodes are from where they should be."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from holdfast.contract.channel import Channel, Draw, Mixing

ROUNDS = 100
SLOW_ROUNDS = 400  # a swing that grows by a hundredth in every round has to be seen
DECADES = (0.0, 3.0)  # over how many the entries of a vector are spread
LARGEST = 1e3  # times the start: it diverges

Exchange = Callable[[Tensor, int], Tensor]  # of the messages [n, d] in a round, to what the method sees


def mixing(form: Channel, by: Mixing, d: int) -> float:
    """Neighbours that only mix should come to their mean; how far they are from it in the end.

    ``by``: how messages are put together. ``d``: how long they are.
    """
    x = _start(by, d, 0)
    goal, largest, exchange = x.mean(0), LARGEST * x.norm(), _exchanges(form, by, x)
    for round in range(ROUNDS):
        x = exchange(x, round)
        if not x.norm() < largest:
            return math.inf
    return float((x - goal).norm())


def mixing_twice(form: Channel, by: Mixing, gamma: float, d: int) -> float:
    """Neighbours whose dual adds up what mixing changes should come to their mean, without any curvature.

    p = x + y, x' is p mixed by (1 - share) I + share W, and y' = y + x' - p. Returned is the energy
    |x|^2 + |y|^2 / g of the last rounds, relative to that of the start: model and dual swing around the mean,
    and g = gamma share is about the square of how fast. 1 or more: it does not die away.
    """
    return max(_swing(form, by, gamma, d, decades) for decades in DECADES)


def _swing(form: Channel, by: Mixing, gamma: float, d: int, decades: float) -> float:
    share, x = by.twice, _start(by, d, 0)
    x = x * 10 ** (-decades * Draw(0, 2**31, 1, torch.arange(1)).uniform(d))
    x = x - x.mean(0)
    y, exchange, energies = torch.zeros_like(x), _exchanges(form, by, x), list[float]()
    for round in range(SLOW_ROUNDS):
        energies.append(float(x.square().sum() + y.square().sum() / (gamma * share)))
        if not energies[-1] < LARGEST**2 * energies[0]:
            return math.inf
        p = x + y
        x = p + share * (exchange(p, round) - p)
        y = y + x - p
    last = energies[-SLOW_ROUNDS // 4 :]
    return sum(last) / len(last) / energies[0]


def averaging(form: Channel, by: Mixing, d: int) -> float:
    """Behind a server each node has a quadratic of its own and a dual, as methods do that add up means.

    x is the mean of p = x - a (x - b) - y, and y' = y + p - x. Returned is how far x is from the optimum.
    """
    x, centre = _start(by, d, 0), _start(by, d, 1)
    rate, y = Draw(0, 2**31, 2, torch.arange(len(x))).uniform(1), torch.zeros_like(x)
    goal, largest, exchange = (rate * centre).sum(0) / rate.sum(), LARGEST * x.norm(), _exchanges(form, by, x)
    for round in range(ROUNDS):
        message = x - rate * (x - centre) - y
        x = exchange(message, round)
        y = y + message - x
        if not x.norm() < largest:
            return math.inf
    return float((x - goal).norm())


def _start(by: Mixing, d: int, part: int) -> Tensor:
    """[n, d], uniform in [-1/2, 1/2)."""
    return Draw(0, 2**31, part, torch.arange(by.nodes)).uniform(d) - 0.5


def _exchanges(form: Channel, by: Mixing, x: Tensor) -> Exchange:
    """What becomes of messages like ``x``, round after round."""
    nodes, weights = torch.arange(len(x)), by.weights
    sender, receiver = form.init(x), form.init_receiver(x)

    def exchange(message: Tensor, round: int) -> Tensor:
        nonlocal sender, receiver
        own = form.decode(form.encode(message, sender, Draw(0, round, 0, nodes)), message)
        sender = form.update(message, own, sender)
        seen: Tensor
        if weights is None:
            seen, receiver = form.average(message, own, own.mean(0).expand_as(own), sender, receiver)
        else:
            mixed = torch.from_numpy(weights @ own.numpy())
            seen, receiver = form.combine(message, own, mixed, sender, receiver)
        return seen

    return exchange
