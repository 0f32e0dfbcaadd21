"""How a run is made private: what it will release, the noise that this needs, and what cannot be private."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from holdfast.contract import Channel, Method
from holdfast.core.errors import HoldfastError
from holdfast.core.validation import Cohort
from holdfast.core.world import World
from holdfast.data.lazy import AnyData
from holdfast.engines.common.dry_run import dry_ledger, planned_messages
from holdfast.engines.common.profile import Profile
from holdfast.experiments.spec import Terms
from holdfast.privacy import Ledger, NodeDP, protection
from holdfast.privacy.aggregation.arithmetic import default_threshold
from holdfast.privacy.messages import PrivateMessages, check_clippable
from holdfast.problem.model_problem import ModelProblem
from holdfast.problem.private import Release, check_releasable, counted_noise
from holdfast.problem.problem import Problem
from holdfast.topology import Network


class Setting(Protocol):
    """What of a run's data, network and problem decides how it is made private."""

    @property
    def terms(self) -> Terms: ...
    @property
    def data(self) -> AnyData: ...
    @property
    def network(self) -> Network: ...
    @property
    def seed(self) -> int: ...
    @property
    def world(self) -> World: ...
    @property
    def problem(self) -> ModelProblem:
        """The nodes' local objectives."""


def planned_ledger(
    setting: Setting, method: Method, cohort: Cohort, rounds: int, profile: Profile | None = None
) -> Ledger | None:
    """What counts the releases of private data, with the noise that so many rounds need; or None."""
    private, nodes = setting.terms.private, setting.data.nodes
    if private is None:
        return None
    if isinstance(private, NodeDP):
        planned = planned_messages(private, nodes, cohort, rounds, setting.seed)
        return protection(private, planned, np.full(nodes, nodes), secret_size(private, cohort))
    dry = dry_ledger(method, setting.network, cohort, rounds, setting.seed, profile)
    size = None if setting.terms.batch_size == "full" else setting.terms.batch_size
    ledger = protection(private, dry.accesses, np.asarray(setting.data.counts), size)
    ledger.plan = dry.plan
    return ledger


def protected(
    setting: Setting, method: Method, cohort: Cohort, ledger: Ledger | None, *, noiseless: bool = False
) -> tuple[Method, Problem]:
    """The method and the problem of a run that ``ledger`` counts: messages or gradients are noised.

    ``noiseless``: gradients are clipped only, for an audit, which must notice that.
    """
    if ledger is None:
        return method, setting.problem
    if isinstance(ledger.budget, NodeDP):
        expected = setting.data.nodes if cohort == "all" else cohort
        contributors = contributors_of(ledger.budget, expected, None)
        noised = PrivateMessages(
            method, ledger.budget, ledger.multiplier, expected, setting.seed, contributors
        )
        return noised, setting.problem
    multiplier = 0.0 if noiseless else ledger.multiplier
    release = Release(ledger.budget.clip, multiplier, counted_noise(setting.seed))
    return method, setting.problem.protected(release)


def check_private(setting: Setting, method: Method, cohort: Cohort, channel: Channel) -> None:
    """Refuses what cannot be private."""
    if setting.terms.private is None:
        return
    if isinstance(setting.terms.private, NodeDP):
        check_messages(method, setting.network, channel)
        return
    unequal = isinstance(vars(method).get("local_steps"), tuple)
    sporadic = setting.network.activity is not None
    if setting.world.size > 1 and (cohort != "all" or unequal or sporadic):
        raise HoldfastError(
            "private: with a cohort, a list of local_steps, or sporadic nodes or links, a process would not "
            "count accesses of nodes elsewhere; run it in one process, without --processes"
        )
    check_releasable(setting.problem.row_loss, setting.problem.source)


def check_messages(method: Method, network: Network, channel: Channel) -> None:
    """Refuses messages that cannot be clipped and noised."""
    check_clippable(method)
    if not network.aggregation.plain:
        raise HoldfastError(
            "NodeDP: its noise is for the mean, and one node may change what another rule gives by more; "
            "leave aggregation out"
        )
    if not channel.transparent:
        raise HoldfastError(
            "NodeDP: a channel that changes messages may make them longer than they were clipped to; "
            "leave channel out"
        )


def secret_size(budget: NodeDP, cohort: Cohort) -> int | None:
    """The expected size of cohorts that nobody knows; None: everybody knows them."""
    return None if cohort == "all" or budget.cohorts == "fixed" else cohort


def contributors_of(budget: NodeDP, cohort: int, threshold: int | None) -> int:
    """How many clients' noise has to amount to that of a round.

    Of the ``threshold`` clients without whom nothing is revealed, one may be curious itself: it knows its own
    share, and the others' have to be enough.
    """
    if budget.noise != "distributed":
        return 1
    if cohort < 3:
        raise HoldfastError(
            f"NodeDP.noise: among {cohort} clients noise cannot be distributed; it takes 3 or more in every "
            "round"
        )
    return (threshold or default_threshold(cohort)) - 1
