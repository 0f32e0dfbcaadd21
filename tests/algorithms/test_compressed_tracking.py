"""FlexGT written out, BEER and MoTEF against their authors' code, in float64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from conftest import make_quadratics
from server_runs import assert_same

import holdfast as hf
from holdfast.contract import Draw
from holdfast.engines.common.channel_run import split_channel_state
from holdfast.engines.common.simulation import Simulation

RING = hf.Network.of(hf.ring(10))
W = torch.tensor(RING.dense())
TOP = hf.TopK(0.5, gamma=0.4)  # two of four entries


def simulate(problem, method, rounds: int, **options) -> Simulation:
    simulation = Simulation(method, problem, RING, seed=3, **options)
    for _ in range(rounds):
        simulation.step()
    return simulation


def falls(problem, method, rounds: int, **options) -> bool:
    """Whether the distance to the optimum falls linearly: to a tenth at most, three times in a row."""
    simulation, distances = Simulation(method, problem, RING, seed=3, **options), []
    for _ in range(4):
        distances.append(float((simulation.models - problem.optimum).norm()))
        for _ in range(rounds):
            simulation.step()
    return all(after < 0.1 * before for before, after in pairwise(distances))


# --- FlexGT ---------------------------------------------------------------------------------------------


def test_flexgt_with_one_step_and_one_exchange_is_gradient_tracking(quadratics):
    ours = quadratics.run(hf.FlexGT(lr=0.03), 40, RING)
    assert_same(ours, quadratics.run(hf.GTSGD(lr=0.03, order="atc"), 40, RING))


def test_flexgt_is_the_method_on_its_page(quadratics):
    """d1 = 3 steps along the tracker, the last of which ends in d2 = 2 exchanges of model and tracker."""
    lr, mixing = 0.02, W @ W
    x = quadratics.x0.expand(10, -1)
    g = y = quadratics.grads(x)
    path = [x]
    for step in range(3 * 20):
        mix = mixing if step % 3 == 2 else torch.eye(10, dtype=torch.float64)
        x = mix @ (x - lr * y)
        y, g = mix @ (y + quadratics.grads(x) - g), quadratics.grads(x)
        path += [x] if step % 3 == 2 else []
    ours = quadratics.run(hf.FlexGT(lr=lr, local_steps=3, exchanges=2), 20, RING)
    assert_same(ours, torch.stack(path))


def test_flexgt_converges_linearly_to_the_optimum(quadratics):
    assert falls(quadratics, hf.FlexGT(lr=0.02, local_steps=4, exchanges=2), 60)
    state = simulate(quadratics, hf.FlexGT(lr=0.02, local_steps=4), 9).state
    assert (state.y.mean(0) - state.g.mean(0)).norm() < 1e-12


# --- BEER and MoTEF -------------------------------------------------------------------------------------


def written_out(problem, lr: float, share: float, gamma: float, compress, rounds: int) -> torch.Tensor:
    """As in the code of both papers, with rows for its columns; BEER is share = 1. Starts with H = G = 0."""
    mixing = W - torch.eye(10, dtype=torch.float64)
    x = problem.x0.expand(10, -1)
    h = g = torch.zeros_like(x)
    v = m = problem.grads(x)
    path = [x]
    for _ in range(rounds):
        x = x + gamma * mixing @ h - lr * v
        h = h + compress(x - h)
        last, m = m, (1 - share) * m + share * problem.grads(x)
        v = v + gamma * mixing @ g + m - last
        g = g + compress(v - g)
        path.append(x)
    return torch.stack(path)


def top_half(x: torch.Tensor) -> torch.Tensor:
    codec = hf.TopK(0.5)
    return codec.decode(codec.encode(x, (), Draw(0, 0, 0, torch.arange(10))), x)


def path(problem, method, rounds: int, **options) -> torch.Tensor:
    simulation = Simulation(method, problem, RING, seed=3, **options)
    models = [simulation.models.clone()]
    for _ in range(rounds):
        simulation.step()
        models.append(simulation.models.clone())
    return torch.stack(models)


@pytest.mark.parametrize(("method", "share"), [(hf.BEER(lr=0.02), 1.0), (hf.MoTEF(lr=0.02, share=0.3), 0.3)])
def test_with_a_channel_they_are_the_methods_of_their_authors_code(method, share, quadratics):
    ours = path(quadratics, method, 60, channel=TOP)
    assert_same(ours, written_out(quadratics, 0.02, share, 0.4, top_half, 60))


def test_motef_without_an_average_is_beer(quadratics):
    ours = path(quadratics, hf.MoTEF(lr=0.02, share=1.0), 40, channel=TOP)
    assert_same(ours, path(quadratics, hf.BEER(lr=0.02), 40, channel=TOP))


def test_beer_is_gradient_tracking_but_for_the_start(quadratics):
    """Without compression. Copies begin at zero in the authors' code, so the first tracker is not mixed."""
    ours = path(quadratics, hf.BEER(lr=0.02), 40)
    x = quadratics.x0.expand(10, -1)
    g = y = quadratics.grads(x)
    tracked = [x]
    for round in range(40):
        x = W @ x - 0.02 * y
        y, g = (y if round == 0 else W @ y) + quadratics.grads(x) - g, quadratics.grads(x)
        tracked.append(x)
    assert_same(ours, torch.stack(tracked))


@pytest.mark.parametrize("method", [hf.BEER(lr=0.05), hf.MoTEF(lr=0.05, share=0.5)])
def test_they_converge_linearly_with_compressed_messages(method):
    quadratics = make_quadratics(10, L=2.0)
    assert falls(quadratics, method, 150, channel=TOP)
    state, _ = split_channel_state(simulate(quadratics, method, 30, channel=TOP).state)
    assert (state.v.mean(0) - state.m.mean(0)).norm() < 1e-12
