"""SCALLION, SCAFCOM, A-FedPD and TAMUNA, whose clients end a round with what arrived, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import make_quadratics
from server_runs import assert_same

import holdfast as hf
from holdfast.engines.common.counters import Work
from holdfast.engines.common.fit import check_unanswered
from holdfast.engines.common.oracle import BatchOracle
from holdfast.engines.common.simulation import Simulation
from holdfast.engines.common.trial import ZeroProblem

SERVER = hf.server(10)
EASY = make_quadratics(10, L=2.0)  # of condition 4


def path(problem, method, rounds: int, **options) -> torch.Tensor:
    """[rounds + 1, d]: the server's models."""
    simulation = Simulation(method, problem, SERVER, seed=3, **options)
    models = [simulation.models[0].clone()]
    for _ in range(rounds):
        simulation.step()
        models.append(simulation.models[0].clone())
    return torch.stack(models)


def clients(problem, method, rounds: int, **options):
    simulation = Simulation(method, problem, SERVER, seed=3, **options)
    for _ in range(rounds):
        simulation.step()
    return simulation.state


def falls(problem, method, rounds: int, **options) -> bool:
    """Whether the distance to the optimum falls to a tenth at most, three times in a row."""
    distances = (path(problem, method, 3 * rounds, **options) - problem.optimum).norm(dim=-1)[::rounds]
    return bool((distances[1:] < 0.1 * distances[:-1]).all())


# --- SCALLION and SCAFCOM -------------------------------------------------------------------------------


@pytest.mark.parametrize("cohort", ["all", 4])
@pytest.mark.parametrize("method", [hf.SCALLION, hf.SCAFCOM])
def test_without_compression_and_averages_they_are_scaffold(method, cohort, quadratics):
    whole = {"alpha": 1.0} if method is hf.SCALLION else {"beta": 1.0}
    ours = path(quadratics, method(lr=0.02, local_steps=3, server_lr=0.7, **whole), 40, cohort=cohort)
    assert_same(ours, path(quadratics, hf.SCAFFOLD(lr=0.02, local_steps=3, server_lr=0.7), 40, cohort=cohort))


def top_half(v: np.ndarray) -> np.ndarray:
    return np.where(np.abs(v) >= np.sort(np.abs(v))[len(v) // 2], v, 0)


@pytest.mark.parametrize("method", [hf.SCALLION, hf.SCAFCOM])
def test_with_cohorts_and_top_k_they_are_the_published_recursions(method, quadratics):
    """Client by client, with all that they keep. Increments and server are as in published code of others."""
    lr, steps, server_lr, part = 0.02, 3, 0.7, 0.4
    made = method(lr, steps, server_lr, **{"alpha" if method is hf.SCALLION else "beta": part})
    simulation = Simulation(made, quadratics, SERVER, seed=3, cohort=4, channel=hf.TopK(0.5))
    A, b, x = quadratics.A.numpy(), quadratics.b.numpy(), quadratics.x0.numpy()
    c, c_i, v_i = np.zeros(4), np.zeros((10, 4)), np.zeros((10, 4))
    for round in range(30):
        sent = np.zeros((10, 4))
        for i in simulation.rounds.cohort(round).tolist():
            y = x
            for _ in range(steps):
                y = y - lr * (A[i] @ (y - b[i]) - c_i[i] + c)
            v_i[i] = (1 - part) * v_i[i] + part * ((x - y) / (lr * steps) + c_i[i] - c)
            scallion = part * ((x - y) / (lr * steps) - c)
            sent[i] = top_half(scallion if method is hf.SCALLION else v_i[i] - c_i[i])
        x = x - server_lr * lr * steps * (sent.sum(0) / 4 + c)
        c, c_i = c + sent.sum(0) / 10, c_i + sent
        simulation.step()
        assert np.linalg.norm(simulation.models[0].numpy() - x) <= 1e-10 * np.linalg.norm(x)
    assert np.abs(simulation.state.clients.c.numpy() - c_i).max() < 1e-10


@pytest.mark.parametrize("method", [hf.SCALLION(0.05, 3, alpha=0.5), hf.SCAFCOM(0.05, 3, beta=0.5)])
def test_both_sides_hold_the_same_control_variates(method, quadratics):
    state = clients(quadratics, method, 20, cohort=4, channel=hf.TopK(0.25))
    assert (state.server.c - state.clients.c.mean(0)).norm() < 1e-12


@pytest.mark.parametrize(
    ("method", "channel"),
    [
        (hf.SCALLION(0.1, 3, server_lr=0.5, alpha=0.5), hf.Uniform(4, dithered=True, block=4)),
        (hf.SCAFCOM(0.1, 3, server_lr=0.5, beta=0.8), hf.TopK(0.5)),
        (hf.SCAFCOM(0.1, 3, server_lr=0.5, beta=0.8), hf.Uniform(1, block=4)),
    ],
    ids=["scallion", "top-k", "signs"],
)
def test_compressed_they_converge_linearly(method, channel):
    assert falls(EASY, method, 25, channel=channel, cohort=5)


def test_the_increments_are_not_fed_back_twice(quadratics):
    """Feedback would send again what the next increment holds already: the method turns it off."""
    with_feedback, without = (
        path(quadratics, hf.SCAFCOM(0.02, 3), 30, channel=hf.TopK(0.5, feedback=feedback))
        for feedback in (True, False)
    )
    assert torch.equal(with_feedback, without)


# --- A-FedPD --------------------------------------------------------------------------------------------


def test_a_fedpd_with_everybody_is_fedpd(quadratics):
    ours = path(quadratics, hf.AFedPD(eta=0.5, solver="exact"), 40)
    fedpd = path(quadratics, hf.FedPD(eta=0.5, solver="exact"), 40)
    assert_same(ours, fedpd)


def test_a_fedpd_is_the_method_that_keeps_a_dual_for_every_client(quadratics):
    """Absent ones included, as published code of others has it; rho = 1/eta."""
    rho, rounds = 2.0, 30
    simulation = Simulation(hf.AFedPD(eta=1 / rho, solver="exact"), quadratics, SERVER, seed=3, cohort=4)
    x, dual = quadratics.x0, torch.zeros(10, 4, dtype=torch.float64)
    eye = torch.eye(4, dtype=torch.float64)
    for round in range(rounds):
        cohort = simulation.rounds.cohort(round)
        A, b = quadratics.A[cohort], quadratics.b[cohort]
        found = torch.linalg.solve(A + rho * eye, (A @ b[..., None])[..., 0] - dual[cohort] + rho * x)
        mean = found.mean(0)
        moved = (mean - x).expand(10, -1).clone()
        moved[cohort] = found - x
        dual = dual + rho * moved
        x = mean + dual.mean(0) / rho
        simulation.step()
        assert (simulation.models[0] - x).norm() <= 1e-10 * x.norm()
    ours = simulation.state.clients.excess + simulation.state.server.dual
    assert (ours - dual).norm() <= 1e-10 * dual.norm()


def test_a_fedpd_converges_linearly_with_cohorts():
    assert falls(EASY, hf.AFedPD(eta=0.5, solver="exact"), 60, cohort=5)


# --- TAMUNA ---------------------------------------------------------------------------------------------


def test_tamuna_with_everybody_and_all_entries_is_scaffnew(quadratics):
    ours = path(quadratics, hf.TAMUNA(lr=0.1, p=0.4, chi=1.0), 40)
    assert_same(ours, path(quadratics, hf.Scaffnew(lr=0.1, p=0.4), 40))


@pytest.mark.parametrize(
    ("clients", "copies", "d"), [(10, 3, 7), (10, 10, 4), (6, 4, 3), (5, 2, 11), (3, 9, 4)]
)
def test_every_entry_is_sent_by_so_many(clients, copies, d):
    oracle = BatchOracle(ZeroProblem(12, d), torch.arange(12), 7, 5, Work())
    oracle.nodes = oracle.cohort = torch.arange(clients)
    x = torch.zeros(clients, d, dtype=torch.float64)
    parts, sent_by = oracle.parts(x, copies), min(copies, clients)
    sends = parts > 0
    assert (sends.sum(0) == sent_by).all()
    assert sends.sum(1).max() - sends.sum(1).min() <= 1
    assert (parts.mean(0) - 1).abs().max() < 1e-12
    alone = BatchOracle(ZeroProblem(12, d), torch.tensor([2]), 7, 5, Work(), cohort=oracle.cohort)
    assert torch.equal(alone.parts(x[:1], copies)[0], parts[2])


def template(clients: int, copies: int, d: int) -> np.ndarray:
    """[clients, d]: who sends what, before clients are shuffled; for d >= clients/copies."""
    q = np.zeros((clients, d))
    for turn in range(copies * d):
        q[turn % clients, turn // copies] = 1
    return q


@pytest.mark.parametrize("cohort", ["all", 5])
def test_tamuna_is_the_method_of_its_authors_code(cohort, quadratics):
    """With everybody it is CompressedScaffnew. A client's h moves at the end of the round it took part in."""
    lr, p, s, eta = 0.1, 0.4, 3, 0.24
    method = hf.TAMUNA(lr, p, copies=s, chi=eta / p)
    simulation = Simulation(method, quadratics, SERVER, seed=3, cohort=cohort)
    A, b, x, h = quadratics.A.numpy(), quadratics.b.numpy(), quadratics.x0.numpy(), np.zeros((10, 4))
    for round in range(30):
        chosen = torch.arange(10) if cohort == "all" else simulation.rounds.cohort(round)
        oracle = BatchOracle(quadratics, chosen, 3, round, Work(), cohort=chosen)
        q = (oracle.parts(torch.zeros(len(chosen), 4), s) > 0).double().numpy()
        assert sorted(q.tolist()) == sorted(template(len(chosen), s, 4).tolist())
        steps = 1
        while not oracle.coin(p):
            steps += 1
        sent = np.zeros_like(q)
        for place, i in enumerate(chosen.tolist()):
            y = x
            for _ in range(steps):
                y = y - lr * (A[i] @ (y - b[i]) - h[i])
            sent[place] = q[place] * y
        x = sent.sum(0) / s
        for place, i in enumerate(chosen.tolist()):
            h[i] += eta / lr * (q[place] * x - sent[place])
        simulation.step()
        assert np.linalg.norm(simulation.models[0].numpy() - x) <= 1e-10 * np.linalg.norm(x)
    assert np.abs(simulation.state.clients.h.numpy() - h).max() < 1e-10
    assert np.abs(h.sum(0)).max() < 1e-10


@pytest.mark.parametrize(("cohort", "copies", "rounds"), [("all", 3, 45), (5, None, 30), (5, 3, 45)])
def test_tamuna_converges_linearly(cohort, copies, rounds):
    assert falls(EASY, hf.TAMUNA(lr=0.5, p=0.8, copies=copies, chi=0.6), rounds, cohort=cohort)


def test_top_k_sends_what_tamuna_asks_for(quadratics):
    """The entries that a client sends are the only ones that are not zero: none is lost."""
    method = hf.TAMUNA(lr=0.1, p=0.4, copies=2)
    plain, sparse = (
        Simulation(method, quadratics, SERVER, seed=3, channel=channel)
        for channel in (hf.Identity(), hf.TopK(0.25, feedback=False))
    )
    for _ in range(20):
        plain.step()
        sparse.step()
    assert torch.equal(plain.models, sparse.models)
    assert sparse.payload_bytes < plain.payload_bytes


# --- where they run -------------------------------------------------------------------------------------


def test_a_federation_says_that_it_does_not_answer():
    check_unanswered(hf.SCAFCOM(lr=0.1), "a deployed federation")
    with pytest.raises(hf.HoldfastError, match=r"TAMUNA: its server answers .* a deployed federation"):
        check_unanswered(hf.TAMUNA(lr=0.1, p=0.5), "a deployed federation")
