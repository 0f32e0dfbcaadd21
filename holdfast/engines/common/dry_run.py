"""What a method costs, found by running it on an objective that is zero: there is no formula to go stale."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from holdfast.contract import IDENTITY, Channel, Method
from holdfast.core.randomness import cohort as draw_cohort
from holdfast.core.tree import leaves
from holdfast.core.validation import Cohort
from holdfast.engines.common.channel_run import split_channel_state
from holdfast.engines.common.counters import Footprint
from holdfast.engines.common.profile import Profile
from holdfast.engines.common.rounds import ServerState
from holdfast.engines.common.simulation import Simulation
from holdfast.engines.common.trial import ZeroProblem
from holdfast.privacy import DP, Ledger, NodeDP
from holdfast.topology import Network


def dry_run(
    method: Method,
    network: Network,
    cohort: Cohort = "all",
    rounds: int = 1,
    channel: Channel = IDENTITY,
) -> Footprint:
    """``method`` over ``network``, counted in two dimensions, to tell d from 1.

    Figures per round are means over ``rounds``: some methods skip communication now and then. Of a network
    with a period they are means over whole periods.
    """
    rounds = -(-rounds // (network.period or 1)) * (network.period or 1)
    links = np.mean([network.at(round).directed_links for round in range(network.period or 1)])
    dim = method.capabilities.least_dim
    one, found = _count(method, network, cohort, dim, rounds, channel, None)
    two, _ = _count(method, network, cohort, dim + 1, rounds, channel, found)
    vectors = two.per_round - one.per_round
    return Footprint(
        vectors_at_start=two.at_start - one.at_start,
        vectors_per_round=vectors,
        scalars_per_round=one.per_round - dim * vectors,
        vectors_per_link=float(vectors / links),
        state_vectors=two.state - one.state,
        gradients_per_round=one.gradients / network.nodes,
        minibatches_per_round=one.minibatches / network.nodes,
    )


def planned_accesses(method: Method, network: Network, cohort: Cohort, rounds: int, seed: int) -> np.ndarray:
    """[n, 2] int64: how often each node's minibatches and all its data will be looked at in so many rounds.

    Coins and cohorts are those of ``seed``.
    """
    return dry_ledger(method, network, cohort, rounds, seed).accesses


def dry_ledger(
    method: Method,
    network: Network,
    cohort: Cohort,
    rounds: int,
    seed: int,
    profile: Profile | None = None,
) -> Ledger:
    """The accesses of so many rounds, of each node and round by round (``plan``)."""
    problem = ZeroProblem(network.nodes, method.capabilities.least_dim)
    ledger = Ledger(_ANY, np.ones(network.nodes), None, 1.0)
    options: Any = {"seed": seed, "cohort": cohort, "profile": profile}
    simulation = Simulation(method, problem, network, **options, ledger=ledger)
    plan = [ledger.last]
    for _ in range(rounds):
        simulation.step()
        plan.append(ledger.last)
    ledger.plan = np.stack(plan)
    return ledger


def planned_messages(budget: NodeDP, nodes: int, cohort: Cohort, rounds: int, seed: int) -> np.ndarray:
    """[n, 2] int64: how many messages of each node will be released; all, as far as anybody knows."""
    size, planned = nodes if cohort == "all" else cohort, np.zeros((nodes, 2), dtype=np.int64)
    for round in range(rounds):
        known = budget.cohorts == "fixed" and size < nodes
        planned[draw_cohort(seed, round, nodes, size).numpy() if known else slice(None), 0] += 1
    return planned


_ANY = DP(epsilon=1.0, delta=0.5, clip=1.0)  # a budget that nobody looks at


class _Counts(NamedTuple):
    at_start: int
    per_round: float
    state: int
    gradients: float
    minibatches: float


def _count(
    method: Method,
    network: Network,
    cohort: Cohort,
    dim: int,
    rounds: int,
    channel: Channel,
    found: Profile | None,
) -> tuple[_Counts, Profile]:
    problem = ZeroProblem(network.nodes, dim)
    simulation = Simulation(method, problem, network, cohort=cohort, channel=channel, profile=found)
    at_start, before = simulation.traffic.numbers, replace(simulation.work)
    own, memory = split_channel_state(simulation.state)
    kept = (own.clients if isinstance(own, ServerState) else own, memory)
    state = sum(tensor.numel() for tensor in leaves(kept))
    for _ in range(rounds):
        simulation.step()
    counts = _Counts(
        at_start,
        (simulation.traffic.numbers - at_start) / rounds,
        state,
        (simulation.work.gradient_evaluations - before.gradient_evaluations) / rounds,
        (simulation.work.sample_gradients - before.sample_gradients) / rounds,  # see ``ZeroProblem.samples``
    )
    return counts, simulation.rounds.profile
