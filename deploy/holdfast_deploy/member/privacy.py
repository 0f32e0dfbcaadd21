"""Differential privacy at a member: its own noise, and what it has spent, written down before it sends."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import astuple, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from holdfast.contract import Method
from holdfast.core.errors import HoldfastError
from holdfast.core.randomness import poisson_cohort
from holdfast.engines.common.counters import Accesses
from holdfast.privacy import DP, Ledger, NodeDP
from holdfast.privacy.aggregation.arithmetic import PRECISION
from holdfast.privacy.messages import PrivateMessages
from holdfast.problem.private import OwnRandomness, Release, counted_noise
from holdfast_deploy.federation import Federation
from holdfast_deploy.noise import OwnNoise, read_key
from holdfast_deploy.ops.events import Events
from holdfast_deploy.site import Site
from holdfast_deploy.storage.privacy_spent import EVERYBODY, Spent

RING = 2.0**-PRECISION  # the grid of numbers under masks


class Releaser(NamedTuple):
    """The member that releases."""

    folder: Path
    run: str  # federation and incarnation: what names its draws tells nothing of its data
    begun: bool  # whether it has a state
    events: Events


class Releases:
    """What ``member`` releases as ``plan`` says, from a key of its own, and what that has spent.

    ``data``: a digest of the data that they are of, where these are the member's own. ``counted``: noise from
    the seed, for tests. ``grid``, ``rounded``: as for ``OwnNoise``.
    """

    def __init__(
        self,
        member: Releaser,
        plan: Ledger,
        counted: bool,
        data: str = "",
        grid: float | None = None,
        rounded: float = 0.0,
    ) -> None:
        self.budget, self.multiplier, self._events = plan.budget, plan.multiplier, member.events
        self.draws = member.run
        self.run = " ".join(filter(None, (self.draws, data)))
        key = member.folder / "noise.key"
        self.spent = Spent(member.folder / "privacy.jsonl", member.begun or key.exists())
        if not self.spent.known:
            reason = "if the data were in a federation before, stop, and put the privacy.jsonl of then here"
            member.events.log("nothing is spent of the privacy budget", reason=reason)
        self.own: OwnNoise | None = None
        if counted:
            reason = "anybody who knows the seed can take the noise away: this is for tests only"
            member.events.log("noise from the seed", "warning", reason=reason)
        else:
            self.own = OwnNoise(read_key(key), self.run, self._note, grid, rounded)
        self._trace = hashlib.blake2b()

    def begin(self, round: str) -> None:
        """From here on, what is released is of ``round``, which may be computed again."""
        self._trace = hashlib.blake2b(f"{self.run} {round}".encode(), digest_size=16)

    def _note(self, release: bytes) -> None:
        self._trace.update(release)

    def charge(
        self,
        accesses: list[tuple[float, int]],
        nodes: Sequence[str] = EVERYBODY,
        draw: str = "",
        first: int = 0,
    ) -> None:
        """Pays for ``accesses``, (sampling rate, how often), unless the very same was paid for before."""
        trace = self._trace.copy()
        trace.update(repr(accesses).encode())
        again = self.spent.charge(
            trace.hexdigest(), accesses, self.multiplier, self.budget, nodes, draw, first
        )
        self._trace = trace  # only now: while there is no room for the line, it is tried again
        if again:
            reason = "a round that was computed again differs, and costs more than another would"
            self._events.log("the same secret sample is released again", "warning", reason=reason)

    @property
    def count(self) -> int:
        """How many releases are paid for; saved with the state."""
        return len(self.spent.known)

    def require(self, count: int) -> None:
        """Refuses to continue if not even ``count`` releases are known any more."""
        if self.count < count:
            raise HoldfastError(
                f"{self.spent.path} has {self.count} releases, and there were {count} when the state was "
                "saved: it is from a backup, or was changed; put the newest one back"
            )

    @property
    def epsilon(self) -> float:
        """What was spent so far."""
        return self.spent.epsilon(self.budget.delta, self.budget.accountant)


class SamplePrivacy:
    """The noise of the node with that number in the gradients of its samples."""

    def __init__(self, releases: Releases, plan: Ledger, node: int, seed: int) -> None:
        assert isinstance(plan.budget, DP)
        self.releases = releases
        size, samples = plan.batch_size, int(plan.samples[node])
        self.rate = 1.0 if size is None else size / samples
        own: OwnRandomness | None = self.releases.own
        noise = counted_noise(seed) if own is None else own
        self.release = Release(plan.budget.clip, plan.multiplier, noise)
        self.accesses = Accesses()
        self._round, self._drawn = "", 0  # Poisson samples of the round that are paid for

    def begin(self, round: str) -> Accesses:
        """What counts the accesses of a ``round``, which may be computed again."""
        self.releases.begin(round)
        self.accesses = Accesses()
        self._round, self._drawn = round, 0
        return self.accesses

    def charge(self) -> None:
        """Before anything that depends on the accesses so far is sent or saved: pays for them, once."""
        minibatches, of_all_data = astuple(self.accesses)
        accesses = [(self.rate, minibatches), (1.0, of_all_data)]
        if minibatches + of_all_data:
            paid, draw = [access for access in accesses if access[1]], f"{self.releases.draws} {self._round}"
            self.releases.charge(paid, draw=draw, first=self._drawn)
        self._drawn += minibatches
        self.accesses.minibatches = self.accesses.of_all_data = 0


class MessagePrivacy:
    """The noise that a node adds to its own messages, each of which is paid for in full."""

    def __init__(self, releases: Releases) -> None:
        self.releases = releases
        self._due = False

    def begin(self, round: str) -> Accesses:
        """The message of a ``round`` follows. Gradients are not counted: nobody sees them."""
        self.releases.begin(round)
        self._due = round != "start"
        return Accesses()

    def charge(self) -> None:
        """Before the message is sent: pays for it, once."""
        if self._due:
            self.releases.charge([(1.0, 1)])
        self._due = False


NodePrivacy = SamplePrivacy | MessagePrivacy


def node_privacy(federation: Federation, member: Releaser, site: Site) -> NodePrivacy | None:
    """What a node itself has to protect and to pay for; None: nothing, or the server does."""
    plan = federation.protection
    if plan is None or (isinstance(plan.budget, NodeDP) and plan.budget.noise == "server"):
        return None
    if isinstance(plan.budget, DP):
        releases = Releases(member, plan, site.counted_noise, site.digest)
        return SamplePrivacy(releases, plan, site.node, federation.seed)
    grid = RING if plan.budget.noise == "distributed" else None
    return MessagePrivacy(Releases(member, plan, site.counted_noise, site.digest, grid))


class ServerPrivacy:
    """The noise in what a server makes of its clients' messages, and the cohorts that it alone knows."""

    def __init__(self, releases: Releases, plan: Ledger, federation: Federation) -> None:
        self.rate = 1.0 if plan.batch_size is None else plan.batch_size / len(federation.node)
        self.releases = releases
        nodes, own = len(federation.node), self.releases.own

        @lru_cache(maxsize=64)
        def cohort(round: int) -> list[int]:
            if own is not None:
                return own.chosen(nodes, self.rate, round)
            return poisson_cohort(federation.seed, round, nodes, federation.cohort).tolist()

        self.cohort = cohort

    def charge(self, round: int, names: Sequence[str]) -> None:
        """Before the model after ``round`` is saved or sent: pays for the messages of ``names`` in it.

        Only the server knows which clients were in a secret cohort, so all nodes pay for that.
        """
        if self.rate < 1.0:
            self.releases.charge([(self.rate, 1)], draw=f"{self.releases.draws} {round}")
        else:
            self.releases.charge([(1.0, 1)], names)


def server_privacy(federation: Federation, member: Releaser, counted: bool) -> ServerPrivacy | None:
    """What a server has to protect and to pay for; None: nothing, or its clients do."""
    plan = federation.protection
    if plan is None or not isinstance(plan.budget, NodeDP) or plan.budget.noise != "server":
        return None
    masked = federation.secure_aggregation is not None
    releases = Releases(member, plan, counted, rounded=RING / 2 if masked else 0.0)
    return ServerPrivacy(releases, plan, federation)


def with_own_noise(method: Method, releases: Releases) -> Method:
    """``method`` with noise that only this member can draw."""
    return replace(method, own=releases.own) if isinstance(method, PrivateMessages) else method
