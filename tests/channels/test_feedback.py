"""Error feedback: compressed methods reach the optimum, and keep the sums that they would keep without."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from channel_lists import untried
from conftest import make_quadratics
from test_conformance import same_state
from toy_channels import Grid

import holdfast as hf
from holdfast.channels.compressor import Compressor
from holdfast.channels.feedback import CommonMean, PublicCopies
from holdfast.channels.step import safe_step, tuned_step
from holdfast.contract.channel import Draw, Mixing
from holdfast.core.errors import HoldfastError
from holdfast.core.tree import leaves, tree_map
from holdfast.engines.common.channel_run import split_channel_state
from holdfast.engines.common.simulation import Simulation

NODES, DIM = 5, 12
RING, STAR = hf.Network.of(hf.ring(NODES)), hf.server(NODES)
# One of each kind, and the others, which are slow tests.
QUICK: list[Compressor] = [hf.TopK(0.3), hf.Uniform(1), hf.chain(hf.TopK(0.3), hf.Uniform(8))]
CHANNELS: list[Compressor] = [
    *QUICK,
    hf.RandomK(0.5),
    hf.LowRank(1),
    hf.Half(feedback=True),
    hf.BFloat16(feedback=True),
    hf.Uniform(8),
    hf.Uniform(4),
    *(hf.Natural(bits) for bits in (8, 4, 1)),
    hf.Natural(4, dithered=True),
    hf.chain(hf.LowRank(1), hf.Half()),
]
slow = [pytest.mark.slow]


def test_every_channel_is_tried():
    assert not untried(CHANNELS), "add one with feedback to CHANNELS of this file"


every_channel = pytest.mark.parametrize(
    "channel", [pytest.param(c, id=repr(c), marks=[] if c in QUICK else slow) for c in CHANNELS]
)


@pytest.fixture(scope="module")
def quadratics():
    return make_quadratics(NODES, dim=DIM, L=2.0)


def simulate(method, problem, network, channel, rounds: int, **options) -> Simulation:
    simulation = Simulation(method, problem, network, seed=3, channel=channel, **options)
    for _ in range(rounds):
        simulation.step()
    return simulation


def error(simulation: Simulation) -> float:
    """Distance of the nodes' models to the optimum, relative to that of zero."""
    optimum = simulation.problem.optimum
    return float((simulation.models - optimum).norm() / optimum.expand_as(simulation.models).norm())


# --- the optimum --------------------------------------------------------------------------------------------

METHODS = {
    "local-gecl": (hf.LocalGECL(lr=0.1, local_steps=3), RING, "all"),
    "k-gt": (hf.KGT(lr=0.1, local_steps=3), RING, "all"),
    "gradient tracking, two exchanges": (hf.GTSGD(lr=0.2, order="atc"), RING, "all"),
    "local-gecl-server": (hf.LocalGECLServer(lr=0.05, local_steps=3), STAR, "all"),
    "scaffold": (hf.SCAFFOLD(lr=0.03, local_steps=3), STAR, "all"),
    "scaffold, cohorts of 3": (hf.SCAFFOLD(lr=0.03, local_steps=3), STAR, 3),
}


def with_gamma(channel: Compressor, network: hf.Network, method) -> Compressor:
    """A step that suits this small problem; ``safe`` would take more rounds."""
    coarse = channel.delta(DIM) < 0.6 and not isinstance(channel, hf.Uniform | hf.Natural)
    leads = isinstance(method, hf.ServerAlgorithm)
    return channel if leads else replace(channel, gamma=(0.25 if network is STAR else 0.4) if coarse else 0.6)


PAIRS = [
    # each of the quick channels with one method on the graph and one behind the server
    pytest.param(
        c, name, id=f"{c!r}-{name}", marks=[] if c in QUICK and (QUICK.index(c) + j) % 3 == 0 else slow
    )
    for c in CHANNELS
    for j, name in enumerate(METHODS)
]


@pytest.mark.parametrize(("channel", "name"), PAIRS)
def test_the_optimum_is_reached_with_every_channel(channel, name, quadratics):
    method, network, cohort = METHODS[name]
    channel = with_gamma(channel, network, method)
    early = simulate(method, quadratics, network, channel, 80, cohort=cohort)
    before = error(early)
    for _ in range(280):
        early.step()
    assert error(early) < 1e-2 * before  # linearly: what is missing shrinks by the same factor in every round
    duals = early.rounds.duals(early.state)
    if duals is not None and network is RING:
        assert duals.sum(0).abs().max() < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("name", ["local-gecl", "local-gecl-server", "scaffold, cohorts of 3"])
def test_it_is_reached_to_the_last_digits(name, quadratics):
    method, network, cohort = METHODS[name]
    channel = with_gamma(hf.chain(hf.TopK(0.5), hf.Natural(8)), network, method)
    assert error(simulate(method, quadratics, network, channel, 1000, cohort=cohort)) < 1e-10


@pytest.mark.parametrize("name", ["local-gecl", "local-gecl-server"])
def test_without_feedback_top_k_stalls(name, quadratics):
    """The control."""
    method, network, _ = METHODS[name]
    naive = simulate(method, quadratics, network, hf.TopK(0.3, feedback=False), 300)
    assert error(naive) > 0.02
    assert error(simulate(method, quadratics, network, with_gamma(hf.TopK(0.3), network, method), 300)) < 1e-3


@every_channel
def test_safe_steps_need_no_choice(channel, quadratics):
    """With the default gamma, every method comes closer to the optimum and none diverges."""
    for name in ("local-gecl", "local-gecl-server"):
        method, network, _ = METHODS[name]
        simulation = simulate(method, quadratics, network, channel, 50)
        before = error(simulation)
        for _ in range(60):
            simulation.step()
        assert error(simulation) < 0.995 * before


# --- sums ---------------------------------------------------------------------------------------------------


@every_channel
def test_between_neighbours_sums_are_kept_in_every_round(channel, quadratics):
    simulation = Simulation(hf.LocalGECL(lr=0.05, local_steps=4), quadratics, RING, channel=channel)
    for _ in range(40):
        simulation.step()
        assert simulation.rounds.duals(simulation.state).sum(0).abs().max() < 1e-12


def test_they_are_kept_in_float32_over_many_rounds():
    """Copies are added up in float64: in float32 they would be off by 1e-4 by now."""
    form = PublicCopies(hf.TopK(0.2, gamma=0.4), Mixing("neighbours", NODES, RING.weights))
    generator = torch.Generator().manual_seed(0)
    sender = receiver = form.init(torch.zeros(NODES, 50))
    weights = torch.from_numpy(RING.weights.toarray()).float()
    for r in range(1000):
        message = 100 + torch.randn(NODES, 50, generator=generator)
        own = form.decode(form.encode(message, sender, Draw(0, r, 0, torch.arange(NODES))), message)
        sender = form.update(message, own, sender)
        _, receiver = form.combine(message, own, weights @ own, sender, receiver)
    assert (receiver - sender).sum(0).abs().max() < 2e-4
    assert sender.dtype == torch.float64


@dataclass(frozen=True)
class Lagging(CommonMean):
    """Copies alone, without what is owed."""

    serves = frozenset({"server"})

    def update(self, message, own, state):
        return super().update(message, own, state)._replace(owed=state.owed)


def test_behind_a_server_copies_alone_would_miss_the_optimum(quadratics):
    """The control for what is owed: the duals' sum is lost for good."""
    method, network, _ = METHODS["local-gecl-server"]
    mixing = Mixing("an averaging server", NODES)
    for form, low, high in ((Lagging, 1e-2, 10.0), (CommonMean, 0.0, 1e-3)):
        channel = form(hf.TopK(0.3, gamma=0.25), mixing)
        simulation = simulate(method, quadratics, network, channel, 400)
        duals = simulation.rounds.duals(simulation.state)
        assert low <= error(simulation) < high
        assert low <= float(duals.sum(0).abs().max()) < high


def test_behind_an_averaging_server_everybody_hears_the_same(quadratics):
    method, network, _ = METHODS["local-gecl-server"]
    models = simulate(method, quadratics, network, hf.TopK(0.2), 5).models
    assert (models == models[0]).all()


def test_a_leading_server_is_told_all_that_its_clients_did(quadratics):
    """SCAFFOLD's server holds the mean of all control variates, which move by what has arrived."""
    simulation = Simulation(hf.SCAFFOLD(lr=0.05), quadratics, STAR, seed=1, cohort=2, channel=hf.TopK(0.2))
    for _ in range(30):
        simulation.step()
        state, memory = split_channel_state(simulation.state)
        assert (state.clients.c.mean(0) - state.server.c).abs().max() < 1e-12
    assert memory.sender.c == ()
    assert memory.sender.x.abs().max() > 1e-3  # what clients owe of their models' changes


@dataclass(frozen=True)
class ByMeaning(hf.SCAFFOLD):
    """Control variates move by what clients meant to send, not by what arrived."""

    declared = replace(hf.SCAFFOLD.declared, compensates=False)

    def client(self, s, received, oracle):
        after, update = super().client(s, received, oracle)
        return after._replace(c=s.c + update.c), update

    def finish(self, s, sent, answer, oracle):
        return s


def test_shifts_of_absent_clients_would_miss_the_optimum(quadratics):
    """The control, as DIANA has it: the server adds the mean shift of all to what its cohort sends.

    The toy channel does so, with 8 bits, and credits absent clients with work that they have not done.
    """
    method, network, cohort = ByMeaning(lr=0.03, local_steps=3), STAR, 3
    shifted, fed_back = (
        simulate(method, quadratics, network, channel, 300, cohort=cohort)
        for channel in (Grid(), hf.Uniform(8))
    )
    assert error(shifted) > 0.1
    assert error(fed_back) < 1e-6


def test_absent_clients_keep_what_they_owe(quadratics):
    simulation = Simulation(hf.SCAFFOLD(lr=0.05), quadratics, STAR, seed=1, cohort=2, channel=hf.TopK(0.2))
    for _ in range(5):
        before = [tensor.clone() for tensor in leaves(split_channel_state(simulation.state)[1].sender)]
        chosen = set(simulation.rounds.cohort(simulation.round).tolist())
        simulation.step()
        for old, new in zip(before, leaves(split_channel_state(simulation.state)[1].sender), strict=True):
            assert set((old != new).any(1).nonzero()[:, 0].tolist()) == chosen


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    "channel",
    [hf.chain(hf.TopK(0.3), hf.Uniform(8)), hf.RandomK(0.3), hf.Natural(4, dithered=True), hf.LowRank(1)],
    ids=repr,
)
def test_a_resumed_run_goes_on_bit_for_bit(channel, name, quadratics):
    method, network, cohort = METHODS[name]
    whole = simulate(method, quadratics, network, channel, 6, cohort=cohort)
    tensors, counters = whole.snapshot()
    resumed = simulate(method, quadratics, network, channel, 0, cohort=cohort)
    resumed.restore(tensors, counters)
    for _ in range(6):
        whole.step()
        resumed.step()
    assert same_state(whole, resumed)
    assert resumed.traffic == whole.traffic


# --- the step -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Worst(Compressor):
    """Leaves out as much as delta allows, and turned around: the worst case of the small-gain theorem."""

    serves = frozenset({"graph"})
    quality: float = 0.3

    def compress(self, x, uniforms):
        return x * (1 + (1 - self.quality) ** 0.5)

    def expand(self, wire, like):
        return wire

    def delta(self, d):
        return self.quality


def disagreement(gamma: float, weights: np.ndarray, quality: float, rounds: int = 1500) -> float:
    """After so many rounds of mixing alone, relative to that of the start."""
    form = PublicCopies(Worst(quality, gamma=gamma), Mixing("neighbours", len(weights)))
    x = torch.randn(len(weights), 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    start, W = (x - x.mean(0)).norm(), torch.from_numpy(weights)
    sender, receiver = form.init(x), form.init_receiver(x)
    for r in range(rounds):
        own = form.decode(form.encode(x, sender, Draw(0, r, 0, torch.arange(len(x)))), x)
        sender = form.update(x, own, sender)
        x, receiver = form.combine(x, own, W @ own, sender, receiver)
    return float((x - x.mean(0)).norm() / start)


@pytest.mark.parametrize("quality", [0.1, 0.5, 0.9])
def test_the_safe_step_is_just_below_what_the_worst_case_bears(quality):
    """On an even ring, Gershgorin's bound of I - W is exact, and so is the theorem's."""
    network = hf.Network.of(hf.ring(6))
    safe = safe_step(quality, Mixing("neighbours", 6, network.weights).norm).gamma
    assert disagreement(safe, network.dense(), quality) < 1e-2
    if safe < 0.9:
        assert disagreement(1.2 * safe / 0.9, network.dense(), quality) > 10


def test_the_safe_step_grows_with_delta_and_without_loss_is_that_of_plain_mixing():
    steps = [safe_step(delta, 4 / 3).gamma for delta in (0.01, 0.1, 0.5, 1.0)]
    assert steps == sorted(steps)
    assert steps[-1] == 1.0
    assert steps[0] == pytest.approx(0.9 * 0.01 / 2 / (4 / 3), rel=0.02)


def test_the_tuned_step_mixes_faster_and_is_the_same_for_everybody():
    for network, by in ((RING, "neighbours"), (STAR, "an averaging server")):
        forms = [hf.TopK(0.2, gamma="tuned").placed(Mixing(by, NODES, network.weights)) for _ in range(2)]
        first, second = (tuned_step(form, 40) for form in forms)
        assert first == second
        assert first.gamma > 2 * safe_step(0.2, forms[0].mixing.norm).gamma
        assert forms[0].step(40) == first


def test_a_tuned_run(quadratics):
    method, network, _ = METHODS["local-gecl"]
    safe, tuned = (
        simulate(method, quadratics, network, hf.TopK(0.3, gamma=gamma), 200) for gamma in ("safe", "tuned")
    )
    assert error(tuned) < 0.1 * error(safe)


def test_a_low_rank_step_of_a_large_model_is_not_tuned_by_trial():
    form = hf.LowRank(2, gamma="tuned").placed(Mixing("neighbours", NODES, RING.weights))
    with pytest.raises(HoldfastError, match=r"^LowRank.gamma: 5 vectors of 10000000 numbers are too many"):
        form.step(10_000_000)


# --- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "network", "channel", "reason"),
    [
        (
            hf.ECL(lr=0.1),
            RING,
            hf.TopK(0.1),
            r"^channel TopK sends every neighbour the same, and ECL something",
        ),
        (
            hf.PDMM(gamma=1.0),
            RING,
            hf.Uniform(4),
            r"^channel Uniform sends every neighbour the same, and PDMM",
        ),
        (hf.GECL(lr=0.1, alpha=0.1), RING, hf.TopK(0.1), r"^channel TopK cannot give the plain sum"),
        (
            hf.DSpodFL(lr=0.1),
            RING.sporadic(1.0, 0.5),
            hf.TopK(0.1),
            r"^channel TopK needs links that are the same",
        ),
        (
            hf.LocalGECLServer(lr=0.1, warm_start=True),
            STAR,
            hf.TopK(0.1),
            r"^channel TopK makes good later .*warm",
        ),
        (
            hf.SCAFFOLD(lr=0.1),
            STAR,
            hf.TopK(0.1, gamma=0.3),
            r"^TopK.gamma: where a server leads, .* leave gamma",
        ),
    ],
)
def test_what_feedback_does_not_serve_is_refused(method, network, channel, reason, quadratics):
    with pytest.raises(HoldfastError, match=reason):
        Simulation(method, quadratics, network, channel=channel)


def test_warm_starts_between_neighbours_keep_the_sum(quadratics):
    method = hf.LocalGECL(lr=0.05, warm_start_rounds=2)
    simulation = simulate(method, quadratics, RING, hf.TopK(0.3), 5)
    assert simulation.rounds.duals(simulation.state).sum(0).abs().max() < 1e-12


def test_numbers_that_get_lost_name_the_channel_that_was_chosen():
    """A scale beyond float32."""
    far = [lambda x, a=a: 0.5 * (x - 1e60 * a).square().sum() for a in range(1, 4)]
    with pytest.raises(HoldfastError, match=r"^channel Uniform: a finite number does not arrive as one"):
        hf.minimize(far, [0.0, 0.0], hf.LocalGECL(lr=0.5), 5, topology="ring", channel=hf.Uniform(8))


def test_by_name_in_minimize(quadratics):
    def run(channel):
        functions = [lambda x, a=a: 0.5 * (x - a).square().sum() for a in range(1, 4)]
        return hf.minimize(functions, [0.0] * 8, hf.LocalGECL(lr=0.1), 60, topology="ring", channel=channel)

    named = run({"name": "chain", "steps": [{"name": "top-k", "share": 0.5}, "half"], "gamma": 0.5})
    made = run(hf.chain(hf.TopK(0.5), hf.Half(), gamma=0.5))
    assert torch.equal(named.x, made.x)
    assert (named.x[-1] - 2).abs().max() < 1e-2
    # 6 directed links, 2 vectors, each 4 numbers of 2 bytes, a scale, and a mark for each of 8 entries
    assert made.history["payload_bytes"][-1] == 60 * 6 * 2 * (4 * 2 + 4 + 1)


def test_trees_of_messages_have_a_slot_each(quadratics):
    simulation = simulate(hf.KGT(lr=0.05), quadratics, RING, hf.TopK(0.2), 1)
    (memory,) = split_channel_state(simulation.state)[1]
    shapes = tree_map(lambda t: torch.tensor(t.shape), memory.sender)
    assert [t.tolist() for t in leaves(shapes)] == [[NODES, DIM]] * 2
