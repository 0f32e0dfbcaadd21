"""DSpodFL: nodes compute and links transmit only now and then (Zehtabi et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.contract import (
    ALGORITHMS,
    Algorithm,
    Capabilities,
    Memory,
    Optimizer,
    Oracle,
    Peers,
)
from holdfast.contract.parameters import Rate
from holdfast.core.errors import HoldfastError
from holdfast.core.tree import tree_map
from holdfast.optimizers import PLAIN


class Node(NamedTuple):
    x: Tensor
    memory: Memory = ()  # the optimiser's


@ALGORITHMS.register("dspodfl", family="sporadic", paper="Zehtabi et al. 2024, eq. 2-4")
@dataclass(frozen=True)
class DSpodFL(Algorithm):
    """DGD whose nodes and links take part when they can; favours busy nodes unless corrected (DSpodFL).

    How often they can is the network's (``Network.sporadic``). With both switches off this is DGD, with
    ``sporadic_links`` alone randomised gossip, with ``sporadic_gradients`` alone sporadic SGD.
    """

    declared = Capabilities(topology="graph", needs_exact_sums=False, columnwise=True)

    lr: Rate
    sporadic_gradients: bool = True  # False: every node computes in every round, however long it takes
    sporadic_links: bool = True  # False: every link transmits in every round
    bias_correction: bool = False  # divide steps by the probability of computing; not in the paper
    optimizer: Optimizer = PLAIN  # of nodes that compute; it leaves the memory of the others as it is

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bias_correction and not self.sporadic_gradients:
            raise HoldfastError(
                "DSpodFL.bias_correction: there is no bias where every node computes in every round; "
                "leave it out, or set sporadic_gradients"
            )

    def init(self, x0: Tensor, oracle: Oracle, peers: Peers) -> Node:
        return Node(x=x0, memory=self.optimizer.memory(x0))

    def round(self, s: Node, oracle: Oracle, peers: Peers) -> Node:
        able = oracle.able if self.sporadic_gradients else None
        direction, memory = self.optimizer.single(oracle.grad(s.x, where=able), s.memory, s.x)
        if able is not None and not self.optimizer.plain:  # plain steps are zero with the gradient
            direction = torch.where(able, direction, 0.0)
            memory = tree_map(lambda new, old: torch.where(able, new, old), memory, s.memory)
        if self.bias_correction:
            direction = direction / oracle.chance.to(direction)
        mixed = peers.exchange(s.x, sporadic=self.sporadic_links).mixed
        return Node(x=mixed - self.lr * direction, memory=memory)

    def model(self, s: Node) -> Tensor:
        return s.x
