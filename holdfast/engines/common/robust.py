"""Exchange where messages are not just averaged: by another rule, or because some of them are false."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import torch
from torch import Tensor

from holdfast.contract.aggregation import Aggregation
from holdfast.core.tree import tree_map
from holdfast.engines.common.links import IncomingLinks
from holdfast.topology import Network

M = TypeVar("M")

MOST_NUMBERS = 2**24  # that are gathered at once


def forged(network: Network, messages: M, senders: Tensor) -> M:
    """What arrives of ``messages``, rows of ``senders`` [m], where some of them attack."""
    attack = network.attack
    if attack is None:
        return messages
    attackers = torch.isin(senders, torch.tensor(attack.nodes, device=senders.device)).unsqueeze(1)
    return tree_map(lambda rows: attack.forge(rows, attackers, network.nodes), messages)


def aggregated(network: Network, messages: M) -> M:
    """What a server makes of ``messages``, rows [m, ...]: a tree without rows."""

    def combine(rows: Tensor) -> Tensor:
        weights = rows.new_full((1, len(rows)), 1 / len(rows))
        return network.aggregation.combine(rows.unsqueeze(0), weights, torch.ones_like(weights).bool())[0]

    return tree_map(combine, messages)


def combine(rule: Aggregation, weights: Sequence[float], messages: Sequence[M]) -> M:
    """What one receiver makes of ``messages``, each with one row, by ``rule``; a node's own comes first."""

    def combine(*rows: Tensor) -> Tensor:
        shares = rows[0].new_tensor(weights).unsqueeze(0)
        return rule.combine(torch.cat(rows).unsqueeze(0), shares, torch.ones_like(shares).bool())

    return tree_map(combine, messages[0], *messages[1:])


@dataclass(frozen=True)
class SummedUp(Generic[M]):
    """What a server that averages made of all messages ``received``."""

    one: M  # without rows
    received: M

    @cached_property
    def mixed(self) -> M:
        return tree_map(lambda t, rows: t.expand_as(rows), self.one, self.received)

    @cached_property
    def neighbour_sum(self) -> M:
        return tree_map(lambda t: t.sum(0, keepdim=True) - t, self.received)


@dataclass(frozen=True)
class RobustInbox(Generic[M]):
    """What every node makes of the messages that it ``received``, and of its ``own``, which is true."""

    own: M
    received: M
    incoming: IncomingLinks
    rule: Aggregation

    @cached_property
    def mixed(self) -> M:
        return tree_map(self._mixed, self.own, self.received)

    @cached_property
    def neighbour_sum(self) -> M:
        others = self.incoming.present.clone()
        others[:, 0] = False
        senders, there = self.incoming.senders, others.unsqueeze(-1)
        return tree_map(lambda received: received[senders].where(there, 0.0).sum(1), self.received)

    def _mixed(self, own: Tensor, received: Tensor) -> Tensor:
        size = max(1, MOST_NUMBERS // (self.incoming.senders.shape[1] * own.shape[-1]))
        parts = []
        for first in range(0, len(own), size):
            some = slice(first, first + size)
            senders, weights, present = (part[some] for part in self.incoming)
            messages = torch.cat([own[some].unsqueeze(1), received[senders[:, 1:]]], 1)
            parts.append(self.rule.combine(messages, weights, present))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
