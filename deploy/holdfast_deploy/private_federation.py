"""The privacy budget of a federation: what its rounds release, the noise that this needs, what it refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from holdfast.contract import Method
from holdfast.core.errors import HoldfastError
from holdfast.engines.common.dry_run import planned_accesses, planned_messages
from holdfast.experiments.private_runs import check_messages, contributors_of, secret_size
from holdfast.privacy import Ledger, NodeDP, protection
from holdfast.privacy.messages import PrivateMessages

if TYPE_CHECKING:
    from holdfast_deploy.federation_file import FederationFile


def federation_ledger(federation: FederationFile) -> Ledger | None:
    """The privacy budget of a federation with the noise of all its rounds, which are ``safe``."""
    budget, size = federation.problem.private, federation.problem.batch_size
    if budget is None:
        return None
    cohort, rounds, nodes = federation.network.cohort, federation.rounds, len(federation.node)
    if isinstance(budget, NodeDP):
        planned = planned_messages(budget, nodes, cohort, rounds, federation.seed)
        ledger = protection(budget, planned, np.full(nodes, nodes), secret_size(budget, cohort))
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
    contributors = contributors_of(plan.budget, federation.cohort, threshold)
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
            "leave it out, and look at it locally"
        )
    if isinstance(budget, NodeDP):
        _check_private_nodes(federation, budget)
    elif not all(federation.counts):
        node = federation.names[federation.counts.index(0)]
        raise HoldfastError(f"problem.private: say how many samples {node!r} has, samples = ...")
    elif federation.membership is not None and budget.noise_multiplier is None:
        raise HoldfastError(
            "problem.private: members may change, so the noise cannot be found from their data; give "
            "noise_multiplier. Each member stops when its budget is spent"
        )
    plan = federation.protection
    assert plan is not None
    if federation.roster_number == 0 and (planned := plan.epsilon_of(plan.safe)) > budget.epsilon:
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
