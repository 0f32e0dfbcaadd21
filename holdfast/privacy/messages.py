"""A method whose messages are clipped and noised, so that nobody sees whether a node took part with its data.

McMahan et al., "Learning differentially private recurrent language models" (2018): the server takes in the
sum of clipped messages with normal noise, over the expected size of the cohort.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.contract import Method, ServerAlgorithm
from holdfast.core.errors import HoldfastError
from holdfast.core.randomness import Stream, philox
from holdfast.core.tree import leaves, tree_map
from holdfast.privacy.budget import NodeDP
from holdfast.problem.private import normals

CLIP_RATE = 0.2  # by how much the clipping norm adapts, and the noise of the count over the cohort's size:
COUNT_NOISE = 1 / 20  # both as Andrew et al. (2021) recommend


class Noised(NamedTuple):
    """The server's state."""

    inner: Any
    clip: Tensor  # [1]
    round: Tensor  # [1]: how many were noised


class Told(NamedTuple):
    """What clients are sent where the clipping norm adapts."""

    inner: Any
    clip: Tensor


class Clipped(NamedTuple):
    """What they send there."""

    inner: Any
    within: Tensor  # [..., 1]: 1/2 if the message was not clipped, -1/2 if it was


@dataclass(frozen=True)
class PrivateMessages(ServerAlgorithm[Noised]):
    """``inner`` with messages as ``budget`` allows, in rounds of ``expected`` clients.

    ``multiplier``: the noise of all that a round releases. Noise is drawn from the ``seed``, as in every
    simulation: whoever knows it can take it away again.
    """

    inner: Any
    budget: Any
    multiplier: float
    expected: int
    seed: int

    def __post_init__(self) -> None:
        assert isinstance(self.inner, ServerAlgorithm)
        assert isinstance(self.budget, NodeDP)
        if self.budget.quantile is not None and self.multiplier >= 2 * self.expected * COUNT_NOISE:
            raise HoldfastError(
                f"NodeDP.quantile: the noise, {self.multiplier:.3g}, is more than a count of {self.expected} "
                "clients bears; leave it out, or take larger cohorts"
            )

    @property
    def poisson_cohorts(self) -> bool:
        return bool(self.budget.cohorts == "poisson")

    @property
    def adaptive(self) -> bool:
        """Whether the clipping norm changes."""
        return self.budget.quantile is not None

    @property
    def of_messages(self) -> float:
        """The multiplier of the messages' own noise: a count beside them spends the rest."""
        if not self.adaptive:
            return self.multiplier
        count = self.expected * COUNT_NOISE
        return 1 / math.sqrt(self.multiplier**-2 - (2 * count) ** -2)

    def init(self, x0: Tensor) -> Any:
        return self.inner.init(x0)

    def init_server(self, x0: Tensor) -> Noised:
        clip, round = x0.new_full((1,), self.budget.clip), x0.new_zeros(1)
        return Noised(self.inner.init_server(x0), clip, round)

    def broadcast(self, server: Noised) -> Any:
        sent = self.inner.broadcast(server.inner)
        return Told(sent, server.clip) if self.adaptive else sent

    def client(self, s: Any, received: Any, oracle: Any) -> tuple[Any, Any]:
        told, clip = received if self.adaptive else (received, self.budget.clip)
        after, message = self.inner.client(s, told, oracle)
        squares = [part.square().sum(-1, keepdim=True) for part in leaves(message)]
        norm = torch.stack(squares).sum(0).sqrt()  # [..., 1]
        # A message that is not finite must not show: it counts as if it were zero.
        factor = torch.where(norm.isfinite(), clip / torch.maximum(norm, torch.as_tensor(clip).to(norm)), 0.0)
        clipped = tree_map(lambda part: torch.where(norm.isfinite(), part * factor, 0.0), message)
        if not self.adaptive:
            return after, clipped
        return after, Clipped(clipped, (norm <= clip).to(norm) - 0.5)

    def server(self, server: Noised, mean: Any, share: float) -> Noised:
        inner, within = mean if self.adaptive else (mean, None)
        senders = math.sqrt(self.expected) if self.budget.noise == "clients" else 1.0
        deviation = self.of_messages * senders * server.clip / self.expected
        parts = iter(range(1, 1 << 16))
        noised = tree_map(lambda part: part + deviation * self._noise(server, part, next(parts)), inner)
        clip = server.clip
        if within is not None:
            count = within + 0.5 + COUNT_NOISE * self._noise(server, within, 0)
            clip = clip * torch.exp(-CLIP_RATE * (count - self.budget.quantile))
        return Noised(self.inner.server(server.inner, noised, share), clip, server.round + 1)

    def _noise(self, server: Noised, like: Tensor, part: int) -> Tensor:
        """Standard normal numbers [d] for one part of what a round releases."""
        blocks = torch.arange(max(2, -(-like.shape[-1] // 4)), device=like.device)
        counter = (blocks, part, server.round.long(), 0)
        return normals(philox(counter, (self.seed, int(Stream.NOISE) + (1 << 20))))[: like.shape[-1]].to(like)

    def model(self, server: Noised) -> Tensor:
        model: Tensor = self.inner.model(server.inner)
        return model

    def dual(self, s: Any) -> Tensor | None:
        dual: Tensor | None = self.inner.dual(s)
        return dual

    def personal(self, s: Any) -> Tensor | None:
        personal: Tensor | None = self.inner.personal(s)
        return personal

    @property
    def least_dim(self) -> int:
        return int(self.inner.least_dim)


def check_clippable(method: Method) -> None:
    """Refuses a method whose messages cannot be clipped and noised one by one."""
    name = type(method).__name__
    if not isinstance(method, ServerAlgorithm):
        raise HoldfastError(
            f"NodeDP: the server only averages what nodes of {name} send one another; take a method that a "
            "server leads, such as FedAvg, or hf.DP, which protects samples in every method"
        )
    if not method.clippable:
        raise HoldfastError(
            f"NodeDP: messages of {name} tell how a client's own memory changes, which the server has to "
            "match, and clipping drives the two apart; take FedAvg, FedProx or FedCM, or hf.DP"
        )
