"""DSpodFL: its special cases, who takes part, the delays, and where it ends with and without correction."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import Quadratics, make_quadratics
from torch import Tensor

import holdfast as hf
from holdfast.algorithms.dspodfl import DSpodFL
from holdfast.data import DATASETS
from holdfast.engines.common.simulation import Simulation
from holdfast.experiments.metrics import delays
from holdfast.experiments.record_files import DELAY_COLUMNS
from holdfast.models import MODELS
from holdfast.problem.flat import FlatModel
from holdfast.problem.losses import CrossEntropy
from holdfast.problem.model_problem import ModelProblem
from holdfast.topology import Network, UniformChance, expected_p

NEVER = 1e-12  # as good as zero in the rounds of a test
RING = Network.of(hf.ring(10))
UNEQUAL = np.linspace(0.1, 1.0, 10)


@pytest.fixture(scope="module", params=[torch.float32, torch.float64], ids=str)
def digits(request) -> ModelProblem:
    """Minibatches of digits on ten heterogeneous nodes."""
    data = DATASETS.build("digits", {})
    split = hf.partition(data.x_train, data.y_train, hf.Dirichlet(0.5), nodes=10, seed=0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MODELS.build("linear", {}, input_shape=data.input_shape, outputs=10)
    return ModelProblem(
        FlatModel(model, torch.device("cpu"), request.param), CrossEntropy(), split, batch_size=8, seed=1
    )


def simulate(algorithm, objective, network: Network, rounds: int, seed: int = 3) -> Simulation:
    simulation = Simulation(algorithm, objective, network, seed=seed)
    for _ in range(rounds):
        simulation.step()
    return simulation


# --- the family ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "network"),
    [
        (DSpodFL(lr=0.02), RING),
        (DSpodFL(lr=0.02), RING.sporadic(1.0, 1.0)),
        (DSpodFL(lr=0.02, bias_correction=True), RING.sporadic(1.0, 1.0)),
        (DSpodFL(lr=0.02, sporadic_gradients=False, sporadic_links=False), RING.sporadic(UNEQUAL, 0.3)),
    ],
    ids=["always able", "probabilities 1", "corrected, probabilities 1", "both switches off"],
)
def test_dgd_is_the_special_case_without_sporadicity(digits, algorithm, network):
    sporadic, plain = simulate(algorithm, digits, network, 20), simulate(hf.DSGD(lr=0.02), digits, RING, 20)
    assert torch.equal(sporadic.models, plain.models)
    assert sporadic.payload_bytes == plain.payload_bytes
    assert sporadic.work.sample_gradients == plain.work.sample_gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_correction_keeps_the_type_of_the_model(dtype):
    functions = [lambda x: x.square().sum(), lambda x: (x - 1).square().sum()]
    network = Network.of(hf.ring(2)).sporadic(0.5)
    path = hf.minimize(
        functions, [3.0], DSpodFL(lr=0.1, bias_correction=True), 5, topology=network, dtype=dtype
    )
    assert path.x.dtype == dtype


def test_bad_input(quadratics):
    with pytest.raises(hf.HoldfastError, match="DSpodFL works along links: use a graph"):
        Simulation(DSpodFL(lr=0.1), quadratics, hf.server(10))
    with pytest.raises(hf.HoldfastError, match=r"DSpodFL.bias_correction: there is no bias where every node"):
        DSpodFL(lr=0.1, sporadic_gradients=False, bias_correction=True)


# --- who takes part -----------------------------------------------------------------------------------------


def test_only_able_nodes_compute_and_only_they_are_counted(digits):
    """Without links a row moves if and only if its node has computed."""
    simulation = Simulation(DSpodFL(lr=0.1), digits, RING.sporadic(UNEQUAL, NEVER), seed=3)
    moved = torch.zeros(10)
    for _ in range(60):
        before, counted = simulation.models, simulation.work.gradient_evaluations
        simulation.step()
        rows = (simulation.models != before).any(-1)
        assert int(rows.sum()) == simulation.work.gradient_evaluations - counted
        moved += rows
    assert simulation.work.sample_gradients == 8 * simulation.work.gradient_evaluations
    assert simulation.traffic.numbers == 0
    deviation = 4 * np.sqrt(60 * UNEQUAL * (1 - UNEQUAL))
    assert (np.abs(moved.numpy() - 60 * UNEQUAL) <= deviation).all()


def test_a_node_sees_the_same_minibatch_whoever_else_computes(digits):
    some = simulate(DSpodFL(lr=0.1), digits, RING.sporadic(0.5, NEVER), 1)
    everybody = simulate(DSpodFL(lr=0.1, sporadic_gradients=False), digits, RING.sporadic(0.5, NEVER), 1)
    computed = (some.models != digits.x0).any(-1)
    assert 0 < computed.sum() < 10
    error = (some.models - everybody.models)[computed].abs().max()
    assert error <= 8 * torch.finfo(digits.x0.dtype).eps  # another number of rows may take another kernel


def test_correction_divides_by_the_probability(digits):
    network = RING.sporadic(UNEQUAL, NEVER)
    plain = simulate(DSpodFL(lr=0.1), digits, network, 1).models - digits.x0
    corrected = simulate(DSpodFL(lr=0.1, bias_correction=True), digits, network, 1).models - digits.x0
    assert plain.abs().max() > 0
    scale = torch.tensor(1 / UNEQUAL).to(plain)[:, None]
    assert (corrected - scale * plain).abs().max() <= 100 * torch.finfo(plain.dtype).eps


def test_messages_travel_over_available_links_only(quadratics):
    network = RING.sporadic(NEVER, UniformChance(), seed=2)
    simulation = Simulation(DSpodFL(lr=0.01), quadratics, network, seed=3)
    x = torch.randn(10, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    simulation.state = simulation.state._replace(x=x)
    W, counts = RING.dense(), set()
    for round in range(40):
        before, sent = simulation.models, simulation.traffic.numbers
        simulation.step()
        up = network.available_links(3, round, 1)
        assert simulation.traffic.numbers - sent == 2 * up.sum() * quadratics.dim
        mixed = before.clone()
        for i, j in network.links()[up]:
            mixed[i] += W[i, j] * (before[j] - before[i])
            mixed[j] += W[i, j] * (before[i] - before[j])
        assert torch.allclose(simulation.models, mixed, rtol=0, atol=1e-14)
        counts.add(int(up.sum()))
    assert len(counts) > 2
    assert torch.allclose(simulation.models.mean(0), x.mean(0), rtol=0, atol=1e-14)


def test_resuming_changes_nothing(quadratics):
    def graphs(epoch: int):
        return hf.erdos_renyi(10, p=0.4, seed=epoch)

    chance = UniformChance(0.2, 0.8)
    network = Network.varying(graphs, every=4).sporadic(chance, chance, seed=1, redraw_every=3)
    algorithm = DSpodFL(lr=0.01, bias_correction=True)
    whole = simulate(algorithm, quadratics, network, 13)
    half = simulate(algorithm, quadratics, network, 6)
    resumed = Simulation(algorithm, quadratics, network, seed=3)
    resumed.restore(*half.snapshot())
    for _ in range(7):
        resumed.step()
    assert torch.equal(resumed.models, whole.models)
    assert (resumed.traffic, resumed.work) == (whole.traffic, whole.work)
    assert delays(resumed) == delays(whole)


def test_a_varying_graph_mixes_with_the_weights_of_each_round(quadratics):
    network = Network.varying(lambda epoch: hf.erdos_renyi(10, p=0.3, seed=epoch))
    X = quadratics.run(hf.DSGD(lr=0.01), 6, network)
    sent = simulate(hf.DSGD(lr=0.01), quadratics, network, 6).traffic.numbers
    for round in range(6):
        W = torch.tensor(network.at(round).dense())
        assert torch.allclose(
            X[round + 1], W @ X[round] - 0.01 * quadratics.grads(X[round]), rtol=0, atol=1e-13
        )
    assert sent == sum(network.at(round).directed_links for round in range(6)) * quadratics.dim


# --- delays -------------------------------------------------------------------------------------------------


def test_every_round_of_dgd_takes_one_unit_of_each_delay(quadratics):
    network = Network.of(hf.star(10)).sporadic(UNEQUAL, UniformChance(), seed=1)
    dgd = DSpodFL(lr=0.01, sporadic_gradients=False, sporadic_links=False)
    for algorithm in (dgd, hf.DSGD(lr=0.01)):
        took = delays(simulate(algorithm, quadratics, network, 7))
        d, b = network.probabilities(0)
        raw = 7 * ((1 / d).mean() + (1 / b).mean())  # hub and leaves together see the mean over the links
        expected = {"tau_proc": 7, "tau_trans": 7, "tau_total": 14, "tau_raw": raw}
        assert took == pytest.approx(expected, rel=1e-14)


def test_delays_grow_with_gradients_and_vectors(quadratics):
    took = delays(simulate(hf.LocalGECL(lr=0.001, local_steps=3), quadratics, RING.sporadic(0.5), 4))
    assert took == pytest.approx({"tau_proc": 12, "tau_trans": 8, "tau_total": 20, "tau_raw": 32}, rel=1e-14)


def test_nothing_happens_without_activity(quadratics):
    simulation = simulate(DSpodFL(lr=0.01), quadratics, RING.sporadic(NEVER, NEVER), 5)
    assert delays(simulation) == dict.fromkeys(DELAY_COLUMNS, 0)
    assert simulation.traffic.numbers == simulation.work.gradient_evaluations == 0
    assert torch.equal(simulation.models, quadratics.x0.expand(10, -1))


def test_delays_by_hand():
    """d = 1, 1/2, 1/4, 1/10 take 1, 2, 4, 10 of 17; a line with b = 1/2, 1/4, 1 takes 3, 4, 1.5 of 8.5.

    The latter are 2 + 2/2, 4/2 + 4/2 and 1/2 + 1: each of a link's ends counts 1/b_ij over its own degree.
    """
    problem, line = make_quadratics(nodes=4), Network.of(hf.line(4))
    alone = Simulation(DSpodFL(lr=0.1), problem, line.sporadic([1, 1 / 2, 1 / 4, 1 / 10], NEVER))
    idle = line.sporadic(NEVER, [1 / 2, 1 / 4, 1])
    talking = Simulation(DSpodFL(lr=0.1), problem, idle, seed=5)
    for round in range(30):
        before = alone.models, delays(alone), delays(talking)
        alone.step()
        talking.step()
        computed = (alone.models != before[0]).any(-1).double()
        took = float(computed @ torch.tensor([1.0, 2, 4, 10], dtype=torch.float64)) / 17
        assert delays(alone)["tau_proc"] - before[1]["tau_proc"] == pytest.approx(took, abs=1e-13)
        assert delays(alone)["tau_raw"] == pytest.approx(delays(alone)["tau_proc"] * 17 / 4, rel=1e-13)
        took = idle.available_links(5, round, 1) @ np.array([3, 4, 1.5]) / 8.5
        assert delays(talking)["tau_trans"] - before[2]["tau_trans"] == pytest.approx(took, abs=1e-13)
        assert delays(talking)["tau_raw"] == pytest.approx(delays(talking)["tau_trans"] * 8.5 / 4, rel=1e-13)
    assert delays(alone)["tau_trans"] == delays(talking)["tau_proc"] == 0


def test_vectors_of_links_take_the_same_raw_time():
    problem = make_quadratics(nodes=4)
    network = Network.of(hf.line(4)).sporadic(1.0, [1 / 2, 1 / 4, 1])
    assert simulate(hf.PDMM(gamma=1.0), problem, network, 3).traffic.raw_delay == pytest.approx(3 * 8.5 / 4)


def test_expected_delays_are_harmonic_means(quadratics):
    """E tau_proc = n / sum_i 1/d_i, E tau_trans = n / sum_i mean_j 1/b_ij, whatever the degrees."""
    rounds = 800
    network = Network.of(hf.random_geometric(10, radius=0.45, seed=3))
    network = network.sporadic(UNEQUAL, UniformChance(0.05, 0.9), seed=5)
    took = delays(simulate(DSpodFL(lr=1e-9), quadratics, network, rounds))
    d, b = network.probabilities(0)

    weights = np.zeros(len(b))  # every link's share of both its ends' means
    for node in range(10):
        mine = (network.links() == node).any(1)
        weights[mine] += 1 / mine.sum()
    for name, chance, share in (("tau_proc", d, np.ones(10)), ("tau_trans", b, weights)):
        whole = (share / chance).sum()
        expected = 10 / whole
        deviation = np.sqrt((share**2 * (1 - chance) / chance).sum() / rounds) / whole
        assert abs(took[name] / rounds - expected) < 4 * deviation
        assert deviation < 0.05 * expected
    assert took["tau_total"] == took["tau_proc"] + took["tau_trans"]


def test_delays_are_measured_only_where_there_are_any(quadratics):
    functions = quadratics.functions
    plain = hf.minimize(functions, quadratics.x0, DSpodFL(lr=0.01), 3, topology=RING)
    assert not set(DELAY_COLUMNS) & set(plain.history.rows[0])
    sporadic = hf.minimize(functions, quadratics.x0, DSpodFL(lr=0.01), 3, topology=RING.sporadic(0.5, 0.5))
    assert sporadic.history["tau_total"][0] == 0
    assert sporadic.history["tau_total"] == sorted(sporadic.history["tau_total"])


# --- where it ends ------------------------------------------------------------------------------------------


def weighted_optimum(problem: Quadratics, weights: np.ndarray) -> Tensor:
    """argmin sum_i weights_i f_i"""
    A = torch.tensor(weights)[:, None, None] * problem.A
    return torch.linalg.solve(A.sum(0), (A @ problem.b[..., None]).sum(0)).squeeze(-1)


def mean_limit(problem: Quadratics, network: Network, rates: np.ndarray, lr: float) -> Tensor:
    """Where the expected models stand still, (I - E[P]) X = -lr diag(rates) G(X): [n, d].

    On quadratics a round is affine, and who takes part does not depend on the models, so expectations obey
    X <- E[P] X - lr diag(rates) G(X) exactly; rates are d_i, or 1 with correction.
    """
    n, d = problem.b.shape
    eye, scale = torch.eye(d, dtype=torch.float64), torch.tensor(rates)
    mixing = torch.kron(torch.tensor(expected_p(network)), eye)
    curvature = torch.block_diag(*(scale[:, None, None] * problem.A))
    target = torch.cat([s * A @ b for s, A, b in zip(scale, problem.A, problem.b, strict=True)])
    fixed = torch.linalg.solve(torch.eye(n * d, dtype=torch.float64) - mixing + lr * curvature, lr * target)
    return fixed.reshape(n, d)


def test_the_expected_limit_tends_to_the_optimum_of_the_weighted_sum(quadratics):
    """O(lr) from argmin sum_i d_i f_i without correction, O(lr) from the true optimum with it."""
    network = RING.sporadic(UNEQUAL, 0.5)
    biased, star = weighted_optimum(quadratics, UNEQUAL), quadratics.optimum
    assert (biased - star).norm() > 0.6
    for rates, goal in ((UNEQUAL, biased), (np.ones(10), star), (np.full(10, 0.4), star)):
        gaps = [
            float((mean_limit(quadratics, network, rates, lr).mean(0) - goal).norm()) for lr in (1e-3, 1e-4)
        ]
        assert gaps[0] < 0.02
        assert 8 < gaps[0] / gaps[1] < 12  # linear in lr


def time_average(algorithm, problem: Quadratics, network: Network, rounds: int, skip: int) -> Tensor:
    simulation = simulate(algorithm, problem, network, skip)
    total = torch.zeros(problem.dim, dtype=torch.float64)
    for _ in range(rounds):
        simulation.step()
        total += simulation.models.mean(0)
    return total / rounds


@pytest.mark.slow
@pytest.mark.parametrize("correct", [False, True], ids=["as published", "corrected"])
def test_runs_settle_around_the_expected_limit(quadratics, correct):
    network = RING.sporadic(UNEQUAL, 0.5)
    average = time_average(DSpodFL(lr=0.01, bias_correction=correct), quadratics, network, 900, skip=500)
    limits = {
        corrected: mean_limit(quadratics, network, np.ones(10) if corrected else UNEQUAL, 0.01).mean(0)
        for corrected in (False, True)
    }
    assert (limits[False] - limits[True]).norm() > 0.6
    assert (average - limits[correct]).norm() < 0.06
