"""TAMUNA: Scaffnew for cohorts whose clients send only some entries of their models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from holdfast.contract import (
    ALGORITHMS,
    Capabilities,
    Oracle,
    ServerAlgorithm,
)
from holdfast.contract.parameters import Rate
from holdfast.core.validation import Probability
from holdfast.optimizers import PLAIN

Copies = Annotated[int, Field(ge=2)]


class Client(NamedTuple):
    h: Tensor  # tends to the client's own gradient at the optimum; sums to zero over all clients


class Server(NamedTuple):
    x: Tensor
    moved: Tensor  # what the last round added to x


@ALGORITHMS.register(
    "tamuna",
    family="primal-dual, with a server",
    paper="Condat et al. 2023; CompressedScaffnew: Condat et al. 2022",
)
@dataclass(frozen=True)
class TAMUNA(ServerAlgorithm[Server]):
    """Scaffnew with cohorts; every entry is sent by a few clients (Condat et al. 2023).

    With all clients in a round it is CompressedScaffnew (Condat et al. 2022), and Scaffnew if all send all.
    """

    declared = Capabilities(
        assumes_convex=True,
        answers=True,
        compensates=True,  # feedback would bring entries back that others are to send
        columnwise=True,
    )

    lr: Rate  # gamma; 1/L is safe
    p: Probability  # of communicating after a step: rounds have 1/p steps on average
    copies: Copies | None = None  # s: how many clients of the cohort send each entry; None: all of them
    chi: Probability = 0.5  # step of h; up to n (s-1) / (s (n-1)) is safe, for n clients in all

    @property
    def capabilities(self) -> Capabilities:
        # Zeros stand for the entries that others send. Of a single client, no h would ever move.
        return replace(self.declared, sends_zeros=self.copies is not None, least_cohort=self.copies or 2)

    def init(self, x0: Tensor) -> Client:
        return Client(h=torch.zeros_like(x0))

    def init_server(self, x0: Tensor) -> Server:
        return Server(x=x0, moved=torch.zeros_like(x0))

    def broadcast(self, server: Server) -> Tensor:
        return server.x

    def client(self, s: Client, received: Tensor, oracle: Oracle) -> tuple[Client, Tensor]:
        steps = 1
        while not oracle.coin(self.p):
            steps += 1
        start = received.expand_as(s.h)
        x, _ = PLAIN.descend(start, lambda x: oracle.grad(x) - s.h, self.lr, steps, ())
        return s, self._parts(oracle, x) * (x - start)

    def server(self, server: Server, mean: Tensor, share: float) -> Server:
        return Server(x=server.x + mean, moved=mean)

    def answer(self, server: Server) -> Tensor:
        return server.moved

    def finish(self, s: Client, sent: Tensor, answer: Tensor, oracle: Oracle) -> Client:
        parts = self._parts(oracle, s.h)
        # What the client sent of an entry is its weight too large. These sum to zero over the cohort.
        excess = (parts * answer - sent) / parts.amax(-1, keepdim=True).clamp(min=1)
        return Client(h=s.h + self.p * self.chi / self.lr * excess)

    def _parts(self, oracle: Oracle, x: Tensor) -> Tensor:
        """Weights of the entries that the client sends; they are alike in the whole round."""
        if self.copies is None:
            return torch.ones_like(x)
        return oracle.parts(x, self.copies)

    def dual(self, s: Client) -> Tensor:
        return s.h

    def model(self, server: Server) -> Tensor:
        return server.x
