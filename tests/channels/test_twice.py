"""Methods that add up what mixing changes, LED and its relatives, through coarse channels.

Without curvature such a method is a double integrator, which only mixing damps, and a copy that lags behind
its message is negative damping. ``holdfast/channels/step.py`` says what is done about it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from conftest import make_quadratics

import holdfast as hf
from holdfast.channels.compressor import Compressor
from holdfast.channels.feedback import PublicCopies
from holdfast.channels.step import LEADS, TRIALS, Step, given_step, safe_step, tuned_step
from holdfast.contract.channel import Draw, Mixing
from holdfast.core.errors import HoldfastError
from holdfast.engines.common.simulation import Simulation

NODES, DIM = 10, 20
RING, STAR = hf.Network.of(hf.ring(NODES)), hf.server(NODES)
NORM = Mixing("neighbours", NODES, RING.weights).norm  # 4/3
DELTAS = (1e-4, 0.01, 0.1, 0.3, 0.5, 0.8, 0.99, 1.0)


@cache
def quadratics():
    return make_quadratics(NODES, dim=DIM, L=2.0)


def errors(method, channel, rounds: tuple[int, ...], network=RING, cohort="all") -> list[float]:
    """The distance of the nodes' models to the optimum after so many rounds, relative to that of zero."""
    simulation = Simulation(method, quadratics(), network, seed=3, channel=channel, cohort=cohort)
    optimum, found = quadratics().optimum, []
    for r in range(max(rounds)):
        simulation.step()
        if r + 1 in rounds:
            distance = (simulation.models - optimum).norm()
            found.append(float(distance / optimum.expand_as(simulation.models).norm()))
    return found


# --- the bound ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.25, 0.5, 0.7, 1.0])
@pytest.mark.parametrize("delta", DELTAS)
def test_with_a_safe_step_the_loop_of_every_eigenvalue_is_stable(delta, share):
    """Its poles, and its gain times what C may leave out, which the small-gain theorem wants below 1."""
    lost, (gamma, lead) = (1 - delta) ** 0.5, safe_step(delta, NORM, share)
    z = np.exp(1j * np.concatenate([np.geomspace(1e-9, 1e-2, 4000), np.linspace(1e-2, np.pi, 4000)]))
    for mu in np.geomspace(1e-4, NORM, 30):
        g = gamma * share * mu / (1 + lead)
        poles = np.roots([1, 2 * g * (1 + lead) - 2, 1 - g * (1 + 3 * lead), g * lead])
        assert abs(poles).max() < 1
        filtered = (1 + lead - lead / z) * g
        gain = 1 + (z - 1) * (2 - 1 / z) * filtered / (z - (2 - 1 / z) * (1 - filtered))
        assert abs(gain).max() * lost < 1


@pytest.mark.parametrize("delta", DELTAS)
def test_a_lead_does_no_harm_where_mixing_acts_once(delta):
    """LED with an optimiser that rescales gradients mixes gradients besides, and acts on them once."""
    lost, (gamma, lead) = (1 - delta) ** 0.5, safe_step(delta, NORM, 0.5)
    z = np.exp(1j * np.linspace(1e-6, np.pi, 4000))
    for g in gamma * np.geomspace(1e-4, NORM, 20) / (1 + lead) / 2:
        filtered = (1 + lead - lead / z) * g
        assert abs(1 + (z - 1) * filtered / (z - 1 + filtered)).max() * lost < 1


@dataclass(frozen=True)
class Scaled(Compressor):
    """C(v) = s v, which makes one round linear."""

    serves = frozenset({"graph"})
    scale: float = 0.5

    def compress(self, x, uniforms):
        return self.scale * x

    def expand(self, wire, like):
        return wire

    def delta(self, d):
        return 1 - (1 - self.scale) ** 2


def spectral_radius(scale: float, share: float, step: Step) -> float:
    """Of one round of model, dual and copy of ten nodes, on what sums to zero over the nodes.

    The columns of a message are the states that have a single one, so that one round gives the matrix.
    """
    form = PublicCopies(Scaled(scale=scale), Mixing("neighbours", NODES, RING.weights, twice=share), step)
    W, size = torch.from_numpy(RING.dense()), 3 * NODES
    x, y, sender = torch.eye(size, dtype=torch.float64).reshape(3, NODES, size)
    p = x + y
    own = form.decode(form.encode(p, sender, Draw(0, 0, 0, torch.arange(NODES))), p)
    after = form.update(p, own, sender)
    seen, receiver = form.combine(p, own, W @ own, after, W @ sender)
    torch.testing.assert_close(receiver, W @ after)
    x = p + share * (seen - p)
    matrix = torch.stack([x, y + x - p, after])
    centred = matrix - matrix.mean(1, keepdim=True)
    return float(torch.linalg.eigvals(centred.reshape(size, size)).abs().max())


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("scale", [0.02, 0.1, 0.25, 0.5, 0.9, 1.0])
def test_the_linear_recursion_has_a_spectral_radius_below_one(scale, share):
    safe = safe_step(Scaled(scale=scale).delta(DIM), NORM, share)
    assert spectral_radius(scale, share, safe) < 1 - 1e-9


@pytest.mark.parametrize("gamma", [0.001, *TRIALS])
def test_without_a_lead_every_step_would_diverge(gamma):
    """The control: what was so before there was a lead, with less than half of a message sent."""
    assert spectral_radius(0.25, 0.5, Step(gamma)) > 1 + 1e-9
    assert spectral_radius(0.75, 0.5, Step(gamma)) < 1 - 1e-9


# --- the methods --------------------------------------------------------------------------------------------

METHODS = {
    "led": hf.LED(lr=0.05, local_steps=4),
    "led, small steps": hf.LED(lr=0.02, local_steps=4),
    "led, a larger share": hf.LED(lr=0.05, local_steps=4, share=0.7),
    "exact diffusion": hf.ExactDiffusion(lr=0.2),
    "d2": hf.ExactDiffusion(lr=0.2, share=1.0),
    "extra": hf.EXTRA(lr=0.2),
    "nids": hf.NIDS(lr=0.2),
    "d-scaffnew": hf.DScaffnew(lr=0.1, p=0.4),
}
COARSE = [hf.TopK(0.1), hf.TopK(0.05), hf.RandomK(0.1), hf.Uniform(1), hf.Natural(1), hf.LowRank(1)]
QUICK = ("led, small steps", "extra")
every_method = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in METHODS]
)
every_channel = pytest.mark.parametrize(
    "channel",
    [pytest.param(c, id=repr(c), marks=[] if i == 0 else pytest.mark.slow) for i, c in enumerate(COARSE)],
)


@every_method
@every_channel
@pytest.mark.parametrize("gamma", ["safe", "tuned"])
def test_they_come_closer_and_closer(name, channel, gamma):
    middle, late = errors(METHODS[name], replace(channel, gamma=gamma), (300, 600))
    assert late < 0.95 * middle


@pytest.mark.parametrize("name", ["led, small steps", pytest.param("nids", marks=pytest.mark.slow)])
def test_they_reach_the_optimum(name):
    assert errors(METHODS[name], hf.TopK(0.25, gamma="tuned"), (600,))[0] < 1e-6


@pytest.mark.parametrize("gamma", [0.05, 0.2, 0.5])
@pytest.mark.parametrize("lr", [0.02, 0.05])
def test_a_number_gets_the_lead_that_suits_it(lr, gamma):
    """Before, 0.2 converged with one of these step sizes and diverged with the other."""
    middle, late = errors(hf.LED(lr=lr, local_steps=4), hf.TopK(0.1, gamma=gamma), (300, 600))
    assert late < 0.95 * middle


def placed(channel: Compressor, twice: float = 0.5) -> PublicCopies:
    form = channel.placed(Mixing("neighbours", NODES, RING.weights, twice=twice))
    assert isinstance(form, PublicCopies)
    return form


def test_a_number_that_is_too_large_is_refused_by_name():
    with pytest.raises(HoldfastError, match=r'^TopK.gamma: 1 is too large .* "tuned", which is 0\.\d+ here'):
        Simulation(METHODS["led"], quadratics(), RING, channel=hf.TopK(0.1, gamma=1.0))
    Simulation(hf.KGT(lr=0.05), quadratics(), RING, channel=hf.TopK(0.1, gamma=1.0))  # it acts once


def test_what_hardly_loses_anything_is_used_as_it_was():
    for channel in (hf.Uniform(8), hf.Natural(8), hf.BFloat16(feedback=True)):
        assert safe_step(channel.delta(DIM), NORM, 0.5).lead == 0
        assert given_step(placed(channel), DIM, 1.0) == Step(1.0)


def test_steps_are_the_same_for_everybody_and_found_once():
    first, second = (placed(hf.TopK(0.1, gamma="tuned")) for _ in range(2))
    assert first == second
    tuned = first.step(DIM)
    known = tuned_step.cache_info().misses
    assert second.step(DIM) == tuned
    assert tuned_step.cache_info().misses == known
    assert tuned.gamma > safe_step(hf.TopK(0.1).delta(DIM), NORM, 0.5).gamma
    assert tuned.lead in LEADS


# --- methods of a server whose duals follow what was sent --------------------------------------------------

LED_BY_SERVERS = [
    *(hf.FedDyn(alpha=alpha, lr=0.1, local_steps=4) for alpha in (0.1, 0.3, 1.0, 3.0)),
    *(hf.AFedPD(eta=eta, lr=0.05, local_steps=4) for eta in (0.3, 1.0, 3.0, 10.0)),
]
SOME_SLOW = [
    pytest.param(m, id=repr(m), marks=[] if i % 4 == 1 else pytest.mark.slow)
    for i, m in enumerate(LED_BY_SERVERS)
]


@pytest.mark.parametrize("cohort", ["all", 3])
@pytest.mark.parametrize("method", SOME_SLOW)
def test_duals_that_follow_what_was_sent_reach_the_optimum(method, cohort):
    middle, late = errors(method, hf.TopK(0.1), (500, 2000), STAR, cohort)
    assert late < max(0.3 * middle, 1e-9)
