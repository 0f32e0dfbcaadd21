"""A method without a leader, averaged by a server that a client can only answer.

A Flower client keeps no process between messages. So a round is computed from its beginning with the means
that are known, until it asks for one that is not: that message is the answer. Draws are functions of node,
round and step, so every repetition computes the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from holdfast.contract import Algorithm, Inbox
from holdfast.core.errors import HoldfastError
from holdfast.core.randomness import coin
from holdfast.core.tree import tree_map
from holdfast.engines.common.carrier import Received
from holdfast.engines.common.oracle import BatchOracle
from holdfast.flower.records import Named, as_tree, below

M = TypeVar("M")


class _MeanWantedError(Exception):
    """The round goes on when the mean of everybody's ``message`` is known."""

    def __init__(self, message: Any) -> None:
        self.message = message


@dataclass
class ReplayedPeers:
    """The link to a server of ``nodes`` nodes whose first ``known`` means of a round are in ``means``."""

    nodes: int
    seed: int
    round: int
    means: Named
    known: int
    like: Tensor
    draws: int = 0
    exchanges: int = 0

    @property
    def degree(self) -> Tensor:
        return torch.full((1, 1), self.nodes - 1).to(self.like)

    def exchange(self, message: M, sporadic: bool = False) -> Inbox[M]:
        if self.exchanges == self.known:
            raise _MeanWantedError(message)
        mean = as_tree(below(self.means, str(self.exchanges)), message, "the server's mean")
        mean = tree_map(lambda t: t.to(self.like.device), mean)
        self.exchanges += 1
        return Received(mean, lambda: tree_map(lambda m, own: self.nodes * m - own, mean, message))

    def coin(self, probability: float) -> bool:
        self.draws += 1
        return coin(self.seed, self.round, self.draws, probability)

    @property
    def edges(self) -> NoReturn:
        raise HoldfastError("edges: a server has no links between nodes")


def replay(
    method: Algorithm, state: Any, x0: Tensor | None, oracle: BatchOracle, peers: ReplayedPeers
) -> tuple[Any, Any]:
    """(the state after the stage, None), or (None, the message whose mean is wanted).

    ``x0`` [d]: the model to begin with, at the start only.
    """
    try:
        after = method.round(state, oracle, peers) if x0 is None else method.init(x0[None], oracle, peers)
    except _MeanWantedError as wanted:
        return None, wanted.message
    return after, None
