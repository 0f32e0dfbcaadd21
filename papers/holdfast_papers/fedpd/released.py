"""What the authors' MATLAB code of Fig. 2 does, where the text is silent or says something else.

github.com/564612540/FedPD, folder ``Matlab/FedPD_v2``. There f_i is divided by the number of agents, 100, so
that its step sizes are a hundred times ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from holdfast.algorithms.fedavg import FedAvg, Server
from holdfast.contract import Oracle, ServerAlgorithm, most_steps
from holdfast.contract.parameters import Rate
from holdfast.core.validation import Count, NonNegative
from holdfast.data.dataset import Dataset


class Own(NamedTuple):
    x: Tensor  # the client's own model, from which it continues


@dataclass(frozen=True)
class FedProx(ServerAlgorithm[Server]):
    """``Fed_Prox.m``: SARAH from the client's *own* last model, with a pull towards the server's.

    ``pull`` is the share of the way to the server's model that a step takes: the usual rho is pull / lr.
    """

    lr: Rate
    pull: NonNegative
    local_steps: Count = 1

    def init(self, x0: Tensor) -> Own:
        return Own(x0)

    def init_server(self, x0: Tensor) -> Server:
        return Server(x0)

    def broadcast(self, server: Server) -> Tensor:
        return server.x

    def client(self, s: Own, received: Tensor, oracle: Oracle) -> tuple[Own, Tensor]:
        x = before = s.x
        gradient = oracle.full_grad(x)
        for step in range(self.local_steps):
            if step:
                here, there = oracle.grads(x, before)  # the same samples at both points
                gradient = gradient + here - there
            before, x = x, x - self.lr * gradient - self.pull * (x - received)
        return Own(x), x

    def server(self, server: Server, mean: Tensor, share: float) -> Server:
        return Server(mean)

    def model(self, server: Server) -> Tensor:
        return server.x


@dataclass(frozen=True)
class DecayingFedAvg(FedAvg):
    """``mainiter_SGD.m`` with small batches: step q = 1..Q of round r = 0, 1, ... is lr / (Q r + q).

    Only the first step of a round is lr / sqrt(Q r / 5 + 1).
    """

    def client(self, s: tuple[()], received: Tensor, oracle: Oracle) -> tuple[tuple[()], Tensor]:
        x, steps = received, most_steps(self.local_steps)
        before = steps * oracle.round
        for q in range(1, steps + 1):
            rate = self.lr / ((before / 5 + 1) ** 0.5 if q == 1 else before + q)
            x = x - rate * oracle.grad(x)
        return s, x - received


@dataclass(frozen=True)
class FullFedAvg(FedAvg):
    """FedAvg-GD: every local step takes all samples, whatever the batch size of the experiment."""

    def client(self, s: tuple[()], received: Tensor, oracle: Oracle) -> tuple[tuple[()], Tensor]:
        x = received
        for _ in range(most_steps(self.local_steps)):
            x = x - self.lr * oracle.full_grad(x)
        return s, x - received


def strong_data(nodes: int, seed: int, samples: int = 400, dim: int = 20) -> Dataset:
    """The strongly heterogeneous agents of ``main.m``, which are not those of the text.

    Agent i has a model x_i = U[0, 40]^dim + integers from -10 to 10, and scores a^T x_i. A threshold N(0, 1)
    times the largest score is meant to flip labels that are below it. The code overwrites scores while it
    still reads them: a score that was set to 1 is compared with its threshold again. So a positive score
    becomes +1 only where the threshold is below 1, which is in half of all cases. The lines are in its order.
    """
    rng = np.random.default_rng(seed)
    a = np.concatenate([rng.standard_normal((nodes, samples, dim - 1)), np.ones((nodes, samples, 1))], axis=2)
    models = rng.uniform(0, 40, (nodes, dim)) + rng.integers(-10, 11, (nodes, dim))
    label = np.einsum("nsd,nd->ns", a, models)
    threshold = rng.standard_normal((nodes, samples)) * label.max()
    label[(label > 0) & (label > threshold)] = 1
    label[(label > 0) & (label < threshold)] = 2
    label[(label < 0) & (-label > threshold)] = 2
    label[(label < 0) & (-label < threshold)] = 1
    label[label == 2] = -1
    return Dataset(
        x_train=torch.tensor(a.reshape(-1, dim)),
        y_train=torch.tensor(label.reshape(-1)),
        x_test=torch.empty(0, dim, dtype=torch.float64),
        y_test=torch.empty(0, dtype=torch.float64),
        classes=None,
        groups=torch.arange(nodes).repeat_interleave(samples),
    )
