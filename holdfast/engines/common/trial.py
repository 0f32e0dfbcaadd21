"""What a method sends and asks for, found by running it on the zero problem: nothing is computed or sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from holdfast.contract import Algorithm, Method, ServerAlgorithm
from holdfast.contract.channel import Use
from holdfast.core.randomness import Word, coin
from holdfast.core.tree import tree_map
from holdfast.engines.common.counters import Work
from holdfast.engines.common.oracle import BatchOracle
from holdfast.problem.problem import ExactProblem
from holdfast.topology import Network

# --- the objective that is zero -------------------------------------------------------------------------


class ZeroProblem(ExactProblem):
    """f_i = 0."""

    def __init__(self, nodes: int, dim: int = 1) -> None:
        self.nodes, self.dim = nodes, dim
        self.x0 = torch.zeros(dim, dtype=torch.float64)  # any local solver's tolerance is within reach

    def full_grads(self, x: Tensor, nodes: Tensor, round: Word = 0, step: Word = 0) -> Tensor:
        return torch.zeros_like(x)

    def samples(self, nodes: Tensor) -> int:
        return 0  # so that ``Work.sample_gradients`` counts minibatches

    def values(self, x: Tensor, nodes: Tensor) -> Tensor:
        return x.new_zeros(len(nodes))

    def hessians(self, x: Tensor, nodes: Tensor) -> Tensor:
        # Invertible, also where no quadratic is added.
        return torch.eye(self.dim, dtype=x.dtype).expand(len(nodes), -1, -1)

    def hessian_products(self, x: Tensor, v: Tensor, nodes: Tensor) -> Tensor:
        return v

    def global_value_and_grad(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.new_zeros(()), torch.zeros_like(x)

    def global_value(self, x: Tensor) -> Tensor:
        return x.new_zeros(())


# --- what a method sends and asks for, found by running it on the zero problem --------------------------


M = TypeVar("M")
Flip = Callable[[float], bool]  # how coins fall

TRIALS = 16  # rounds in which shared coins fall this way and that


@dataclass
class RecordingPeers:
    """The links of one node, over which its own messages come back. Keeps what was sent and asked for.

    Messages have so many ``rows``, as if there were several nodes like it.
    """

    network: Network
    node: int
    like: Tensor
    flip: Flip
    rows: int = 1
    sent: list[Any] = field(default_factory=list)
    uses: set[Use] = field(default_factory=set)

    @property
    def links(self) -> int:
        return self.network.nodes - 1 if self.network.is_server else len(self.network.neighbours(self.node))

    @property
    def degree(self) -> Tensor:
        return torch.full((self.rows, 1), self.links).to(self.like)

    @property
    def edges(self) -> RecordingEdges:
        self.uses.add("links")
        return RecordingEdges(self.rows, self.links, self.like)

    def exchange(self, message: M, sporadic: bool = False) -> RecordingInbox[M]:
        self.sent.append(message)
        return RecordingInbox(message, self.uses)

    def coin(self, probability: float) -> bool:
        return self.flip(probability)


@dataclass(frozen=True)
class RecordingInbox(Generic[M]):
    """What a node itself has sent."""

    mixed: M
    uses: set[Use]

    @property
    def neighbour_sum(self) -> M:
        self.uses.add("neighbour sums")
        return self.mixed


@dataclass(frozen=True)
class RecordingEdges:
    """The links of a node one by one; where there are several ``rows``, those of one after the other."""

    rows: int
    links: int
    like: Tensor

    @property
    def sign(self) -> Tensor:
        return torch.ones(self.rows * self.links, 1).to(self.like)

    degree = sign

    def spread(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.links, 0)

    def total(self, z: Tensor) -> Tensor:
        return z.view(self.rows, self.links, -1).sum(1)

    def swap(self, z: Tensor) -> Tensor:
        return z


def zero_oracle(nodes: int, node: int, dim: int, round: int = 0) -> BatchOracle:
    """The view of ``node`` of the zero problem."""
    return BatchOracle(ZeroProblem(nodes, dim), torch.tensor([node]), 0, round, Work())


def trial(
    method: Algorithm, network: Network, size: int, coins: Callable[[], Flip], rounds: Iterable[int]
) -> list[RecordingPeers]:
    """What node 0 with a model of ``size`` numbers sends and asks for: at the start, then in ``rounds``.

    ``coins`` says anew how coins fall, at the start and in each round.
    """
    x0 = torch.zeros(size, dtype=torch.float64)
    seen = [RecordingPeers(network.at(0), 0, x0, coins())]
    state = method.at(0).init(x0[None].clone(), zero_oracle(network.nodes, 0, size), seen[0])
    for r in rounds:
        seen.append(RecordingPeers(network.at(r), 0, x0, coins()))
        state = method.at(r).round(state, zero_oracle(network.nodes, 0, size, r), seen[-1])
    return seen


def method_uses(method: Method, network: Network) -> set[Use]:
    """What ``method`` asks for beyond ``exchange`` and ``mixed``."""
    if isinstance(method, ServerAlgorithm):
        return set()
    start, *rounds = _trials(method, network, method.capabilities.least_dim)
    before: set[Use] = {"warm start"} if start.sent else set()
    return before.union(start.uses, *(peers.uses for peers in rounds))


def sent_in_round(method: Method, network: Network, like: Tensor) -> list[Any]:
    """Zeros like the messages of one node in a round, exchange by exchange; ``like`` is a model, [d].

    Of a method led by a server, the client's message. Where coins decide, those of the round that sends most.
    """

    def sent(size: int) -> list[Any]:
        if isinstance(method, ServerAlgorithm):
            return [client_message(method, network.nodes, size)]
        return max((peers.sent for peers in _trials(method, network, size)[1:]), key=len)

    return list(grown(method, sent, like))


def _trials(method: Method, network: Network, size: int) -> list[RecordingPeers]:
    """Trial rounds in which coins fall this way and that, whatever their probability."""
    assert isinstance(method, Algorithm)
    draws = count()

    def flip(probability: float) -> bool:
        return coin(0, 0, next(draws), 0.5)

    return trial(method, network, size, lambda: flip, range(TRIALS))


def client_message(method: ServerAlgorithm[Any], nodes: int, size: int) -> Any:
    """What a client with a model of ``size`` numbers sends to the server."""
    now, x0 = method.at(0), torch.zeros(size, dtype=torch.float64)
    received = now.broadcast(now.init_server(x0.clone()))
    return now.client(now.init(x0[None].clone()), received, zero_oracle(nodes, 0, size))[1]


def grown(method: Method, tree_of: Callable[[int], Any], like: Tensor) -> Any:
    """A tree of zeros for a model ``like`` [d], given what ``tree_of`` gives for the two smallest models.

    The size of every tensor is a number, or grows with the dimension.
    """
    least = method.capabilities.least_dim

    def grow(a: Tensor, b: Tensor) -> Tensor:
        sizes = [m + (n - m) * (like.numel() - least) for m, n in zip(a.shape, b.shape, strict=True)]
        return torch.zeros(sizes, dtype=like.dtype, device=like.device)

    one, two = tree_of(least), tree_of(least + 1)
    return tree_map(grow, one, two)
