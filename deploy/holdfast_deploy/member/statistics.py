"""BatchNorm's statistics, averaged over all nodes once training has ended, where the federation wants that.

They travel in a message round of their own, after the last round and before the final messages. What is
averaged are moments: the mean of variances alone would leave out how far the nodes' means are apart.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from holdfast.engines.common.channel_run import split_channel_state
from holdfast.problem.flat import FlatModel
from holdfast_deploy.federation import Federation
from holdfast_deploy.member.template import state_template

if TYPE_CHECKING:
    from holdfast_deploy.member.node import Node


def statistics_like(federation: Federation, model: FlatModel) -> Tensor | None:
    """What a node sends, on the device "meta": moments [k, 2, s] of its model, and of its personal one.

    None where nothing is averaged.
    """
    if not (federation.averages_statistics and model.statistics):
        return None
    state = state_template(federation, 0, model.x0)
    models = 1 if federation.member_method.personal(split_channel_state(state)[0]) is None else 2
    return torch.empty(models, 2, model.statistics, dtype=model.x0.dtype, device="meta")


def averaged(node: Node, own: Tensor) -> Tensor:
    """The mean of everybody's moments, like ``own``."""
    node.message_round, node.phase = node.federation.rounds + 1, "averaging statistics"
    if not node.federation.member_network.is_server:
        return _flooded(node, own)
    message = node.publish(node.header(0, own), own)
    node.costs.traffic.count(1, own, own)
    node.transport.to_server(message)
    mean = node.transport.from_server(1, own)
    found: Tensor = node.retry_while_full(lambda: mean.read(own, own.device))
    return found


class Table(NamedTuple):
    """What a node has heard of so far."""

    known: Tensor  # [n, 1]: 1 for every node whose row it has, else 0
    moments: Tensor  # [n, k 2 s]


def _flooded(node: Node, own: Tensor) -> Tensor:
    """Everybody tells its neighbours all that it has heard, until the farthest has heard of each."""
    federation, here = node.federation, slice(node.node, node.node + 1)
    nodes = len(federation.node)
    table = Table(own.new_zeros(nodes, 1), own.new_zeros(nodes, own.numel()))
    table.known[here], table.moments[here] = 1, own.flatten()
    for exchange in range(federation.diameter):
        _, received = node.transport.broadcast(exchange, table, node.all_neighbours)
        node.costs.traffic.count(len(received), table, table)
        for file in received.values():
            told: Table = node.retry_while_full(partial(file.read, table, own.device))
            news = (told.known > 0) & (table.known == 0)
            known = torch.where(news, told.known, table.known)
            table = Table(known, torch.where(news, told.moments, table.moments))
    return table.moments.mean(0).view_as(own)
