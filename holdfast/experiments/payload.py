"""How many bytes a method will send, found by running it on an objective that is zero."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from holdfast.algorithms.load import build_algorithm
from holdfast.channels.compressor import Compressor
from holdfast.engines.common.simulation import Simulation
from holdfast.engines.common.trial import ZeroProblem
from holdfast.experiments.choices import as_channel
from holdfast.experiments.plan import Job
from holdfast.experiments.setting import Setting
from holdfast.topology import Network

MOST_NUMBERS = 2**20  # of all nodes' vectors: longer ones are counted at this size, and scaled up
MANY = 200  # rounds, where not all send the same
STEPS = ("name", "local_steps", "local_epochs")  # what bytes do not depend on


def planned_bytes(settings: dict[str, Any], setting: Setting, network: Network, job: Job) -> float:
    """What all nodes send in all rounds, with the ``algorithm`` and the ``channel`` of ``settings``."""
    own = settings["algorithm"]
    given = {key: value for key, value in own.items() if key not in STEPS}
    method = build_algorithm(own["name"], {"lr": 0.1} | given)
    channel = as_channel(settings.get("channel", "identity"))
    if isinstance(channel, Compressor):
        channel = replace(channel, gamma="safe")  # found without trials; bytes do not depend on it
    size = max(method.capabilities.least_dim, min(setting.dim, MOST_NUMBERS // network.nodes))
    problem = ZeroProblem(network.nodes, size)
    problem.x0 = problem.x0.to(setting.spec.numbers)
    simulation = Simulation(method, problem, network, seed=job.seed, cohort=job.cohort, channel=channel)
    at_start = simulation.traffic.bits
    same = network.sequence is None and network.activity is None
    rounds = 1 if same else network.period or min(MANY, job.rounds)
    for _ in range(rounds):
        simulation.step()
    per_round = (simulation.traffic.bits - at_start) / rounds
    return (at_start + job.rounds * per_round) * setting.dim / size / 8
