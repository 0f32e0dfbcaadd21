"""The server's part: it passes on what clients say to each other, and takes the masks off the sum."""

from __future__ import annotations

from collections.abc import Mapping, Set

import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.privacy.aggregation.client import Announcements, among, pair_mask, roster
from holdfast.privacy.aggregation.keys import Announcement, commitment, mask, public
from holdfast.privacy.aggregation.shares import join

Revealed = Mapping[str, Mapping[str, bytes]]  # who revealed, of whom, which share


def total(
    masked: Mapping[str, Tensor],
    dealt: Set[str],
    announced: Announcements,
    revealed: Revealed,
    threshold: int,
    context: bytes,
) -> Tensor:
    """The sum int64 [d] of the messages in ``masked``, without their masks.

    ``dealt``: who went through phase 2, and so has masks with everybody in ``masked``.
    """
    if len(revealed) < threshold:
        raise HoldfastError(
            f"secure aggregation: {len(revealed)} clients revealed their shares, {threshold} are needed"
        )
    messages = list(masked.values())
    size, sum_ = len(messages[0]), torch.zeros_like(messages[0])
    for message in messages:
        sum_ += message
    view = among(roster(announced, threshold, context), dealt)
    place = {name: x for x, name in enumerate(announced, 1)}
    for name in dealt:
        shares = {place[holder]: said[name] for holder, said in revealed.items()}
        secret = join(shares, threshold)
        if secret is None or not _is_of(announced[name], secret, name in masked, context):
            raise HoldfastError(
                f"secure aggregation: the shares of {name}'s secret do not fit. One of "
                f"{', '.join(sorted(revealed))} or {name} itself does not keep to the protocol"
            )
        if name in masked:
            sum_ -= mask(secret, size)
        else:  # those who arrived have added masks for it that nothing cancels
            for other in masked:
                sum_ += pair_mask(name, secret, other, announced[other].masks, view, size)
    return sum_


def _is_of(announcement: Announcement, secret: bytes, own: bool, context: bytes) -> bool:
    """Whether ``secret`` is the seed of the own mask, or the key, that was announced."""
    return (commitment(secret, context) == announcement.own) if own else public(secret) == announcement.masks
