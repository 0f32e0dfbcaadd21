"""Local optimisers: where methods end with momentum, what is the same bit for bit, and what is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from command_line import experiment_file, holdfast, make_plan
from linear_rounds import contraction, reference_quadratics
from server_runs import assert_same, stochastic_digits
from test_tracking_limits import pdsgdm_limit
from thinning import thinned
from torch import Tensor

import holdfast as hf
from holdfast.contract.optimizer import OPTIMIZERS, LocalOptimizer
from holdfast.core.tree import leaves, named_leaves
from holdfast.engines.common.simulation import Simulation

RING, SERVER = hf.Network.of(hf.ring(10)), hf.server(10)
STEPS = 5
BETWEEN_NEIGHBOURS = [hf.Gossip, hf.DSGT, hf.LocalGECL, hf.DSCAFFOLD, hf.KGT]
WITH_SERVER = [hf.FedAvg, hf.FedProx, hf.SCAFFOLD, hf.LocalGECLServer, hf.VRLSGD, hf.FedLin]
EVERY_METHOD = [(m, RING) for m in BETWEEN_NEIGHBOURS] + [(m, SERVER) for m in WITH_SERVER]
every_method = pytest.mark.parametrize(
    ("method", "network"), EVERY_METHOD, ids=lambda given: str(given)[-20:-2]
)
both_memories = pytest.mark.parametrize("keep", [False, True], ids=["anew", "kept"])


@pytest.fixture(scope="module")
def reference():
    return reference_quadratics(dim=4)


def after(problem, algorithm, network, rounds: int = 8) -> Simulation:
    simulation = Simulation(algorithm, problem, network, seed=3)
    for _ in range(rounds):
        simulation.step()
    return simulation


# --- the same by another name -------------------------------------------------------------------------------


@every_method
@both_memories
def test_without_decay_momentum_is_plain_sgd_bit_for_bit(reference, method, network, keep):
    options = {"lr": 0.01, "local_steps": STEPS}
    plain = after(reference, method(**options), network)
    for average in (True, False):
        optimizer = hf.Momentum(beta=0.0, average=average, keep=keep)
        assert torch.equal(
            after(reference, method(**options, optimizer=optimizer), network).models, plain.models
        )


def test_scaffnew_without_decay_is_scaffnew_bit_for_bit(reference):
    plain, momentum = (
        after(reference, hf.Scaffnew(lr=0.05, p=0.3, optimizer=optimizer), SERVER)
        for optimizer in (hf.SGD(), hf.Momentum(beta=0.0))
    )
    assert torch.equal(plain.models, momentum.models)


@every_method
def test_plain_sgd_adds_nothing_to_the_state(reference, method, network):
    names = [name for name, _ in named_leaves(after(reference, method(lr=0.01), network, 1).state)]
    assert not any("memory" in name for name in names)


def test_pdsgdm_is_gossip_with_kept_momentum_bit_for_bit():
    problem = stochastic_digits()
    ring = hf.Network.of(hf.ring(problem.nodes))
    optimizer = hf.Momentum(beta=0.9, average=False, keep=True)
    gossip = after(problem, hf.Gossip(lr=0.01, local_steps=STEPS, optimizer=optimizer), ring)
    pdsgdm = after(problem, hf.PDSGDM(lr=0.01, local_steps=STEPS, momentum=0.9), ring)
    assert all(map(torch.equal, leaves(gossip.state), leaves(pdsgdm.state)))
    assert len(list(leaves(gossip.state))) == 2


@both_memories
def test_the_mean_of_gradients_is_their_sum_with_a_longer_step(reference, keep):
    mean = hf.Gossip(lr=0.01, local_steps=STEPS, optimizer=hf.Momentum(beta=0.8, keep=keep))
    total = hf.Gossip(lr=0.002, local_steps=STEPS, optimizer=hf.Momentum(beta=0.8, average=False, keep=keep))
    assert_same(reference.run(mean, 30, RING), reference.run(total, 30, RING))


# --- where methods end --------------------------------------------------------------------------------------

EXACT = [
    (hf.KGT, RING, 1000),
    (hf.LocalGECL, RING, 1000),
    (hf.DSCAFFOLD, RING, 1000),
    (hf.SCAFFOLD, SERVER, 600),
    (hf.LocalGECLServer, SERVER, 600),
    (hf.VRLSGD, SERVER, 600),
    (hf.FedLin, SERVER, 600),
]


@pytest.mark.parametrize(("method", "network", "rounds"), thinned(EXACT, every=3, spread=True))
@both_memories
def test_corrected_methods_reach_the_optimum_with_momentum(reference, method, network, rounds, keep):
    algorithm = method(lr=0.01, local_steps=10, optimizer=hf.Momentum(beta=0.9, keep=keep))
    models = reference.run(algorithm, rounds, network)[-1]
    assert (models - reference.optimum).norm(dim=-1).max() < 1e-9


@pytest.mark.slow
def test_scaffnew_reaches_the_optimum_with_momentum(reference):
    algorithm = hf.Scaffnew(lr=0.05, p=0.3, optimizer=hf.Momentum(beta=0.5))
    models = reference.run(algorithm, 1200, SERVER)[-1]
    assert (models - reference.optimum).norm(dim=-1).max() < 1e-9


@both_memories
def test_gossip_stalls_with_momentum_too(reference, keep):
    algorithm = hf.Gossip(lr=0.01, local_steps=10, optimizer=hf.Momentum(beta=0.9, keep=keep))
    path = reference.run(algorithm, 1000, RING)
    assert (path[-1] - path[-2]).abs().max() < 1e-12  # it has settled
    assert (path[-1].mean(0) - reference.optimum).norm() > 0.05
    if keep:
        predicted = pdsgdm_limit(reference, torch.tensor(RING.dense()), 0.001, 10, 0.9)
        assert (path[-1] - predicted).norm(dim=-1).max() < 1e-11


@both_memories
def test_duals_sum_to_zero_with_momentum(keep):
    problem = stochastic_digits()
    ring = hf.Network.of(hf.ring(problem.nodes))
    optimizer = hf.Momentum(beta=0.9, average=False, keep=keep)
    simulation = after(problem, hf.LocalGECL(lr=0.005, local_steps=4, optimizer=optimizer), ring, 20)
    dual = simulation.state.dual
    assert dual.sum(0).abs().max() <= 1e-12 * dual.abs().max() * problem.nodes
    assert dual.abs().max() > 1e-3


def test_the_optimum_is_a_fixed_point_with_momentum(reference):
    """x = x*, dual = own gradient at x*, momentum 0: nothing moves."""
    algorithm = hf.LocalGECL(lr=0.01, local_steps=5, optimizer=hf.Momentum(keep=True))
    simulation = Simulation(algorithm, reference, RING)
    star = reference.optimum.expand(10, -1)
    at_optimum = simulation.state._replace(x=star, mixed=star, dual=reference.grads(star))
    simulation.state = at_optimum
    simulation.step()
    for before, now in zip(leaves(at_optimum), leaves(simulation.state), strict=True):
        assert (before - now).abs().max() < 1e-13


def test_corrections_learn_from_gradients_and_not_from_directions(reference):
    """Tracked directions would multiply the error of the duals by 1 - gain (1 - w) for a mode w of W.

    The gain is the length of the mean direction over that of a lasting gradient. VRL-SGD sends nothing but
    models, so it has to take directions for gradients: a gain above 2 is too much for it, however short the
    steps. K-GT and SCAFFOLD do not mind.
    """
    beta, lr = 0.9, 1e-5
    gain = sum(1 - beta**k for k in range(1, STEPS + 1)) / (1 - beta) / STEPS
    total = hf.Momentum(beta=beta, average=False)
    vrl, _ = contraction(reference, hf.VRLSGD(lr=lr, local_steps=STEPS, optimizer=total), SERVER)
    assert vrl == pytest.approx(gain - 1, abs=1e-3)
    assert gain > 2
    for algorithm, network in ((hf.KGT, RING), (hf.LocalGECL, RING), (hf.DSCAFFOLD, RING)):
        radius, _ = contraction(reference, algorithm(lr=1e-3, local_steps=STEPS, optimizer=total), network)
        assert radius < 1


# --- optimisers of a user's own -----------------------------------------------------------------------------


def test_every_optimiser_is_listed_and_built_by_name():
    listed = json.loads(holdfast("list", "optimizers", "--json").out)
    assert [entry["name"] for entry in listed] == sorted(OPTIMIZERS)
    for name in OPTIMIZERS:
        assert hf.Gossip(lr=0.1, optimizer=name).optimizer == OPTIMIZERS.build(name, {})


class Moments(NamedTuple):
    m: Tensor
    v: Tensor
    t: Tensor  # [..., 1]


@dataclass(frozen=True)
class Rescaled(LocalOptimizer):
    """Directions of unit size, from several tensors and a counter."""

    decay: float = 0.9

    def init(self, x: Tensor) -> Moments:
        return Moments(torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x[..., :1]))

    def update(self, gradient: Tensor, memory: Moments, x: Tensor) -> tuple[Tensor, Moments]:
        t = memory.t + 1
        m = self.decay * memory.m + (1 - self.decay) * gradient
        v = self.decay * memory.v + (1 - self.decay) * gradient**2
        scale = 1 - self.decay**t
        return (m / scale) / ((v / scale).sqrt() + 1e-8), Moments(m, v, t)


@pytest.mark.parametrize(
    ("method", "network"), [(hf.KGT, "ring"), (hf.SCAFFOLD, "server"), (hf.FedAvg, "server")]
)
def test_an_optimiser_with_counters_is_resumed(method, network):
    problem = stochastic_digits()
    nodes = problem.nodes
    network = hf.server(nodes) if network == "server" else hf.Network.of(hf.ring(nodes))
    algorithm = method(lr=0.01, local_steps=3, optimizer=Rescaled(keep=True))
    whole, half, resumed = (after(problem, algorithm, network, rounds) for rounds in (6, 3, 0))
    resumed.restore(*half.snapshot())
    for _ in range(3):
        resumed.step()
    assert all(map(torch.equal, leaves(whole.state), leaves(resumed.state)))
    assert any((tensor == 18).all() for tensor in leaves(whole.state))  # the counter of 6 rounds of 3 steps


def test_a_corrected_method_outdoes_gossip_with_rescaled_steps():
    """The duals stay in the units of gradients, whatever the size of the steps."""
    problem = stochastic_digits()
    ring = hf.Network.of(hf.ring(problem.nodes))
    gossip, kgt = (
        after(problem, method(lr=0.003, local_steps=10, optimizer=Rescaled(keep=True)), ring, 30)
        for method in (hf.Gossip, hf.KGT)
    )
    losses = [problem.global_value(simulation.models.mean(0)) for simulation in (gossip, kgt)]
    assert losses[1] < 0.8 * losses[0]


# --- chosen by name, and refused ----------------------------------------------------------------------------

EXPERIMENT = """
rounds = 2
[problem]
dataset = "digits"
nodes = 4
[[algorithm]]
name = "local-gecl"
lr = 0.1
local_steps = 2
optimizer = { name = "momentum", beta = 0.8, keep = true }
"""


def test_an_experiment_names_its_optimiser(tmp_path):
    def chosen(*overrides: str) -> list[LocalOptimizer]:
        plan = make_plan(tmp_path, *overrides, text=EXPERIMENT)
        return [plan.method(job).optimizer for job in plan.jobs]

    assert chosen() == [hf.Momentum(beta=0.8, keep=True)]
    swept = chosen("algorithm.optimizer.beta=[0.5,0.9]")
    assert swept == [hf.Momentum(beta=beta, keep=True) for beta in (0.5, 0.9)]
    assert chosen("algorithm.optimizer=sgd") == [hf.SGD()]
    outcome = holdfast(
        "run", experiment_file(tmp_path, EXPERIMENT), "--runs-dir", tmp_path / "runs", "--quiet"
    )
    assert outcome.code == 0, outcome.err


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hf.Gossip(lr=0.1, optimizer="adam"), r"Gossip.optimizer: .*optimizer 'adam'"),
        (
            lambda: hf.Gossip(lr=0.1, optimizer=hf.StochasticGradientDescent(lr=0.1, steps=2)),
            r"Gossip.optimizer: .*LocalOptimizer",
        ),
        (lambda: hf.Momentum(beta=1.0), r"Momentum.beta: should be less than 1, got 1.0"),
        (lambda: hf.Gossip(lr=0.1, optimizer={"name": "momentum", "beta": 2}), r"beta"),
        (
            lambda: hf.FedProx(lr=0.1, reduced=True, optimizer=hf.Momentum()),
            r"FedProx.optimizer: SARAH's steps are plain ones",
        ),
        (
            lambda: hf.LocalGECL(lr=0.1, alpha=1.0, optimizer=hf.Momentum()),
            r"LocalGECL.alpha: .* leave out either alpha or the optimizer",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(hf.HoldfastError, match=message):
        make()
