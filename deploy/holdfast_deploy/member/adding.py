"""How a server puts its clients' messages together."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from holdfast.contract import Channel
from holdfast.core.tree import tree_map
from holdfast.engines.common.robust import combine
from holdfast_deploy.member.transport import add_to, read

if TYPE_CHECKING:
    from holdfast_deploy.member.server import Server


def add_up(server: Server, channel: Channel, size: int | None) -> Any:
    """The sum of all messages that are due, which are here, over their number, or over ``size``."""
    due, takers, rule = server.due, server.takers(), server.federation.member_network.aggregation
    messages, device = [], server.x0.device  # all of them, if they are not just added up
    total = tree_map(lambda t: torch.zeros(t.shape, dtype=summed(server, t), device=device), due.like)
    for name in takers:
        message = server.file(due.key, name)
        message.verify()  # it may have been on disk for long
        known = server.arrivals[due.key][name].norm
        message.norm = math.sqrt(message.squares()) if known is None else known
        server.norms.received(name, message)
        if rule.plain:
            add_to(total, message, channel, due.wire)
        else:
            messages.append(read(message, channel, due.wire, due.like, device))
    if messages:
        return combine(rule, [1 / len(takers)] * len(takers), messages)
    return tree_map(lambda t: t.div_(size or len(takers)), total)


def summed(server: Server, like: Tensor) -> torch.dtype:
    """The number type of sums of messages ``like`` that.

    What one client changes in a sum that is to be noised must not grow by rounding.
    """
    return like.dtype if server.privacy is None else torch.float64
