"""Messages on disk, read and added up in pieces: a file need not be held as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from holdfast.contract import Channel
from holdfast.contract.aggregation import Aggregation
from holdfast.core.tree import leaves, tree_map
from holdfast.engines.common.robust import combine
from holdfast_deploy.storage.messages import MessageFile


def read(file: MessageFile, channel: Channel, wire: Any, like: Any, device: torch.device) -> Any:
    """The message, a tree like ``like``, which travels as one like ``wire``; both may be on "meta"."""
    arrived = file.read(wire, device)
    if channel.transparent:
        return arrived
    return channel.decode(arrived, tree_map(lambda t: torch.empty_like(t, device=device), like))


def add_to(total: Any, file: MessageFile, channel: Channel, wire: Any, weight: float = 1.0) -> None:
    """Adds ``weight`` times the message to ``total``, in place; as it is, it need not be held as a whole."""
    if channel.transparent:
        file.add_to(total, weight)
    else:
        device = next(leaves(total)).device
        tree_map(lambda t, part: t.add_(part, alpha=weight), total, read(file, channel, wire, total, device))


def mean_of(
    files: Mapping[str, MessageFile],
    channel: Channel,
    wire: Any,
    like: Any,
    device: torch.device,
    *,
    rule: Aggregation,
    size: int | None = None,
    wide: bool = False,
) -> Any:
    """The mean of messages that travelled as ``wire``, a tree like ``like``, added up in their order.

    ``rule``: how they are combined if they are not just added up. ``size``: what the sum is divided by, if
    not by their number. ``wide``: the sum is float64, whatever the messages are.
    """
    if not rule.plain:
        messages = [read(file, channel, wire, like, device) for file in files.values()]
        return combine(rule, [1 / len(files)] * len(files), messages)
    total = tree_map(lambda t: torch.zeros(t.shape, dtype=summed(t, wide), device=device), like)
    for file in files.values():
        add_to(total, file, channel, wire)
    return tree_map(lambda t: t.div_(size or len(files)), total)


def summed(like: Tensor, wide: bool) -> torch.dtype:
    """The number type of sums of messages ``like`` that.

    What one client changes in a sum that is to be noised must not grow by rounding: such a sum is ``wide``.
    """
    return torch.float64 if wide else like.dtype
