"""A method, a server's method, an optimiser and a channel that keep the contract, to break one rule of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import holdfast as hf
from holdfast.core.tree import tree_map


class Own(NamedTuple):
    x: Tensor
    t: Tensor  # rounds so far, [..., 1]


@dataclass(frozen=True)
class Right(hf.Algorithm):
    """A method as it should be; tests derive classes that break one rule."""

    lr: float = 0.1

    def init(self, x0: Tensor, oracle: hf.Oracle, peers: hf.Peers) -> Any:
        return Own(x0, torch.zeros_like(x0[..., :1]))

    def round(self, s: Any, oracle: hf.Oracle, peers: hf.Peers) -> Any:
        return Own(peers.exchange(s.x - self.lr * oracle.grad(s.x)).mixed, s.t + 1)

    def model(self, s: Any) -> Any:
        return s.x


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


@dataclass(frozen=True)
class Memoryless(hf.LocalOptimizer):
    def init(self, x: Tensor) -> Any:
        return (torch.zeros_like(x), torch.zeros_like(x[..., :1]))

    def update(self, gradient: Tensor, memory: Any, x: Tensor) -> Any:
        return gradient, memory


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


FUNCTIONS = [lambda x: x.square().sum(), lambda x: (x - 1).square().sum(), lambda x: (x + 2).square().sum()]


def minimize(method: Any, topology: str = "ring", channel: Any = "identity") -> hf.MinimizeResult:
    return hf.minimize(FUNCTIONS, [0.0, 1.0], method, 2, topology=topology, channel=channel)
