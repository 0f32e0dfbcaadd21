"""Every method with every channel that it does not refuse, at the channel's coarsest: none diverges.

With exact gradients of heterogeneous quadratics, and on digits. Nearly all of it is slow:
``make test-slow``, or ``pytest -m slow tests/channels/test_coarse_pairs.py``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import isfinite
from typing import NamedTuple

import pytest
import torch
from conftest import make_quadratics
from test_conformance import CASES, THREE_STEPS, Case, case_id, method
from torch import nn

import holdfast as hf
from holdfast.channels.compressor import Compressor
from holdfast.core.errors import HoldfastError
from holdfast.data import DATASETS
from holdfast.engines.common.fit import check_fit
from holdfast.engines.common.simulation import Simulation
from holdfast.problem.flat import FlatModel
from holdfast.problem.losses import CrossEntropy
from holdfast.problem.model_problem import ModelProblem

NODES, DIM = 10, 20
RING, STAR = hf.Network.of(hf.ring(NODES)), hf.server(NODES)
CHANNELS: list[Compressor] = [
    hf.TopK(0.05),
    hf.RandomK(0.1),
    hf.Uniform(1),
    hf.Natural(1),
    hf.LowRank(1),
    hf.Half(),
    hf.BFloat16(),
    hf.chain(hf.TopK(0.1), hf.Uniform(1)),
]
HARDER = [
    Case("led", {"local_steps": 3, "share": 1.0}, 1, 3, server=True),
    Case("led", {"local_steps": 4, "share": 0.7}, 1, 4),
    Case("feddyn", {"alpha": 0.1, "local_steps": 3}, 2, 3, server=True),
    # Momentum weighs the rounds differently, so what is made good later leaves the duals' sum off zero.
    Case("dualfl", {"nu": 0.5, "rho": 0.25, "solver": THREE_STEPS}, 2, 3, server=True, rate=None),
]
# The battery's own DualFL has a dual step for other problems; this one converges here without a channel.
TRIED = [case for case in CASES if "optimizer" not in case.options and case.name != "dualfl"] + HARDER
STALL = {"dualfl"}
QUICK = {"led", "feddyn", "a-fedpd", "local-gecl", "tamuna"}


class Pair(NamedTuple):
    case: Case
    channel: Compressor
    cohort: int | str

    def simulation(self, problem, channel: hf.Channel | None = None, rate: float | None = None) -> Simulation:
        network = STAR if self.case.server else RING
        # In cohorts, what is left out waits until the client is drawn again: steps have to be smaller, and
        # with DiLoCo's momentum in any case.
        fed_back = self.cohort != "all" and method(self.case).capabilities.compensates is not True
        if rate is None and self.case.rate == "lr":
            rate = 0.005 if self.case.name == "diloco" else 0.02 if fed_back else None
        return Simulation(
            method(self.case, rate),
            problem,
            network,
            seed=3,
            channel=channel or self.channel,
            cohort=self.cohort,
        )


def accepted(case: Case, channel: Compressor, cohort: int | str) -> bool:
    try:
        check_fit(method(case), NODES, STAR if case.server else RING, cohort, channel)
    except HoldfastError:
        return False
    return True


def has_a_step(case: Case, channel: Compressor) -> bool:
    chosen, leads = method(case), isinstance(method(case), hf.ServerAlgorithm)
    return channel.feedback and not leads and not chosen.capabilities.compensates


PAIRS = [
    pytest.param(
        Pair(case, replace(channel, gamma=gamma) if gamma == "tuned" else channel, cohort),
        id=f"{case_id(case)}, {channel!r} {gamma}, {cohort}",
        marks=[] if case.name in QUICK and c == 0 and gamma == "safe" else [pytest.mark.slow],
    )
    for case in TRIED
    for c, channel in enumerate(CHANNELS)
    for gamma in ("safe", "tuned")
    if gamma == "safe" or has_a_step(case, channel)
    for cohort in ("all", 3)
    if accepted(case, channel, cohort)
]
ON_DIGITS = (hf.TopK, hf.Uniform, hf.LowRank)
every_pair = pytest.mark.parametrize("pair", PAIRS)


@cache
def quadratics():
    return make_quadratics(NODES, dim=DIM, L=2.0)


def error(simulation: Simulation) -> float:
    optimum = quadratics().optimum
    distance = (simulation.models - optimum).norm()
    return float(distance / optimum.expand_as(simulation.models).norm())


def run(simulation: Simulation, rounds: int) -> Simulation:
    for _ in range(rounds):
        simulation.step()
    return simulation


@cache
def plain(case: str, cohort: int | str) -> float:
    """How far the method ends without a channel."""
    (chosen,) = (each for each in TRIED if case_id(each) + str(each.server) == case)
    return error(run(Pair(chosen, CHANNELS[0], cohort).simulation(quadratics(), hf.Identity()), 600))


def test_pairs_of_all_kinds_are_tried():
    tried = {(pair.values[0].case.name, type(pair.values[0].channel)) for pair in PAIRS}
    assert {name for name, _ in tried} == {case.name for case in CASES}
    assert {kind for _, kind in tried} == {type(channel) for channel in CHANNELS}
    refused = {"ecl", "pdmm"}  # other than float16: what they send goes over one link
    assert {name for name, kind in tried if kind is hf.TopK} == {case.name for case in CASES} - refused


@every_pair
def test_on_quadratics_no_pair_diverges_and_exact_methods_go_on_to_the_optimum(pair):
    simulation = run(pair.simulation(quadratics()), 200)
    middle = error(simulation)
    late = error(run(simulation, 400))
    assert isfinite(late)
    alone = plain(case_id(pair.case) + str(pair.case.server), pair.cohort)
    if alone < 1e-2 and pair.case.name not in STALL:
        assert late < max(0.98 * middle, 1e-2)
    else:  # it has a bias, which coarse messages may make larger, but not without end; cohorts add noise
        assert late < max(1.5 * middle, 3 * alone)


@cache
def digits() -> ModelProblem:
    images = DATASETS.build("digits", {})
    data = hf.partition(images.x_train, images.y_train, hf.Dirichlet(0.1), nodes=NODES, seed=0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    flat = FlatModel(model, torch.device("cpu"), torch.float32)
    return ModelProblem(flat, CrossEntropy(), data, batch_size=16, seed=7)


@pytest.mark.slow
@pytest.mark.parametrize(
    "pair",
    [
        pair
        for pair in PAIRS
        # DualFL diverges on stochastic gradients with any channel, and with none.
        if type(pair.values[0].channel) in ON_DIGITS and pair.values[0].case.name != "dualfl"
    ],
)
def test_on_digits_no_pair_diverges(pair):
    rate = 0.0005 if pair.case.name == "diloco" else None  # of AdamW
    simulation = run(pair.simulation(digits(), rate=rate), 100)
    spread = (simulation.models - simulation.models.mean(0)).norm()
    run(simulation, 300)
    assert digits().global_value(simulation.models.mean(0)) < digits().global_value(digits().x0)
    later = (simulation.models - simulation.models.mean(0)).norm()
    assert later < 3 * spread + 0.05 * simulation.models.norm()
