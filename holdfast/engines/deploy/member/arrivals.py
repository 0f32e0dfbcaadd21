"""What a receiver makes of a message file, whatever channel it came through."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.contract import Channel
from holdfast.core.tree import leaves, tree_map
from holdfast.engines.common.carrier import wire_like
from holdfast.engines.deploy.storage.messages import MessageFile


def read(file: MessageFile, channel: Channel, like: Any, device: torch.device) -> Any:
    """The message, a tree like ``like``, whose tensors are on ``device`` or on "meta"."""
    wire = file.read(wire_like(channel, like), device)
    if channel.transparent:
        return wire
    return channel.decode(wire, tree_map(lambda t: torch.empty_like(t, device=device), like))


def add_to(total: Any, file: MessageFile, channel: Channel, weight: float = 1.0) -> None:
    """Adds ``weight`` times the message to ``total``, in place; as it is, it need not be held as a whole."""
    if channel.transparent:
        file.add_to(total, weight)
    else:
        device = next(leaves(total)).device
        tree_map(lambda t, part: t.add_(part, alpha=weight), total, read(file, channel, total, device))
