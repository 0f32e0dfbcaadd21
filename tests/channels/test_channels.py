"""Channels: messages that travel in other forms, in all engines, with what a channel remembers."""

from __future__ import annotations

import pytest
import torch
from channel_lists import untried
from conftest import make_quadratics
from test_compiled import always, without_compiler  # noqa: F401 - fixtures
from test_conformance import CASES, NODES, RING, STAR, Case, case_id, method, network, same_state
from test_executors import assert_close, dense, shared
from thinning import thinned
from toy_channels import Grid

import holdfast as hf
from holdfast.core.errors import HoldfastError
from holdfast.core.tree import leaves, row_size
from holdfast.engines.common.channel_run import split_channel_state
from holdfast.engines.common.dry_run import dry_run
from holdfast.engines.common.fit import check_fit
from holdfast.engines.common.profile import profile
from holdfast.engines.common.simulation import Simulation
from holdfast.engines.simulate.choice import executor_for

HALF, GRID = hf.Half(feedback=False), Grid()
COMPRESSED = [
    hf.chain(hf.TopK(0.3), hf.Uniform(8)),
    hf.RandomK(0.5),
    hf.Natural(4, dithered=True),
    hf.Uniform(1),
    hf.LowRank(2),
    hf.Half(feedback=True),
    hf.BFloat16(),
]


def test_every_channel_is_tried():
    assert not untried([HALF, *COMPRESSED]), "add it to the end of COMPRESSED of this file"


FIRST = {"local-gecl", "scaffold", "fedavg", "fedlin"}  # a method of each kind: the others are slow tests


def is_served(case: Case, channel: hf.Channel) -> bool:
    """Whether ``channel`` is made for what the method asks of it, as the first test below makes sure.

    What remembers its messages cannot give the plain sum over neighbours, nor send each link something else.
    A server that remembers them would mislead clients that settle a round by what arrived.
    """
    if channel is GRID and case.name in ("scaffold", "scallion", "scafcom", "feddyn", "a-fedpd", "tamuna"):
        return False
    return channel is HALF or not (case.name in ("ecl", "pdmm") or case.options.get("alpha") == 0.1)


def fits(case: Case, channel: hf.Channel) -> bool:
    try:
        check_fit(method(case), NODES, network(case), "all", channel)
    except HoldfastError:
        return False
    return True


def is_tried(case: Case) -> bool:
    """A channel sees messages, not local steps: momentum is tried with one method of each kind."""
    return "optimizer" not in case.options or case.name in ("local-gecl", "scaffold")


TRIED = [case for case in CASES if is_tried(case)]
PAIRS = [
    pytest.param(
        channel,
        case,
        id=f"{type(channel).__name__} {case_id(case)}",
        marks=[pytest.mark.slow] if case.name not in FIRST else [],
    )
    for channel in (HALF, GRID, *COMPRESSED)
    for case in TRIED
    if is_served(case, channel)
]
every_pair = pytest.mark.parametrize(("channel", "case"), PAIRS)


@pytest.fixture(scope="module")
def digits():
    return dense()


@pytest.fixture(scope="module")
def quadratics():
    return make_quadratics(NODES, L=2.0)


def simulate(case: Case, objective, channel: hf.Channel, rounds: int) -> Simulation:
    simulation = Simulation(method(case), objective, network(case), seed=7, channel=channel)
    for _ in range(rounds):
        simulation.step()
    return simulation


# --- the battery --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channel", [HALF, GRID, *COMPRESSED], ids=repr)
def test_what_each_channel_serves(channel):
    for case in CASES:  # the slow pairs build a simulation each, which checks whether they fit
        if channel in (HALF, GRID) or case.name in FIRST or not is_served(case, channel):
            assert fits(case, channel) == is_served(case, channel), case_id(case)


@every_pair
def test_the_battery(channel, case, digits):
    objective = digits
    whole = simulate(case, objective, channel, 3)
    before = [(tensor.shape, tensor.dtype) for tensor in leaves(whole.state)]
    tensors, counters = whole.snapshot()
    resumed = simulate(case, objective, channel, 0)
    for _ in range(3):
        whole.step()  # going on must not reach into the snapshot
    assert [(tensor.shape, tensor.dtype) for tensor in leaves(whole.state)] == before
    resumed.restore(tensors, counters)
    for _ in range(3):
        resumed.step()
    assert same_state(whole, resumed)
    assert resumed.traffic == whole.traffic
    plain = simulate(case, objective, hf.Identity(), 6)
    assert not torch.equal(whole.models, plain.models)
    assert whole.traffic.numbers == plain.traffic.numbers
    assert whole.traffic.delay == plain.traffic.delay
    if channel is HALF:
        assert len(before) == sum(1 for _ in leaves(plain.state))  # nothing is remembered
        assert whole.payload_bytes == 2 * plain.traffic.numbers


@every_pair
def test_training_lowers_the_common_objective(channel, case, quadratics):
    simulation = simulate(case, quadratics, channel, 60 // case.gradients)
    start = quadratics.global_value(quadratics.x0)
    assert quadratics.global_value(simulation.models.mean(0)) < 0.9 * start


@pytest.mark.parametrize("case", [case for case in TRIED if is_served(case, GRID)], ids=case_id)
def test_bits_are_those_of_what_travels(case, quadratics):
    """A byte for every number, and a width for every vector; a server's answer is in full."""
    simulation = simulate(case, quadratics, GRID, 0)
    plain, at_start = simulate(case, quadratics, hf.Identity(), 3), simulation.traffic.bits
    begun = simulate(case, quadratics, hf.Identity(), 0).traffic.bits
    for _ in range(3):
        simulation.step()
    messages = profile(method(case), network(case)).sent_in_round(quadratics.x0)
    encoded = sum(8 * row_size(m) + 64 * len(list(leaves(m))) for m in messages)
    full = sum(64 * row_size(m) for m in messages)
    sent = simulation.traffic.bits - at_start
    if case.server:  # each message up, and something down in full
        assert sent == plain.traffic.bits - begun - 3 * NODES * (full - encoded)
    else:
        assert sent == 3 * 2 * NODES * encoded


# --- what a channel keeps -----------------------------------------------------------------------------------


@pytest.mark.parametrize("channel", [HALF, GRID, Grid(dithered=True)], ids=repr)
def test_between_neighbours_the_sum_of_the_duals_is_kept(channel, quadratics):
    simulation = Simulation(hf.LocalGECL(lr=0.05, local_steps=4), quadratics, RING, channel=channel)
    for _ in range(50):
        simulation.step()
    assert simulation.state is not None
    assert simulation.rounds.duals(simulation.state).sum(0).abs().max() < 1e-12


def test_neighbour_sums_keep_it_too(quadratics):
    algorithm = hf.LocalGECL(lr=0.05, local_steps=4, alpha=0.1)
    simulation = Simulation(algorithm, quadratics, RING, channel=HALF)
    for _ in range(50):
        simulation.step()
    assert simulation.rounds.duals(simulation.state).sum(0).abs().max() < 1e-12


def test_behind_a_server_everybody_hears_the_same(quadratics):
    for channel in (HALF, GRID):
        simulation = Simulation(hf.LocalGECLServer(lr=0.05), quadratics, STAR, channel=channel)
        for _ in range(5):
            simulation.step()
        assert (simulation.models == simulation.models[0]).all()


def test_with_error_feedback_the_optimum_is_exact(quadratics):
    exact, rounded, fed_back = (
        Simulation(hf.LocalGECL(lr=0.05, local_steps=4), quadratics, RING, channel=channel)
        for channel in (hf.Identity(), HALF, GRID)
    )
    for simulation in (exact, rounded, fed_back):
        for _ in range(600):
            simulation.step()
    optimum = exact.models[0]
    assert (fed_back.models - optimum).norm() < 1e-10 * optimum.norm()
    assert 1e-10 < (rounded.models - optimum).norm() / optimum.norm() < 1e-3


@pytest.mark.parametrize("channel", [HALF, GRID, Grid(dithered=True)], ids=repr)
def test_a_coin_may_skip_an_exchange(channel, quadratics):
    """FedPD's coin, and Scaffnew's that decides after how many steps to exchange."""
    for algorithm in (hf.FedPD(eta=0.1, lr=0.05, skip=0.5), hf.Scaffnew(lr=0.05, p=0.3)):
        simulation = Simulation(algorithm, quadratics, STAR, seed=3, channel=channel)
        sent = []
        for _ in range(8):
            bits, before = simulation.traffic.bits, list(leaves(split_channel_state(simulation.state)[1]))
            simulation.step()
            sent.append(simulation.traffic.bits > bits)
            after = leaves(split_channel_state(simulation.state)[1])
            assert all(torch.equal(a, b) != sent[-1] for a, b in zip(before, after, strict=True))
        assert any(sent)
        assert all(sent) == isinstance(algorithm, hf.Scaffnew)


def test_a_channel_that_serves_nothing_says_so(quadratics):
    class Mute(hf.Half):
        pass

    with pytest.raises(hf.HoldfastError, match=r"Mute: its class declares nothing in `serves`.*'graph'"):
        Simulation(hf.Gossip(lr=0.1), quadratics, STAR, channel=Mute(feedback=False))


def test_cohorts_keep_the_memory_of_those_who_are_absent(quadratics):
    simulation = Simulation(
        hf.FedAvg(lr=0.05, local_steps=2), quadratics, STAR, seed=1, cohort=2, channel=GRID
    )
    for _ in range(5):
        before = [tensor.clone() for tensor in leaves(simulation.state.channel.sender)]
        chosen = simulation.rounds.cohort(simulation.round)
        simulation.step()
        for old, new in zip(before, leaves(simulation.state.channel.sender), strict=True):
            changed = (old != new).any(1)
            assert set(changed.nonzero()[:, 0].tolist()) == set(chosen.tolist())


def test_the_dry_run_counts_what_a_channel_remembers():
    for algorithm, graph, messages in [(hf.LocalGECL(lr=0.05), RING, 2), (hf.FedAvg(lr=0.05), STAR, 1)]:
        plain, half, grid = (dry_run(algorithm, graph, channel=c) for c in (hf.Identity(), HALF, GRID))
        assert half == plain
        server_led = graph is STAR  # then one vector of the server for each part of a message
        kept = messages * (NODES + 1) if server_led else 2 * messages * NODES
        assert grid.state_vectors == plain.state_vectors + kept
        assert grid.vectors_per_link == plain.vectors_per_link


def test_old_checkpoints_load(quadratics):
    simulation = Simulation(hf.LocalGECL(lr=0.05), quadratics, RING)
    for _ in range(3):
        simulation.step()
    tensors, counters = simulation.snapshot()
    assert set(tensors) == {"x", "mixed", "dual"}
    del counters["traffic"]["bits"]  # as they were written before there were channels
    resumed = Simulation(hf.LocalGECL(lr=0.05), quadratics, RING)
    resumed.restore(tensors, counters)
    assert resumed.traffic == simulation.traffic


# --- prepared rounds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "channel", thinned([HALF, GRID, Grid(dithered=True), *COMPRESSED[:4]], every=3), ids=repr
)
@pytest.mark.parametrize(
    ("algorithm", "graph"),
    [
        (hf.LocalGECL(lr=0.05, local_steps=3), RING),
        (hf.GTSGD(lr=0.05, order="atc"), RING),
        (hf.LocalGECLServer(lr=0.05, local_steps=3), STAR),
        (hf.SCAFFOLD(lr=0.05, local_steps=3), STAR),
    ],
    ids=lambda given: type(given).__name__,
)
def test_compiled_rounds_are_the_same_rounds(algorithm, graph, channel, always, without_compiler):  # noqa: F811
    problem = shared(dense)
    plain = Simulation(algorithm, problem, graph, seed=7, channel=channel)
    fast = Simulation(
        algorithm, problem, graph, seed=7, channel=channel, executor=executor_for(torch.device("cpu"))
    )
    assert fast.prepare(6).startswith("all nodes stacked, compiled; prepared in")
    for _ in range(6):
        plain.step()
        fast.step()
    assert_close(fast.models, plain.models)
    assert fast.traffic == plain.traffic


# --- what is refused ----------------------------------------------------------------------------------------


def far_away(scale: float):
    return [lambda x, a=a: 0.5 * (x - scale * a).square().sum() for a in range(1, 4)]


def test_half_has_feedback_where_rounding_would_add_up(quadratics):
    """The duals behind a server that averages: without it they drift, and never stop."""
    method = hf.LocalGECLServer(lr=0.05, local_steps=3)
    drifts, stays = (
        Simulation(method, quadratics, STAR, channel=c) for c in (HALF, hf.CHANNELS.build("half", {}))
    )
    for simulation in (drifts, stays):
        for _ in range(400):
            simulation.step()
    optimum = quadratics.optimum.norm()
    assert (drifts.models[0] - quadratics.optimum).norm() > 0.05 * optimum
    assert (stays.models[0] - quadratics.optimum).norm() < 1e-9 * optimum
    for graph, exact in ((RING, hf.LocalGECL(lr=0.05)), (STAR, hf.FedAvg(lr=0.05))):
        half, plain = (Simulation(exact, quadratics, graph, channel=c) for c in (hf.Half(), hf.Identity()))
        assert len(list(leaves(half.state))) == len(list(leaves(plain.state)))


def test_numbers_beyond_half_precision_are_an_error_that_names_the_channel():
    for algorithm, topology, channel in [
        (hf.LocalGECL(lr=0.5), "ring", "half"),
        (hf.ECL(lr=0.5), "ring", "half"),
        (hf.FedAvg(lr=0.5), None, "half"),
        (hf.LocalGECLServer(lr=0.5), None, HALF),
    ]:
        with pytest.raises(HoldfastError, match=r"^channel Half: a number is beyond 65504; use another"):
            hf.minimize(far_away(1e6), [0.0], algorithm, 20, topology=topology, channel=channel)


def test_they_are_noticed_in_prepared_rounds(always, without_compiler):  # noqa: F811
    simulation = Simulation(
        hf.LocalGECL(lr=0.05), dense(), RING, channel=HALF, executor=executor_for(torch.device("cpu"))
    )
    assert "compiled" in simulation.prepare(3)
    simulation.step()
    for tensor in leaves(simulation.state):
        tensor.mul_(1e9)
    with pytest.raises(HoldfastError, match="channel Half: a number is beyond 65504"):
        simulation.step()


@pytest.mark.parametrize(
    ("algorithm", "graph", "channel", "reason"),
    [
        (hf.ECL(lr=0.1), RING, GRID, "Grid sends every neighbour the same, and ECL something"),
        (hf.GECL(lr=0.1, alpha=0.1), RING, GRID, "Grid cannot give the plain sum over neighbours"),
        (hf.DSpodFL(lr=0.1), RING.sporadic(1.0, 0.5), GRID, "Grid needs links that are the same in every"),
    ],
)
def test_what_a_channel_does_not_serve_is_refused(algorithm, graph, channel, reason, quadratics):
    with pytest.raises(HoldfastError, match=f"^channel {reason}"):
        Simulation(algorithm, quadratics, graph, channel=channel)


class Neighbourly(Grid):
    serves = frozenset({"graph"})


class Central(Grid):
    serves = frozenset({"server"})


def test_networks_and_cohorts_that_a_channel_does_not_serve(quadratics):
    scaffold = hf.SCAFFOLD(lr=0.1)
    with pytest.raises(HoldfastError, match=r"^channel Neighbourly is not made for a server: use a graph"):
        Simulation(scaffold, quadratics, STAR, channel=Neighbourly())
    with pytest.raises(HoldfastError, match=r"^channel Central needs every client in every round"):
        Simulation(scaffold, quadratics, STAR, cohort=2, channel=Central())
    with pytest.raises(HoldfastError, match=r"^channel Central is not made for messages between neighbours"):
        Simulation(hf.DSGD(lr=0.1), quadratics, RING, channel=Central())


def test_a_channel_is_chosen_by_name(tmp_path):
    functions = far_away(1.0)
    named, made = (
        hf.minimize(functions, [0.0], hf.LocalGECL(lr=0.1), 5, topology="ring", channel=channel)
        for channel in ("half", {"name": "half"})
    )
    assert torch.equal(named.x, made.x)
    assert named.history["payload_bytes"][-1] == 5 * 6 * 2 * 2 * 1
    with pytest.raises(HoldfastError, match="unknown channel 'halves': did you mean 'half'"):
        hf.minimize(functions, [0.0], hf.LocalGECL(lr=0.1), 5, channel="halves")
    with pytest.raises(HoldfastError, match="channel"):
        hf.minimize(functions, [0.0], hf.LocalGECL(lr=0.1), 5, channel=3)


@pytest.mark.parametrize("parent", [hf.Half, hf.Identity])
def test_what_a_channel_declares_is_not_inherited(parent):
    heir = type("Heir", (parent,), {})
    names = ("serves", "transparent", "columnwise")
    assert any(getattr(parent, name) for name in names)
    assert not any(getattr(heir, name) for name in names)
