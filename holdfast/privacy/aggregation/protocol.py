"""The protocol's two parts: a client's five phases, and the server's sum."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.privacy.aggregation.arithmetic import SHARE_BYTES, check_threshold, join, split
from holdfast.privacy.aggregation.keys import (
    Announcement,
    Secrets,
    agreed,
    commitment,
    digest_of,
    mask,
    public,
    seal,
    unseal,
)

# --- a client's part ------------------------------------------------------------------------------------


ANNOUNCED, DEALT, MASKED, CONFIRMED, REVEALED = range(5)  # what a client has said after each phase

Announcements = Mapping[str, Announcement]  # of all clients in the cohort, in the same order for all


@dataclass(frozen=True)
class Client:
    """One client in one round.

    A lying server may send different things to different clients. So the keys of every phase depend on what
    the client received before (``roster``, ``among``), and clients that received different things share no
    key.

    ``least``: the clients in every phase up to the third, if the server does not lie; 0: the threshold.
    """

    name: str
    secrets: Secrets
    announced: Announcements
    threshold: int
    least: int = 0

    def __post_init__(self) -> None:
        check_threshold(self.threshold, len(self.announced))
        if self.announced.get(self.name) != self.secrets.announcement():
            raise HoldfastError(
                "secure aggregation: the server passes on another key than this client's, or the client has "
                "computed another message since it announced the key; roll everybody back to the round before"
            )
        self._check_enough(set(self.announced), "announced keys")

    def deal(self) -> dict[str, bytes]:
        """Phase 2: the sealed shares of this client's secrets, for every client."""
        size = SHARE_BYTES * (self.threshold - 1)
        random = self.secrets.randomness(2 * size, self.roster)
        of_key, of_mask = (
            split(secret, self.threshold, len(self.announced), part)
            for secret, part in ((self.secrets.masks, random[:size]), (self.secrets.own, random[size:]))
        )
        return {
            name: seal(self._seal(self.name, name), of_key[i] + of_mask[i], self.roster)
            for i, name in enumerate(self.announced)
        }

    def masked(self, values: Tensor, dealt: Set[str]) -> Tensor:
        """Phase 3: ``values`` int64 [d] under this client's own mask and one for each other in ``dealt``.

        ``dealt``: the clients that went through phase 2.
        """
        self._check_enough(dealt, "dealt shares")
        total, view = values + mask(self.secrets.own, len(values)), among(self.roster, dealt)
        for name in dealt - {self.name}:
            public = self.announced[name].masks
            total += pair_mask(self.name, self.secrets.masks, name, public, view, len(values))
        return total

    def confirm(self, dealt: Set[str], arrived: Set[str]) -> bytes:
        """Phase 4: what this client signs, so that all can see that they received the same ``arrived``.

        The caller must see to it that it signs once a round.
        """
        self._check_enough(arrived, "sent a message")
        if not arrived <= dealt:
            raise HoldfastError("secure aggregation: the server names clients that did not take part")
        return among(among(self.roster, dealt), arrived)

    def reveal(
        self, sealed: Mapping[str, bytes], dealt: Set[str], arrived: Set[str], confirmed: Set[str]
    ) -> dict[str, bytes]:
        """Phase 5: this client's shares: of the own mask of each that ``arrived``, of the key of others.

        ``sealed``: what each client in ``dealt`` dealt to this one. ``confirmed``: the clients that signed in
        phase 4 what this one signed.
        """
        self.confirm(dealt, arrived)
        if len(confirmed & arrived) < self.threshold:
            raise HoldfastError(
                f"secure aggregation: {len(confirmed & arrived)} clients confirm whose messages arrived, and "
                f"{self.threshold} are needed; the server may have told them otherwise"
            )
        shares = {}
        for name in dealt:
            share = unseal(self._seal(name, self.name), sealed.get(name, b""), self.roster)
            if share is None or len(share) != 2 * SHARE_BYTES:
                raise HoldfastError(f"secure aggregation: what {name} dealt was changed on its way")
            shares[name] = share[SHARE_BYTES:] if name in arrived else share[:SHARE_BYTES]
        return shares

    @cached_property
    def roster(self) -> bytes:
        """See the function of that name."""
        return roster(self.announced, self.threshold, self.secrets.context)

    def _check_enough(self, names: Set[str], what: str) -> None:
        if self.name not in names or not names <= set(self.announced):
            raise HoldfastError(f"secure aggregation: wrong names of who {what}")
        needed = max(self.threshold, self.least)
        if len(names) < needed:
            raise HoldfastError(
                f"secure aggregation: the server says that only {len(names)} clients {what}, and {needed} "
                "are needed to hide a message among them"
            )

    def _seal(self, sender: str, receiver: str) -> bytes:
        """The key for what ``sender`` deals to ``receiver``; this client is one of them."""
        other = self.announced[receiver if sender == self.name else sender]
        use = b"seal\0" + sender.encode() + b"\0" + receiver.encode()
        return agreed(self.secrets.seals, other.seals, self.roster, use)


def roster(announced: Announcements, threshold: int, context: bytes) -> bytes:
    """A digest of the clients in the round that ``context`` names, of their keys and of the threshold."""
    members = [part for name, said in announced.items() for part in (name.encode(), said.pack())]
    return digest_of(context, threshold.to_bytes(8), *members)


def among(view: bytes, names: Set[str]) -> bytes:
    """A digest of what a client received up to ``view``, and then of ``names``."""
    return digest_of(view, *(name.encode() for name in sorted(names)))


def pair_mask(name: str, key: bytes, other: str, public: bytes, view: bytes, size: int) -> Tensor:
    """What ``name``, the owner of ``key``, adds for ``other``: the negative of what ``other`` adds.

    It depends on the names, so that a client that announces the key of another as its own gets other numbers.
    """
    use = b"\0".join((b"pair", *sorted((name.encode(), other.encode()))))
    numbers = mask(agreed(key, public, view, use), size)
    return numbers if name < other else -numbers


# --- the server's part: it passes on what clients say to each other, and takes the masks off the sum ----


Revealed = Mapping[str, Mapping[str, bytes]]  # shares by their revealer and their owner


def total(
    masked: Mapping[str, Tensor],
    dealt: Set[str],
    announced: Announcements,
    revealed: Revealed,
    threshold: int,
    context: bytes,
) -> Tensor:
    """The sum int64 [d] of the messages in ``masked``, without their masks.

    ``dealt``: the clients that went through phase 2, and so have masks with all in ``masked``.
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
        else:  # those that arrived have added masks for it that nothing cancels
            for other in masked:
                sum_ += pair_mask(name, secret, other, announced[other].masks, view, size)
    return sum_


def _is_of(announcement: Announcement, secret: bytes, own: bool, context: bytes) -> bool:
    """Whether ``secret`` is the seed of the own mask, or the key, that was announced."""
    return (commitment(secret, context) == announcement.own) if own else public(secret) == announcement.masks
