"""A method whose messages are clipped and noised, which hides whether a node took part with its data.

McMahan et al., "Learning differentially private recurrent language models" (2018): the server takes in the
sum of clipped messages with normal noise, over the expected size of the cohort. The noise is the server's, or
each client adds it to its own message; with secure aggregation, clients only add shares of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.contract import Capabilities, Method, ServerAlgorithm
from holdfast.core.errors import HoldfastError
from holdfast.core.randomness import Word
from holdfast.core.tree import Tree, leaves, tree_map
from holdfast.privacy.budget import NodeDP
from holdfast.problem.private import OwnRandomness, counted_noise, noised

CLIP_RATE = 0.2  # by how much the clipping norm adapts, and the noise of the count over the cohort's size:
COUNT_NOISE = 1 / 20  # both as Andrew et al. (2021) recommend
OF_MESSAGES, OF_COUNTS = 1 << 20, (1 << 20) + 1  # draws of noise
SERVER = (1 << 31) - 1  # in the place of a node's number


class Noised(NamedTuple):
    """The server's state."""

    inner: Any
    clip: Tensor  # [1]
    round: Tensor  # [1]: how many were noised


class SentWithClip(NamedTuple):
    """The message to clients where the clipping norm adapts."""

    inner: Any
    clip: Tensor


class Clipped(NamedTuple):
    """The clients' message there."""

    inner: Any
    within: Tensor  # [..., 1]: 1/2 if the message was not clipped, -1/2 if it was


@dataclass(frozen=True)
class PrivateMessages(ServerAlgorithm[Noised]):
    """``inner`` with messages as ``budget`` allows, in rounds of ``expected`` clients.

    ``multiplier``: the noise of all that a round releases. ``contributors``: where noise is distributed, how
    many clients' shares amount to that. ``own``: noise that only this server or client can draw, for a real
    federation; None: noise from the ``seed``, as in every simulation, which anyone with it can subtract.
    """

    inner: Any
    budget: Any
    multiplier: float
    expected: int
    seed: int
    contributors: int = 1
    own: Tree = None

    def __post_init__(self) -> None:
        assert isinstance(self.inner, ServerAlgorithm)
        assert isinstance(self.budget, NodeDP)
        assert self.own is None or isinstance(self.own, OwnRandomness)
        if self.budget.quantile is not None and self.multiplier >= 2 * self.expected * COUNT_NOISE:
            raise HoldfastError(
                f"NodeDP.quantile: the noise, {self.multiplier:.3g}, is more than a count of {self.expected} "
                "clients bears; leave it out, or take larger cohorts"
            )

    @property
    def capabilities(self) -> Capabilities:
        poisson, least = self.budget.cohorts == "poisson", self.inner.capabilities.least_dim
        return replace(self.declared, poisson_cohorts=poisson, least_dim=least)

    @property
    def adaptive(self) -> bool:
        """Whether the clipping norm changes."""
        return self.budget.quantile is not None

    @property
    def of_messages(self) -> float:
        """The multiplier of the messages' own noise: a count beside them spends the rest."""
        if not self.adaptive:
            return self.multiplier
        return 1 / math.sqrt(self.multiplier**-2 - self.of_counts**-2)

    @property
    def of_counts(self) -> float:
        """The multiplier of the noise in the count, to which a client adds 1/2 or -1/2."""
        return self.expected * COUNT_NOISE / 0.5

    def init(self, x0: Tensor) -> Tree:
        return self.inner.init(x0)

    def init_server(self, x0: Tensor) -> Noised:
        clip, round = x0.new_full((1,), self.budget.clip), x0.new_zeros(1)
        return Noised(self.inner.init_server(x0), clip, round)

    def broadcast(self, server: Noised) -> Tree:
        sent = self.inner.broadcast(server.inner)
        return SentWithClip(sent, server.clip) if self.adaptive else sent

    def client(self, s: Tree, received: Any, oracle: Any) -> tuple[Any, Any]:
        given, clip = received if self.adaptive else (received, self.budget.clip)
        after, message = self.inner.client(s, given, oracle)
        squares = [part.square().sum(-1, keepdim=True) for part in leaves(message)]
        norm = torch.stack(squares).sum(0).sqrt()  # [..., 1]
        # A message that is not finite must not show: it counts as if it were zero.
        factor = torch.where(norm.isfinite(), clip / torch.maximum(norm, torch.as_tensor(clip).to(norm)), 0.0)
        sent = tree_map(lambda part: torch.where(norm.isfinite(), part * factor, 0.0), message)
        if self.adaptive:
            sent = Clipped(sent, (norm <= clip).to(norm) - 0.5)
        if self.budget.noise == "server":
            return after, sent
        if self.own is not None and self.budget.noise == "distributed":  # on a grid, finer than float32
            sent = tree_map(lambda part: part.double(), sent)
        return after, self._noised(sent, clip, oracle.nodes, oracle.round, 1 / math.sqrt(self.contributors))

    def server(self, server: Noised, mean: Any, share: float) -> Noised:
        if self.budget.noise == "server":  # of the sum, whose sensitivity is that of one message
            total = tree_map(lambda part: (part * self.expected)[None], mean)
            here = torch.full((1,), SERVER, device=server.clip.device)
            noised = self._noised(total, server.clip, here, server.round.long(), 1.0)
            mean = tree_map(lambda part: part[0] / self.expected, noised)
        mean = tree_map(lambda part: part.to(server.clip), mean)
        inner, clip = mean, server.clip
        if self.adaptive:
            inner, within = mean
            clip = clip * torch.exp(-CLIP_RATE * (within + 0.5 - self.budget.quantile))
        return Noised(self.inner.server(server.inner, inner, share), clip, server.round + 1)

    def _noised(self, sent: Tree, clip: float | Tensor, nodes: Tensor, round: Word, share: float) -> Tree:
        """``sent``, rows [m, ...] of ``nodes`` [m], with ``share`` of the noise that a release needs."""
        inner, within = sent if self.adaptive else (sent, None)
        parts = list(leaves(inner))
        values = torch.cat(parts, -1)
        sensitivity = torch.as_tensor(clip).to(values).expand(len(nodes), 1)
        draw = self.own if self.own is not None else counted_noise(self.seed)
        values = noised(draw, values, sensitivity, share * self.of_messages, nodes, round, 0, OF_MESSAGES)
        pieces = iter(torch.split(values, [part.shape[-1] for part in parts], -1))
        inner = tree_map(lambda _: next(pieces), inner)
        if within is None:
            return inner
        half = torch.full_like(sensitivity, 0.5)
        return Clipped(inner, noised(draw, within, half, share * self.of_counts, nodes, round, 0, OF_COUNTS))

    def finish(self, s: Tree, sent: Tree, answer: Any, oracle: Any) -> Tree:
        return self.inner.finish(s, sent.inner if self.adaptive else sent, answer, oracle)

    def model(self, server: Noised) -> Tensor:
        model: Tensor = self.inner.model(server.inner)
        return model

    def dual(self, s: Tree) -> Tensor | None:
        dual: Tensor | None = self.inner.dual(s)
        return dual

    def personal(self, s: Tree) -> Tensor | None:
        personal: Tensor | None = self.inner.personal(s)
        return personal


def check_clippable(method: Method) -> None:
    """Refuses a method whose messages cannot be clipped and noised one by one."""
    name = type(method).__name__
    if not isinstance(method, ServerAlgorithm):
        raise HoldfastError(
            f"NodeDP: the server only averages what nodes of {name} send one another; take a method that a "
            "server leads, such as FedAvg, or hf.DP, which protects samples in every method"
        )
    if not method.capabilities.clippable or method.capabilities.answers:
        raise HoldfastError(
            f"NodeDP: messages of {name} tell how a client's own memory changes, which the server has to "
            "match, and clipping drives the two apart; take FedAvg, FedProx or FedCM, or hf.DP"
        )
