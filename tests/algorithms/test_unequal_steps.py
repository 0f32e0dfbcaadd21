"""Nodes that take different numbers of local steps: corrected methods still end at the optimum."""

from __future__ import annotations

import pytest
import torch
from conftest import make_quadratics
from linear_rounds import limit
from test_convergence import local_map

import holdfast as hf
from holdfast.algorithms import ALGORITHMS
from holdfast.contract import OPTIMIZERS
from holdfast.core.tree import tree_map
from holdfast.core.validation import parameters
from holdfast.engines.common.simulation import Simulation
from holdfast.experiments.sweep import expand

K = (1, 2, 5, 20)
RING = hf.ring(4)
MOMENTUM = hf.Momentum(0.5)

EXACT = [
    (hf.SCAFFOLD(lr=0.02, local_steps=K), None),
    (hf.SCAFFOLD(lr=0.02, local_steps=K, option=1), None),
    (hf.SCAFFOLD(lr=0.02, local_steps=K, optimizer=MOMENTUM), None),
    (hf.LocalGECLServer(lr=0.02, local_steps=K), None),
    (hf.VRLSGD(lr=0.02, local_steps=K), None),
    (hf.FedLin(lr=0.02, local_steps=K), None),
    (hf.FedPD(eta=0.5, lr=0.1, local_steps=K), None),
    (hf.FedDyn(alpha=1.0, lr=0.1, local_steps=K), None),
    (hf.LocalGECL(lr=0.02, local_steps=K), RING),
    (hf.LocalGECL(lr=0.02, local_steps=K, first_grad_at="mixed"), RING),
    (hf.KGT(lr=0.02, local_steps=K), RING),
    (hf.KGT(lr=0.02, local_steps=K, optimizer=MOMENTUM), RING),
    (hf.DSCAFFOLD(lr=0.02, local_steps=K), RING),
    (hf.LED(lr=0.02, local_steps=K), RING),
    (hf.LED(lr=0.02, local_steps=K, optimizer=MOMENTUM), RING),
]
BIASED = {"fedavg", "fedprox", "gossip"}  # they stall with equal steps, too


@pytest.fixture(scope="module")
def four():
    return make_quadratics(4, dim=2, L=2.0)


@pytest.mark.parametrize(("algorithm", "topology"), EXACT, ids=str)
def test_corrected_methods_end_at_the_optimum(four, algorithm, topology):
    assert (limit(four, algorithm, topology) - four.optimum).abs().max() < 1e-10


def test_every_method_that_declares_it_is_tested():
    declared = {name for name in ALGORITHMS if ALGORITHMS[name].declared.unequal_steps is True}
    tested = {name for name in declared if any(type(m) is ALGORITHMS[name] for m, _ in EXACT)}
    assert declared - tested == BIASED, (
        "of the methods that declare unequal_steps, add those that stay exact to EXACT, others to BIASED"
    )


@pytest.mark.parametrize(
    "name", sorted(n for n in ALGORITHMS if ALGORITHMS[n].declared.unequal_steps is not True)
)
def test_the_others_refuse_with_a_reason(name):
    if "local_steps" not in parameters(ALGORITHMS[name]):
        return
    needed = {"lr": 0.1, "eta": 0.5, "head": 1, "local": 1, "alpha": 0.5}
    given = {key: value for key, value in needed.items() if key in parameters(ALGORITHMS[name])}
    with pytest.raises(hf.HoldfastError, match="local_steps: one number for all nodes, as "):
        ALGORITHMS[name](**given, local_steps=[1, 2])


@pytest.mark.parametrize(
    ("cls", "options", "reason"),
    [
        (hf.LocalGECL, {"lr": 0.1, "alpha": 0.1}, "alpha"),
        (hf.FedProx, {"lr": 0.1, "reduced": True}, "SARAH"),
        (hf.FedDyn, {"alpha": 1.0, "solver": "exact"}, "sgd"),
        (hf.FedPD, {"eta": 1.0, "solver": "vr"}, "sgd"),
        (hf.FedPD, {"eta": 1.0, "lr": 0.1, "decreasing": True}, "one size"),
    ],
)
def test_so_do_variants_that_cannot(cls, options, reason):
    with pytest.raises(hf.HoldfastError, match=reason):
        cls(**options, local_steps=[1, 2])


def stalling_point(problem, lr: float, weights) -> torch.Tensor:
    """Where sum_i weights_i (x_i - x) = 0, x_i being where K_i steps from x end."""
    maps = [local_map(A, b, lr, k) for A, b, k in zip(problem.A, problem.b, K, strict=True)]
    eye = torch.eye(problem.dim, dtype=torch.float64)
    left = sum(w * (eye - M) for w, (M, _) in zip(weights, maps, strict=True))
    return torch.linalg.solve(left, sum(w * c for w, (_, c) in zip(weights, maps, strict=True)))


def weighted_optimum(problem, weights) -> torch.Tensor:
    left = sum(w * A for w, A in zip(weights, problem.A, strict=True))
    right = sum(w * A @ b for w, A, b in zip(weights, problem.A, problem.b, strict=True))
    return torch.linalg.solve(left, right)


def test_fedavg_stalls_at_the_optimum_weighted_by_steps(four):
    models = limit(four, hf.FedAvg(lr=0.05, local_steps=K))
    assert (models - stalling_point(four, 0.05, (1, 1, 1, 1))).abs().max() < 1e-11
    small = stalling_point(four, 1e-6, (1, 1, 1, 1))
    assert (small - weighted_optimum(four, K)).norm() < 1e-4  # the steps are the weights
    assert (weighted_optimum(four, K) - four.optimum).norm() > 0.3


def test_normalized_it_has_only_the_drift_left(four):
    """FedNova: what is left of the bias falls with the step size."""
    inverse = [1 / k for k in K]
    for lr in (0.05, 0.005):
        models = limit(four, hf.FedAvg(lr=lr, local_steps=K, normalize=True))
        assert (models - stalling_point(four, lr, inverse)).abs().max() < 1e-11
    bias = [(stalling_point(four, lr, inverse) - four.optimum).norm() for lr in (1e-3, 1e-4)]
    assert 9 < bias[0] / bias[1] < 11


def test_gossip_stalls_and_sums_of_duals_stay_zero(four):
    assert (limit(four, hf.Gossip(lr=0.02, local_steps=K), RING) - four.optimum).norm() > 0.1
    for method in (hf.LED(lr=0.02, local_steps=K), hf.LocalGECL(lr=0.02, local_steps=K)):
        simulation = Simulation(method, four, hf.Network.of(RING))
        for _ in range(20):
            simulation.step()
        duals = method.dual(simulation.state)
        assert duals.abs().max() > 0.1
        assert duals.sum(0).abs().max() < 1e-13


def test_a_list_of_equal_numbers_is_that_number(four):
    paths = [four.run(hf.KGT(lr=0.02, local_steps=k), 3, RING) for k in (3, [3, 3, 3, 3])]
    assert torch.equal(*paths)


def test_work_is_what_was_computed(four):
    simulation = Simulation(hf.SCAFFOLD(lr=0.02, local_steps=K), four, hf.server(4), cohort=2)
    for _ in range(6):
        simulation.step()
    asked = [node for r in range(6) for node in simulation.rounds.clients_asked(r)]
    assert simulation.work.gradient_evaluations == sum(K[node] for node in asked)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("keep", [False, True])
def test_every_optimizer_takes_a_node_as_far_as_alone(name, keep):
    optimizer = OPTIMIZERS.build(name, {"keep": keep} if "keep" in parameters(OPTIMIZERS[name]) else {})
    scale = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64)
    start = torch.arange(6.0, dtype=torch.float64).view(3, 2) - 2
    steps = (1, 4, 2)

    def descend(rows, k, memory):
        return optimizer.descend_and_track(start[rows], lambda x: scale[rows] * x, 0.1, k, memory)

    everybody = torch.arange(3)
    memory = optimizer.memory(start)
    for _ in range(2):  # the second time with what was kept
        together = descend(everybody, torch.tensor(steps).double()[:, None], memory)
        for i, k in enumerate(steps):
            row = everybody[i : i + 1]
            alone = descend(row, k, tree_map(lambda t: t[row], memory))  # noqa: B023
            tree_map(lambda a, b: torch.testing.assert_close(a[row], b), together, alone)  # noqa: B023
        memory = together[2]


def test_a_list_has_one_number_for_each_node(four):
    with pytest.raises(hf.HoldfastError, match="one number for each of the 4 nodes, got 3"):
        four.run(hf.SCAFFOLD(lr=0.1, local_steps=[1, 2, 3]), 1)


def test_a_list_in_an_experiment_file_is_a_sweep_unless_it_says_nodes():
    algorithm = {"name": "scaffold", "lr": 0.1, "local_steps": [1, 2]}
    problem = {"dataset": "digits", "partition": "iid", "model": "linear", "nodes": 2}
    raw = {"rounds": 1, "problem": problem, "algorithm": [algorithm]}
    assert [variant.axes for variant in expand(raw)] == [{"algorithm.local_steps": k} for k in (1, 2)]
    raw["algorithm"][0]["local_steps"] = {"nodes": [1, 2]}
    (variant,) = expand(raw)
    assert ALGORITHMS.build("scaffold", variant.experiment.algorithm.parameters).local_steps == (1, 2)
