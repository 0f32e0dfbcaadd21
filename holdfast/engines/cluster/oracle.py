"""Local solves that fail on one rank must not leave the others waiting for its messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.engines.common.oracle import BatchOracle


@dataclass
class Solves:
    """The local solves of one round on one rank."""

    tried: bool = False
    failure: str = ""  # the first


@dataclass
class CautiousOracle(BatchOracle):
    """Notes a solve that fails and goes on with NaN: what is exchanged never depends on values.

    After the round all ranks hear of it, and raise the error together.
    """

    solves: Solves = field(kw_only=True)
    counts: bool = field(kw_only=True)  # whether anybody needs the solution

    def argmin(self, linear: Tensor, centre: Tensor, *arguments: Any, **options: Any) -> Tensor:
        self.solves.tried = True
        try:
            return super().argmin(linear, centre, *arguments, **options)
        except HoldfastError as error:
            if self.counts:
                self.solves.failure = self.solves.failure or str(error)
            return torch.full((len(self.nodes), linear.shape[-1]), torch.nan).to(linear)
