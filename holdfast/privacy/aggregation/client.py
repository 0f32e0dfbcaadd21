"""A client's four phases. Everything it says follows from its secrets and from what it was told."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import NamedTuple

from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.privacy.aggregation.keys import Announcement, Secrets, agreed, mask, seal, unseal
from holdfast.privacy.aggregation.shares import SHARE_BYTES, check_threshold, split

Announcements = Mapping[str, Announcement]  # of everybody in the cohort, in one order for all


class Client(NamedTuple):
    """One client in one round."""

    name: str
    secrets: Secrets
    announced: Announcements
    threshold: int

    def deal(self) -> dict[str, bytes]:
        """Phase 2: the sealed shares of this client's secrets, for every client."""
        check_threshold(self.threshold, len(self.announced))
        if self.announced.get(self.name) != self.secrets.announcement():
            raise HoldfastError("secure aggregation: the server passes on another key than this client's")
        size = SHARE_BYTES * (self.threshold - 1)
        random = self.secrets.randomness(2 * size)
        of_key, of_mask = (
            split(secret, self.threshold, len(self.announced), part)
            for secret, part in ((self.secrets.masks, random[:size]), (self.secrets.own, random[size:]))
        )
        return {
            name: seal(self._seal(self.name, name), of_key[i] + of_mask[i], self.secrets.context)
            for i, name in enumerate(self.announced)
        }

    def masked(self, values: Tensor, dealt: Set[str]) -> Tensor:
        """Phase 3: ``values`` int64 [d] under this client's own mask and one for each other in ``dealt``.

        ``dealt``: who went through phase 2.
        """
        self._check_enough(dealt, "dealt shares")
        total = values + mask(self.secrets.own, len(values))
        for name in dealt - {self.name}:
            announced, context = self.announced[name], self.secrets.context
            total += pair_mask(self.name, self.secrets.masks, name, announced.masks, context, len(values))
        return total

    def reveal(self, sealed: Mapping[str, bytes], dealt: Set[str], arrived: Set[str]) -> dict[str, bytes]:
        """Phase 4: this client's share of the own mask of who ``arrived``, of the key of who did not.

        ``sealed``: what everybody in ``dealt`` dealt to this client. The caller must see to it that this is
        said once a round: with other sets, the server would learn both.
        """
        self._check_enough(arrived, "sent a message")
        if not arrived <= dealt:
            raise HoldfastError("secure aggregation: the server names clients that did not take part")
        shares = {}
        for name in dealt:
            share = unseal(self._seal(name, self.name), sealed.get(name, b""), self.secrets.context)
            if share is None or len(share) != 2 * SHARE_BYTES:
                raise HoldfastError(f"secure aggregation: what {name} dealt was changed on its way")
            shares[name] = share[SHARE_BYTES:] if name in arrived else share[:SHARE_BYTES]
        return shares

    def _check_enough(self, names: Set[str], what: str) -> None:
        if self.name not in names or not names <= set(self.announced):
            raise HoldfastError(f"secure aggregation: wrong names of who {what}")
        if len(names) < self.threshold:
            raise HoldfastError(
                f"secure aggregation: only {len(names)} clients {what}, and {self.threshold} are needed to "
                "hide a message among them"
            )

    def _seal(self, sender: str, receiver: str) -> bytes:
        """The key for what ``sender`` deals to ``receiver``; this client is one of them."""
        other = self.announced[receiver if sender == self.name else sender]
        use = b"seal\0" + sender.encode() + b"\0" + receiver.encode()
        return agreed(self.secrets.seals, other.seals, self.secrets.context, use)


def pair_mask(name: str, key: bytes, other: str, public: bytes, context: bytes, size: int) -> Tensor:
    """What ``name``, who has ``key``, adds for ``other``: the negative of what that one adds."""
    numbers = mask(agreed(key, public, context, b"pair"), size)
    return numbers if name < other else -numbers
