"""BatchNorm's statistics, averaged over all nodes once training has ended, where the federation wants that.

They travel in a message round of their own, after the last round and before the final messages. What is
averaged are moments: the mean of variances alone would leave out how far the nodes' means are apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.engines.common.channel_run import split_channel_state
from holdfast.engines.common.counters import Traffic
from holdfast.problem.flat import FlatModel
from holdfast_deploy.federation import Federation
from holdfast_deploy.member.peers import broadcast
from holdfast_deploy.member.state import Exchange
from holdfast_deploy.member.template import state_template
from holdfast_deploy.storage.messages import specs


def statistics_like(federation: Federation, model: FlatModel) -> Tensor | None:
    """What a node sends, on the device "meta": moments [k, 2, s] of its model, and of its personal one.

    None where nothing is averaged.
    """
    if not (federation.averages_statistics and model.statistics):
        return None
    state = state_template(federation, 0, model.x0)
    models = 1 if federation.member_method.personal(split_channel_state(state)[0]) is None else 2
    return torch.empty(models, 2, model.statistics, dtype=model.x0.dtype, device="meta")


def averaged(
    own: Tensor,
    federation: Federation,
    node: int,
    neighbours: Sequence[str],
    traffic: Traffic,
    transport: Exchange,
) -> Tensor:
    """The mean of all nodes' moments, like ``own``, which are those of ``node``."""
    message_round = federation.rounds + 1
    if federation.server is None:
        return _flooded(own, federation, node, neighbours, traffic, transport)
    server = federation.server.name
    message = transport.publish((message_round, 0), own)
    traffic.count(1, own, own)
    transport.submit(message)
    mean = transport.fetch((message_round, 1), [server], specs(own))[server]
    found: Tensor = transport.retry_while_full(lambda: mean.read(own, own.device))
    return found


class Table(NamedTuple):
    """What a node has heard of so far."""

    known: Tensor  # [n, 1]: 1 for every node whose row it has, else 0
    moments: Tensor  # [n, k 2 s]


def _flooded(
    own: Tensor,
    federation: Federation,
    node: int,
    neighbours: Sequence[str],
    traffic: Traffic,
    transport: Exchange,
) -> Tensor:
    """Every node sends its neighbours all that it has heard, until the farthest has heard of each."""
    nodes, here = len(federation.node), slice(node, node + 1)
    table = Table(own.new_zeros(nodes, 1), own.new_zeros(nodes, own.numel()))
    table.known[here], table.moments[here] = 1, own.flatten()
    for number in range(federation.diameter):
        _, received = broadcast(transport, (federation.rounds + 1, number), table, neighbours)
        traffic.count(len(received), table, table)
        for file in received.values():
            theirs: Table = transport.retry_while_full(partial(file.read, table, own.device))
            news = (theirs.known > 0) & (table.known == 0)
            known = torch.where(news, theirs.known, table.known)
            table = Table(known, torch.where(news, theirs.moments, table.moments))
    return table.moments.mean(0).view_as(own)
