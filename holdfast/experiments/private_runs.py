"""How a run is made private: what it will release, the noise that this needs, and what cannot be private."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from holdfast.contract import Channel, Method
from holdfast.core.errors import HoldfastError
from holdfast.core.validation import Cohort
from holdfast.engines.common.dry_run import dry_ledger, planned_accesses, planned_messages
from holdfast.privacy import Ledger, NodeDP, protection
from holdfast.privacy.aggregation.crypto import default_threshold
from holdfast.privacy.messages import PrivateMessages, check_clippable
from holdfast.problem.private import Release, check_releasable, counted_noise
from holdfast.problem.problem import Problem
from holdfast.topology import Network

if TYPE_CHECKING:
    from holdfast.experiments.federation import FederationFile
    from holdfast.experiments.setting import Setting


def planned_ledger(setting: Setting, method: Method, cohort: Cohort, rounds: int) -> Ledger | None:
    """What counts the releases of private data, with the noise that so many rounds need; or None."""
    private, nodes = setting.terms.private, setting.data.nodes
    if private is None:
        return None
    if isinstance(private, NodeDP):
        planned = planned_messages(private, nodes, cohort, rounds, setting.seed)
        return protection(private, planned, np.full(nodes, nodes), _secret_size(private, cohort))
    dry = dry_ledger(method, setting.network, cohort, rounds, setting.seed)
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
        contributors = _contributors(ledger.budget, expected, None)
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


def _secret_size(budget: NodeDP, cohort: Cohort) -> int | None:
    """The expected size of cohorts that nobody knows; None: everybody knows them."""
    return None if cohort == "all" or budget.cohorts == "fixed" else cohort


def _contributors(budget: NodeDP, cohort: int, threshold: int | None) -> int:
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


# --- real federations --------------------------------------------------------------------------------------


def federation_ledger(federation: FederationFile) -> Ledger | None:
    """The privacy budget of a federation with the noise of all its rounds, which are ``safe``."""
    budget, size = federation.problem.private, federation.problem.batch_size
    if budget is None:
        return None
    cohort, rounds, nodes = federation.network.cohort, federation.rounds, len(federation.node)
    if isinstance(budget, NodeDP):
        planned = planned_messages(budget, nodes, cohort, rounds, federation.seed)
        ledger = protection(budget, planned, np.full(nodes, nodes), _secret_size(budget, cohort))
    else:
        method, network = federation.method, federation.member_network
        planned = planned_accesses(method, network, cohort, rounds, federation.seed)
        ledger = protection(budget, planned, np.array(federation.counts), None if size == "full" else size)
    ledger.safe = planned
    return ledger


def federation_method(federation: FederationFile) -> Method:
    """The method as members run it: with private messages, if the file asks for that."""
    plan = federation.protection
    if plan is None or not isinstance(plan.budget, NodeDP):
        return federation.method
    masked = federation.secure_aggregation
    threshold = None if masked is None else masked.threshold
    contributors = _contributors(plan.budget, federation.cohort, threshold)
    return PrivateMessages(
        federation.method, plan.budget, plan.multiplier, federation.cohort, federation.seed, contributors
    )


def check_private_federation(federation: FederationFile) -> None:
    """Whether a privacy budget covers all that is planned, and nothing else is shown to others."""
    budget = federation.problem.private
    if budget is None:
        return
    if federation.shared_metrics:
        raise HoldfastError(
            f"shared_metrics: {federation.shared_metrics[0]} is computed from private data without noise; "
            "leave it out, and look at it at home"
        )
    if isinstance(budget, NodeDP):
        _check_private_nodes(federation, budget)
    elif not all(federation.counts):
        who = federation.names[federation.counts.index(0)]
        raise HoldfastError(f"problem.private: say how many samples {who!r} has, samples = ...")
    elif federation.membership is not None and budget.noise_multiplier is None:
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
    _ = federation.member_method  # complains about a quantile that the noise drowns


def _check_private_nodes(federation: FederationFile, budget: NodeDP) -> None:
    """Whether nobody but a trusted server, if that adds the noise, sees anything of a node without noise."""
    check_messages(federation.method, federation.member_network, federation.wire_channel)
    masked, why = federation.secure_aggregation is not None, ""
    if federation.averages_statistics:
        why = "BatchNorm's statistics would be averaged without noise; give buffers = 'local'"
    elif federation.membership is not None:
        why = "the noise is found for the nodes that there are; leave [membership] out"
    elif federation.round is not None and federation.round.quorum is not None:
        why = "the noise is for the mean over all clients that are asked; leave round.quorum out"
    elif budget.noise == "distributed" and not masked:
        why = (
            "with noise = 'distributed' a single message has too little noise for the server to see it; add "
            "[secure_aggregation], or take noise = 'clients'"
        )
    elif budget.cohorts == "poisson" and masked:
        why = (
            "with [secure_aggregation] the clients of a round know one another, so its cohort is no secret; "
            "take cohorts = 'fixed'"
        )
    if why:
        raise HoldfastError(f"problem.private: {why}")
