"""FedAvg and FedProx: average the models, correct nothing. Both drift when clients differ."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.contract import (
    ALGORITHMS,
    Capabilities,
    Gradient,
    LocalSteps,
    Memory,
    Optimizer,
    Oracle,
    ServerAlgorithm,
    most_steps,
)
from holdfast.contract.parameters import Rate
from holdfast.core.errors import HoldfastError
from holdfast.core.validation import NonNegative
from holdfast.optimizers import PLAIN


class Change(NamedTuple):
    """What a client sends with ``normalize``."""

    x: Tensor  # how far it went, per step
    steps: Tensor  # [..., 1]: in how many


class Server(NamedTuple):
    x: Tensor
    memory: Memory = ()  # the server optimiser's


@ALGORITHMS.register("fedavg", family="plain averaging", paper="McMahan et al. 2017")
@dataclass(frozen=True)
class FedAvg(ServerAlgorithm[Server]):
    """Local SGD averaged by a server; several steps drift on heterogeneous data (McMahan et al. 2017).

    Where clients take unequal numbers of steps, it leans towards those who take more. ``normalize`` averages
    what they achieve per step instead, which leaves the drift alone (FedNova, Wang et al. 2020).
    """

    declared = Capabilities(needs_exact_sums=False, unequal_steps=True, columnwise=True)

    lr: Rate
    local_steps: LocalSteps = 1
    server_lr: Rate = 1.0  # other than 1: generalised FedAvg with two-sided step sizes
    optimizer: Optimizer = PLAIN
    server_optimizer: Optimizer = PLAIN  # FedOpt: sees minus the clients' mean change as its gradient
    normalize: bool = field(default=False, kw_only=True)  # FedNova: average the changes per step

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.declared, clippable=not self.normalize)

    def init(self, x0: Tensor) -> Memory:
        return self.optimizer.memory(x0)

    def init_server(self, x0: Tensor) -> Server:
        return Server(x=x0, memory=self.server_optimizer.init(x0))

    def broadcast(self, server: Server) -> Tensor:
        return server.x

    def client(self, s: Memory, received: Tensor, oracle: Oracle) -> tuple[Memory, Tensor | Change]:
        gradient, steps = self.gradient(received, oracle), oracle.steps(self.local_steps)
        x, memory = self.optimizer.descend(received, gradient, self.lr, steps, s)
        if self.normalize:
            return memory, Change((x - received) / steps, torch.ones_like(x[..., :1]) * steps)
        return memory, x - received

    def gradient(self, server_x: Tensor, oracle: Oracle) -> Gradient:
        return oracle.grad

    def server(self, server: Server, mean: Tensor | Change, share: float) -> Server:
        if isinstance(mean, Change):
            mean = mean.x * mean.steps
        direction, memory = self.server_optimizer.update(-mean, server.memory, server.x)
        return Server(x=server.x - self.server_lr * direction, memory=memory)

    def model(self, server: Server) -> Tensor:
        return server.x


@ALGORITHMS.register("fedprox", family="plain averaging", paper="Li et al. 2020")
@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg with a pull (rho/2)||x - x_server||^2 towards the server's model; less drift, still biased."""

    declared = Capabilities(needs_exact_sums=False, unequal_steps=True, columnwise=True)

    rho: NonNegative = 0.1
    reduced: bool = False  # SARAH: a full gradient in every round, then differences of minibatch gradients

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reduced and self.normalize:
            raise HoldfastError("FedProx.normalize: SARAH's steps are the same for all; leave out either")
        if self.reduced and not self.optimizer.plain:
            raise HoldfastError(
                "FedProx.optimizer: SARAH's steps are plain ones; leave out either it or reduced"
            )

    @property
    def capabilities(self) -> Capabilities:
        why = "SARAH's steps are not counted by node" if self.reduced else ""
        return super().capabilities.with_equal_steps(why)

    def client(self, s: Memory, received: Tensor, oracle: Oracle) -> tuple[Memory, Tensor | Change]:
        if not self.reduced:
            return super().client(s, received, oracle)
        x = before = received
        gradient = oracle.full_grad(received)
        for step in range(most_steps(self.local_steps)):
            if step:
                here, there = oracle.grads(x, before)  # the same samples at both points
                gradient = gradient + here - there
            before, x = x, x - self.lr * (gradient + self.rho * (x - received))
        return s, x - received

    def gradient(self, server_x: Tensor, oracle: Oracle) -> Gradient:
        return lambda x: oracle.grad(x) + self.rho * (x - server_x)
