"""What states and messages look like, found without computing or sending anything."""

from __future__ import annotations

from itertools import count
from typing import Any

import torch
from torch import Tensor

from holdfast.contract import Algorithm, ServerAlgorithm
from holdfast.core.randomness import coin
from holdfast.engines.common.channel_run import ChannelMemory, ChannelRun, new_memories, with_channel_state
from holdfast.engines.common.trial import (
    Flip,
    RecordingPeers,
    client_message,
    grown,
    sent_in_round,
    trial,
    zero_oracle,
)
from holdfast_deploy.federation import Federation


def new_channel_run(
    federation: Federation, round: int, memories: tuple[ChannelMemory, ...], nodes: Tensor
) -> ChannelRun:
    """The federation's channel in a round, for the messages of ``nodes`` [m]."""
    lost = torch.zeros((), dtype=torch.bool, device=nodes.device)
    return ChannelRun(federation.wire_channel, memories, federation.seed, round, nodes, lost)


def channel_memories(federation: Federation, like: Tensor) -> tuple[ChannelMemory, ...]:
    """What the channel remembers at one node before the first round; ``like`` is a model, [d]."""
    if federation.wire_channel.transparent:
        return ()
    messages = sent_in_round(federation.member_method, federation.member_network, like)
    return new_memories(federation.wire_channel, messages)


def state_template(federation: Federation, node: int, x0: Tensor) -> Any:
    """A tree like what ``node`` saves, on the device "meta": shapes without memory."""
    method, like = federation.member_method.at(0), torch.empty_like(x0, device="meta")
    memories = channel_memories(federation, like)
    if isinstance(method, ServerAlgorithm):
        return with_channel_state(method.init(like[None]), memories)
    assert isinstance(method, Algorithm)
    oracle = zero_oracle(len(federation.node), node, x0.numel())
    peers = RecordingPeers(federation.member_network.at(0), node, like, _coins(federation, 0))
    return with_channel_state(method.init(like[None], oracle, peers), memories)


def client_template(federation: Federation, dim: int) -> Any:
    """A tree like what a client of a server method sends, with models of dimension ``dim``, on "meta"."""
    method, nodes = federation.member_method, len(federation.node)
    assert isinstance(method, ServerAlgorithm)
    return grown(method, lambda size: client_message(method, nodes, size), _model_like(federation, dim))


def averaged_messages(federation: Federation, dim: int, message_round: int) -> list[Any]:
    """Trees like what every node has a server average in a message round, exchange by exchange, on "meta".

    Stage 0 is before the first round.
    """
    method, r = federation.member_method, max(message_round - 1, 0)
    assert isinstance(method, Algorithm)

    def sent(size: int) -> list[Any]:
        start, round = trial(method, federation.member_network, size, lambda: _coins(federation, r), [r])
        return start.sent if message_round == 0 else round.sent

    return list(grown(method, sent, _model_like(federation, dim)))


def _coins(federation: Federation, round: int) -> Flip:
    """The coins of a round, which nodes have in common."""
    draws = count(1)
    return lambda probability: coin(federation.seed, round, next(draws), probability)


def _model_like(federation: Federation, dim: int) -> Tensor:
    return torch.empty(dim, dtype=federation.torch_dtype, device="meta")
