"""What a node computes in a round: functions from a state to the state after it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from holdfast.contract import Algorithm, Channel, ServerAlgorithm
from holdfast.core.tree import tree_map
from holdfast.engines.common.channel_run import split_channel_state, wire_like, with_channel_state
from holdfast_deploy.member.masked_client import MaskedClient, send_masked
from holdfast_deploy.member.peers import NodePeers
from holdfast_deploy.member.state import Exchange, Handover, MemberState, RoundContext
from holdfast_deploy.member.sums import read
from holdfast_deploy.storage.messages import MessageFile, specs


def graph_start(method: Algorithm, start: Tensor, now: RoundContext, exchange: Exchange) -> Any:
    """The method's state before the first round, from the model ``start`` [d]; it may exchange, too."""
    return method.at(now.round).init(start[None], now.oracle, NodePeers(now, exchange))


def graph_round(method: Algorithm, state: MemberState, now: RoundContext, exchange: Exchange) -> MemberState:
    """A round among neighbours, or among all nodes through a server that averages."""
    peers = NodePeers(now, exchange)
    after = method.at(now.round).round(_take(state), now.oracle, peers)
    whole = with_channel_state(after, now.channel_run.memories)
    return replace(state, round=now.round + 1, method=Handover(whole))


def _take(state: MemberState) -> Any:
    """The method's state, which nobody else holds from here on. It is on disk."""
    return split_channel_state(state.method.take())[0]


@dataclass(frozen=True)
class Broadcast:
    """The form of what a server that leads sends at the beginning of a round."""

    channel: Channel
    like: Any  # on the device "meta"
    wire: Any  # as it travels, likewise

    @classmethod
    def of(cls, method: ServerAlgorithm[Any], channel: Channel, row: Tensor) -> Broadcast:
        """``row``: like a model [d], on "meta"."""
        like = method.broadcast(method.init_server(row))
        if not channel.transparent:  # it comes as rows
            like = tree_map(lambda t: t[None], like)
        return cls(channel, like, wire_like(channel, like))

    def read(self, file: MessageFile, device: torch.device) -> Any:
        """What the server sent."""
        received = read(file, self.channel, self.wire, self.like, device)
        return received if self.channel.transparent else tree_map(lambda t: t[0], received)


def client_round(
    method: ServerAlgorithm[Any],
    state: MemberState,
    now: RoundContext,
    exchange: Exchange,
    broadcast: Broadcast,
    masked: MaskedClient | None = None,
) -> tuple[MemberState, MessageFile | None]:
    """A round with a server that leads: the state after it, and what may leave only once that is saved.

    The server may continue without this client: ``LeftOut``. The message is None where the server has ended
    the round, with this client's masked message, without it.
    """
    r, key = now.round, (now.message_round, 0)
    exchange.phase = f"waiting for round {r + 1}"
    file = exchange.fetch(key, [now.server], specs(broadcast.wire))[now.server]
    received = exchange.retry_while_full(partial(broadcast.read, file, now.like.device))
    exchange.phase = f"computing round {r + 1}"
    after, message = method.at(r).client(_take(state), received, now.oracle)
    sent = now.channel_run.send(message)
    now.channel_run.check()
    now.traffic.count(1, message, sent.wire)
    last: MessageFile | None
    if masked is None:
        published = last = exchange.publish(key, sent.wire)
    else:
        published, last = send_masked(masked, sent.wire, file.header, exchange)
    after = method.at(r).finish(after, sent.arrived, (), now.oracle)
    exchange.exchanged(now.server, key[0], [published.header.content], [file.header.content])
    whole = with_channel_state(after, now.channel_run.memories)
    return replace(state, round=r + 1, method=Handover(whole)), last
