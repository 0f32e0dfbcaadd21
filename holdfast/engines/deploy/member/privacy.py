"""Differential privacy at a node: its own noise, and what it has spent, written down before it sends."""

from __future__ import annotations

import hashlib
from dataclasses import astuple
from typing import TYPE_CHECKING

from holdfast.engines.common.counters import Accesses
from holdfast.engines.deploy.own_noise import OwnNoise, read_key
from holdfast.engines.deploy.storage.spent import Spent
from holdfast.privacy import DP, Ledger
from holdfast.problem.private import Noise, OwnRandomness, Release, counted_noise

if TYPE_CHECKING:
    from holdfast.engines.deploy.member.node import Node


class NodePrivacy:
    """The noise of ``node`` as ``plan`` says, and the node's releases."""

    def __init__(self, node: Node, plan: Ledger) -> None:
        assert isinstance(plan.budget, DP)  # others are refused with the file
        self.budget, self.multiplier = plan.budget, plan.multiplier
        self.run = f"{node.federation.id} {node.store.incarnation} {node.site.digest}"
        size, samples = plan.batch_size, int(plan.samples[node.node])
        self.rate = 1.0 if size is None else size / samples
        key, begun = node.folder / "noise.key", node.store.state.exists()
        self.spent = Spent(node.folder / "privacy.jsonl", begun or key.exists())
        noise: Noise | OwnRandomness
        if node.site.counted_noise:
            noise = counted_noise(node.federation.seed)
            reason = "anybody who knows the seed can take the noise away: this is for tests only"
            node.events.log("noise from the seed", "warning", reason=reason)
        else:
            noise = OwnNoise(read_key(key), self.run, self._note)
        self.release = Release(plan.budget.clip, plan.multiplier, noise)
        self.accesses, self._trace = Accesses(), hashlib.blake2b()

    def begin(self, round: str) -> Accesses:
        """What counts the accesses of a ``round``, which may be computed again."""
        self.accesses, self._trace = (
            Accesses(),
            hashlib.blake2b(f"{self.run} {round}".encode(), digest_size=16),
        )
        return self.accesses

    def _note(self, release: bytes) -> None:
        self._trace.update(release)

    def charge(self) -> None:
        """Before anything that depends on the accesses so far is sent or saved: pays for them, once."""
        minibatches, of_all_data = astuple(self.accesses)
        if minibatches + of_all_data == 0:
            return
        self._trace.update(f"{minibatches} {of_all_data}".encode())
        accesses = [(self.rate, minibatches), (1.0, of_all_data)]
        release = self._trace.hexdigest()
        self.spent.charge(release, [a for a in accesses if a[1]], self.multiplier, self.budget)
        self.accesses.minibatches = self.accesses.of_all_data = 0

    @property
    def epsilon(self) -> float:
        """What was spent so far."""
        return self.spent.epsilon(self.budget.delta)
