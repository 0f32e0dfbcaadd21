"""DSpodFL: nodes compute and links transmit only now and then (Zehtabi et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from holdfast.contract import ALGORITHMS, Algorithm, Oracle, Peers
from holdfast.contract.schedules import Rate
from holdfast.core.errors import HoldfastError


class Node(NamedTuple):
    x: Tensor


@ALGORITHMS.register("dspodfl", family="sporadic", paper="DSpodFL, eq. 2-4")
@dataclass(frozen=True)
class DSpodFL(Algorithm):
    """DGD whose nodes and links take part when they can; favours busy nodes unless corrected (DSpodFL).

    How often they can is the network's (``Network.sporadic``). With both switches off this is DGD, with
    ``sporadic_links`` alone randomised gossip, with ``sporadic_gradients`` alone sporadic SGD.
    """

    columnwise: ClassVar[bool] = True

    needs_graph: ClassVar[bool] = True

    lr: Rate
    sporadic_gradients: bool = True  # False: every node computes in every round, however long it takes
    sporadic_links: bool = True  # False: every link transmits in every round
    bias_correction: bool = False  # divide gradients by the probability of computing; not in the paper

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bias_correction and not self.sporadic_gradients:
            raise HoldfastError(
                "DSpodFL.bias_correction: there is no bias where every node computes in every round; "
                "leave it out, or set sporadic_gradients"
            )

    def init(self, x0: Tensor, oracle: Oracle, peers: Peers) -> Node:
        return Node(x=x0)

    def round(self, s: Node, oracle: Oracle, peers: Peers) -> Node:
        gradient = oracle.grad(s.x, where=oracle.able if self.sporadic_gradients else None)
        if self.bias_correction:
            gradient = gradient / oracle.chance.to(gradient)
        return Node(x=peers.exchange(s.x, sporadic=self.sporadic_links).mixed - self.lr * gradient)

    def model(self, s: Node) -> Tensor:
        return s.x
