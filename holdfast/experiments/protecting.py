"""How a run is made private: what it will release, the noise that this needs, and what cannot be private."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from holdfast.contract import Channel, Method
from holdfast.core.errors import HoldfastError
from holdfast.core.validation import Cohort
from holdfast.engines.common.dry_run import planned_accesses, planned_messages
from holdfast.privacy import Ledger, NodeDP, protection
from holdfast.privacy.messages import PrivateMessages, check_clippable
from holdfast.problem.private import Release, check_releasable, counted_noise
from holdfast.problem.problem import Problem

if TYPE_CHECKING:
    from holdfast.experiments.assembly import Setting
    from holdfast.experiments.federation import FederationFile


def planned_ledger(setting: Setting, method: Method, cohort: Cohort, rounds: int) -> Ledger | None:
    """What counts the releases of private data, with the noise that so many rounds need; or None."""
    private, nodes = setting.terms.private, setting.data.nodes
    if private is None:
        return None
    if isinstance(private, NodeDP):
        planned = planned_messages(private, nodes, cohort, rounds, setting.seed)
        secret = None if cohort == "all" or private.cohorts == "fixed" else cohort
        return protection(private, planned, np.full(nodes, nodes), secret)
    planned = planned_accesses(method, setting.network, cohort, rounds, setting.seed)
    size = None if setting.terms.batch_size == "full" else setting.terms.batch_size
    return protection(private, planned, np.asarray(setting.data.counts), size)


def protected(
    setting: Setting, method: Method, cohort: Cohort, ledger: Ledger | None
) -> tuple[Method, Problem]:
    """The method and the problem of a run that ``ledger`` counts: messages or gradients are noised."""
    if ledger is None:
        return method, setting.problem
    if isinstance(ledger.budget, NodeDP):
        expected = setting.data.nodes if cohort == "all" else cohort
        return PrivateMessages(
            method, ledger.budget, ledger.multiplier, expected, setting.seed
        ), setting.problem
    release = Release(ledger.budget.clip, ledger.multiplier, counted_noise(setting.seed))
    return method, setting.problem.protected(release)


def check_private(setting: Setting, method: Method, cohort: Cohort, channel: Channel) -> None:
    """Refuses what cannot be private."""
    if setting.terms.private is None:
        return
    if isinstance(setting.terms.private, NodeDP):
        check_clippable(method)
        if not setting.network.aggregation.plain:
            raise HoldfastError(
                "NodeDP: its noise is for the mean, and one node may change what another rule gives by more; "
                "leave aggregation out"
            )
        if not channel.transparent:
            raise HoldfastError(
                "NodeDP: a channel that changes messages may make them longer than they were clipped to; "
                "leave channel out"
            )
        return
    unequal = isinstance(vars(method).get("local_steps"), tuple)
    if setting.world.size > 1 and (cohort != "all" or unequal):
        raise HoldfastError(
            "private: with a cohort, or a list of local_steps, a process would not count accesses of "
            "clients elsewhere; run it in one process, or with cohort = 'all' and one number"
        )
    check_releasable(setting.problem.row_loss, setting.problem.source)


# --- real federations --------------------------------------------------------------------------------------


def federation_ledger(federation: FederationFile) -> Ledger | None:
    """The privacy budget of a federation with the noise of all its rounds, which are ``safe``."""
    budget, size = federation.problem.private, federation.problem.batch_size
    if budget is None:
        return None
    cohort, rounds = federation.network.cohort, federation.rounds
    planned = planned_accesses(federation.method, federation.member_network, cohort, rounds, federation.seed)
    ledger = protection(budget, planned, np.array(federation.counts), None if size == "full" else size)
    ledger.safe = planned
    return ledger


def check_private_federation(federation: FederationFile) -> None:
    """Whether a privacy budget covers all that is planned, and nothing else is shown to others."""
    budget = federation.problem.private
    if budget is None:
        return
    if isinstance(budget, NodeDP):
        raise HoldfastError(
            "problem.private: unit = 'node' is for simulations so far, as noise and secret cohorts of a "
            "server are not built yet; use unit = 'sample', the default"
        )
    if not all(federation.counts):
        who = federation.names[federation.counts.index(0)]
        raise HoldfastError(f"problem.private: say how many samples {who!r} has, samples = ...")
    if federation.shared_metrics:
        raise HoldfastError(
            f"shared_metrics: {federation.shared_metrics[0]} is computed from private data without noise; "
            "leave it out, and look at it at home"
        )
    if federation.membership is not None and budget.noise_multiplier is None:
        raise HoldfastError(
            "problem.private: members may change, so the noise cannot be found from their data; give "
            "noise_multiplier. Each member stops when its budget is spent"
        )
    plan = federation.protection
    assert plan is not None
    if federation.epoch == 0 and (planned := plan.epsilon_of(plan.safe)) > budget.epsilon:
        raise HoldfastError(
            f"problem.private: {federation.rounds} rounds with noise_multiplier = {plan.multiplier:g} spend "
            f"epsilon {planned:.4g} of {budget.epsilon:g}; take fewer rounds, or more noise"
        )
