"""What states and messages look like, found without computing or sending anything."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor

from holdfast.core.randomness import coin
from holdfast.engines.common.channel_run import ChannelMemory, ChannelRun, new_memories, with_channel_state
from holdfast.engines.common.trial import Flip, state_like
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
    return new_memories(federation.wire_channel, federation.profile.sent_in_round(like))


def state_template(federation: Federation, node: int, x0: Tensor) -> Any:
    """A tree like what ``node`` saves, on the device "meta": shapes without memory."""
    like, method, network = (
        torch.empty_like(x0, device="meta"),
        federation.member_method,
        federation.member_network,
    )
    state = state_like(method, network, node, like, _coins(federation, 0)())
    return with_channel_state(state, channel_memories(federation, like))


def client_template(federation: Federation, dim: int) -> Any:
    """A tree like what a client of a server method sends, with models of dimension ``dim``, on "meta"."""
    return federation.profile.sent_in_round(_model_like(federation, dim))[0]


def averaged_messages(federation: Federation, dim: int, message_round: int) -> list[Any]:
    """Trees like what every node has a server average in a message round, exchange by exchange, on "meta".

    Stage 0 is before the first round.
    """
    r = max(message_round - 1, 0)
    start, round = federation.profile.sent_in(r, _coins(federation, r), _model_like(federation, dim))
    return start if message_round == 0 else round


def _coins(federation: Federation, round: int) -> Callable[[], Flip]:
    """The coins of a round, which nodes have in common."""

    def coins() -> Flip:
        draws = count(1)
        return lambda probability: coin(federation.seed, round, next(draws), probability)

    return coins


def _model_like(federation: Federation, dim: int) -> Tensor:
    return torch.empty(dim, dtype=federation.torch_dtype, device="meta")
