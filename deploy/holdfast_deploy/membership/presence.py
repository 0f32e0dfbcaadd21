"""Who is here, who is lost, and whether members should change: as one member sees it."""

from __future__ import annotations

from collections.abc import Callable

from holdfast_deploy.federation import NodeConfig
from holdfast_deploy.membership.log import MembershipLog


class Presence:
    """Whom the member ``name`` has heard of, and when, on the clock ``now`` (seconds)."""

    def __init__(self, log: MembershipLog, name: str, now: Callable[[], float]) -> None:
        self.log, self.name, self.now = log, name, now
        self.heard: dict[str, float] = {}  # when each member was last heard of
        self.returning: dict[str, float] = {}  # former members, and when each last asked to be let in
        self.broken: set[str] = set()  # whose files are beyond repair: these need another roster
        self.began = now()  # from here on, all have time to be heard of

    def begin_roster(self) -> None:
        """The next one begins."""
        self.began = self.now()
        self.broken.clear()
        self.returning.clear()

    def hear(self, name: str) -> None:
        """``name`` is here."""
        self.heard[name] = self.now()

    def lost(self, name: str) -> bool:
        """Whether ``name`` was not heard of for so long that members continue without it.

        At the very beginning, members come as they like: one that was never there is waited for.
        """
        after = self.log.rules.remove_after
        if after is None or name == self.name:
            return False
        if self.log.roster.number == 0 and name not in self.log.memory.known:
            return False
        return self.now() - max(self.heard.get(name, 0.0), self.began) > after

    @property
    def all_lost(self) -> set[str]:
        """All nodes that are lost."""
        return {name for name in self.log.roster.names if self.lost(name)}

    def back(self, since: float) -> list[NodeConfig]:
        """Former members that have asked to be let in since then, where that is allowed without an order."""
        if not self.log.rules.rejoin:
            return []
        here = [name for name, when in self.returning.items() if when > since]
        return [node for name, node in self.log.former.items() if name in here]

    @property
    def waits_for_another(self) -> bool:
        """Whether this member takes part in the next roster only: its files are gone, or all go back."""
        order = self.log.order
        return self.name in self.broken or (order is not None and order.change == "rollback")

    def change_is_due(self, awaited: Callable[[str], bool]) -> bool:
        """Whether members should change: as ordered, as one has begun to, or to continue at all.

        They cannot continue without one that is lost and ``awaited``, or whose files are beyond repair.
        """
        log = self.log
        if log.pending or log.order is not None or self.broken & {*log.roster.names, *log.voters}:
            return True
        return any(awaited(name) for name in self.all_lost)

    @property
    def turn(self) -> int:
        """How many others are to propose before this member: first the neighbours of those that are lost."""
        voters, network = self.log.voters, self.log.federation.member_network
        if self.log.file.server is not None:
            return 0
        lost = {name for name in voters if self.lost(name)}
        near = {voters[j] for name in lost for j in network.neighbours(voters.index(name))}
        present = [name for name in voters if name not in lost]
        return sorted(present, key=lambda name: name not in near).index(self.name)
