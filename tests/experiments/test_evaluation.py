"""The loss of a round's own minibatches, and how often everything is measured."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.data.samples import Pair
from holdfast.engines.common.simulation import Simulation, Stepwise
from holdfast.engines.simulate.programs import compiled
from holdfast.engines.simulate.replay import Replaying, Way
from holdfast.experiments.execution import Execution
from holdfast.experiments.metrics import (
    METRICS,
    PASSES_OF_A_GRADIENT,
    SHARE_OF_TRAINING,
    Evaluation,
    choose_metrics,
)
from holdfast.experiments.model_figures import HeldOut
from holdfast.problem.problem import FunctionProblem

NODES, STEPS, BATCH = 4, 3, 5
DATA = hf.FederatedData(
    torch.randn(60, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
    torch.arange(60) % 3,
    np.full(NODES, 15),
)
TEST = (DATA.x[:20], DATA.y[:20])


def problem(**options):
    torch.manual_seed(0)
    given = {"batch_size": BATCH, "dtype": torch.float64, **options}
    return hf.build_problem(nn.Linear(6, 3), DATA, **given)


def loss_of(simulation: Simulation) -> float:
    return Evaluation({"minibatch_loss": METRICS["minibatch_loss"]}).figures(simulation)[0].item()


@pytest.mark.parametrize("backend", ["stacked", "loop"])
@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_minibatch_loss_is_the_mean_over_nodes_and_steps(backend, weights) -> None:
    """By hand, for FedAvg: x_0 = x, x_{k+1} = x_k - lr grad; the mean of the losses at x_0, x_1, x_2."""
    f = problem(backend=backend, weights=weights, l2=0.3)
    simulation = Simulation(hf.FedAvg(lr=0.5, local_steps=STEPS), f, hf.server(NODES))
    nodes, expected = torch.arange(NODES), []
    x = f.x0.expand(NODES, -1).contiguous()
    first = None
    for step in range(STEPS):
        batch = f.source.batch(nodes, 0, step)
        losses = f.backend.values(x, batch, nodes[:, None].expand(-1, 4))
        first = losses.mean() if first is None else first
        expected.append(losses)
        x = x - 0.5 * f.minibatch_values_and_grads([x], nodes, 0, step)[0][1]
    assert loss_of(simulation) == pytest.approx(first.item(), rel=1e-12)  # before the first round
    simulation.step()
    assert loss_of(simulation) == pytest.approx(torch.stack(expected).mean().item(), rel=1e-12)


@pytest.mark.slow
def test_compiled_rounds_note_the_same_loss() -> None:
    found = []
    for executor in (
        None,
        Replaying(lambda *_: [Way("compiled", compiled)], "compiled", lambda *_: Stepwise()),
    ):
        ring = hf.Network.of(hf.ring(NODES))
        method = hf.NETFLEET(lr=0.1, local_steps=STEPS)
        simulation = Simulation(method, problem(), ring, executor=executor)
        how = simulation.prepare(10)
        losses = []
        for _ in range(3):
            simulation.step()
            losses.append(loss_of(simulation))
        found.append(losses)
    assert "compiled" in how
    assert found[1] == pytest.approx(found[0], rel=1e-9)
    assert len(set(found[0])) == 3


def test_sampled_clients_alone_count() -> None:
    f = problem()
    simulation = Simulation(hf.FedAvg(lr=0.1), f, hf.server(NODES), cohort=2)
    chosen = simulation.rounds.cohort(0)
    [(losses, _)] = f.minibatch_values_and_grads([f.x0.expand(2, -1).contiguous()], chosen, 0, 0)
    simulation.step()
    assert loss_of(simulation) == pytest.approx(losses.mean().item(), rel=1e-12)


def test_without_minibatches_there_is_no_loss_and_no_divergence() -> None:
    objective = FunctionProblem([lambda x: (x**2).sum()] * 2, torch.ones(2, dtype=torch.float64))
    simulation = Simulation(hf.FedDyn(alpha=1.0, solver="newton"), objective, hf.server(2))
    simulation.step()
    evaluation = Evaluation({"minibatch_loss": METRICS["minibatch_loss"]})
    figures = evaluation.figures(simulation).tolist()
    assert math.isnan(figures[0])
    assert not evaluation.diverged(figures)


def test_closed_forms_have_the_value_of_the_loss() -> None:
    draw = torch.Generator().manual_seed(1)
    scores, labels = torch.randn(7, 4, generator=draw).double() * 30, torch.arange(7) % 4
    loss = problem().loss
    assert torch.allclose(
        loss.differentiable(scores, labels), loss.values(scores, labels), rtol=1e-12, atol=1e-12
    )


# --- how often ----------------------------------------------------------------------------------------------


def cadence(method, network, *, test: int, metrics="default", **options) -> int:
    f = problem(**options)
    x, y = TEST[0][:1].expand(test, -1), TEST[1][:1].expand(test)
    chosen = choose_metrics(metrics, has_test=True, classes=3)
    return Evaluation(chosen, HeldOut(Pair(x, y))).auto_every(Simulation(method, f, network))


def test_rounds_between_measurements_follow_from_the_samples_read() -> None:
    """A round of K steps on n batches of B: 3 n K B passes. Measuring: n + 1 times the test set, and N."""
    training = PASSES_OF_A_GRADIENT * NODES * STEPS * BATCH
    for test in (1, 100, 1000):
        everything = (NODES + 1) * test + 60
        found = cadence(hf.LocalGECL(lr=0.1, local_steps=STEPS), hf.Network.of(hf.ring(NODES)), test=test)
        assert found == math.ceil(everything / (SHARE_OF_TRAINING * training))
        # The server's model, which all nodes hold, is tested once.
        found = cadence(hf.FedAvg(lr=0.1, local_steps=STEPS), hf.server(NODES), test=test)
        assert found == math.ceil((test + 60) / (SHARE_OF_TRAINING * training))


def test_full_gradients_count_all_samples() -> None:
    method, network = hf.FedAvg(lr=0.1, local_steps=STEPS), hf.server(NODES)
    training = PASSES_OF_A_GRADIENT * STEPS * 60
    found = cadence(method, network, test=500, batch_size="full")
    assert found == math.ceil((500 + 60) / (SHARE_OF_TRAINING * training))


def test_free_metrics_are_measured_in_every_round() -> None:
    assert (
        cadence(hf.FedAvg(lr=0.1), hf.server(NODES), test=10**6, metrics=["minibatch_loss", "consensus"]) == 1
    )


def test_train_measures_seldom_by_default_and_always_first_and_last() -> None:
    torch.manual_seed(0)
    options = {"model": nn.Linear(6, 3), "data": DATA, "rounds": 10, "batch_size": BATCH, "dtype": "float64"}
    method = hf.LocalGECL(lr=0.1, local_steps=STEPS)
    options["topology"] = "ring"
    seldom = hf.train(method, **options, test=TEST)
    every = hf.train(method, **options, test=TEST, evaluate_every=1)
    # (NODES + 1) * 20 + 60 passes against a fifth of 3 * 60
    assert seldom.history["round"] == [0, 5, 10]
    assert every.history["round"] == list(range(11))
    for row in seldom.history.rows:
        same = every.history.rows[int(row["round"])]
        assert {**row, "seconds": 0} == {**same, "seconds": 0}
    assert torch.equal(seldom.models, every.models)
    assert list(row)[1:8] == [*choose_metrics("default", has_test=True, classes=3), "minibatch_loss"]


def test_a_checkpoint_between_measurements_knows_the_time() -> None:
    simulation = Simulation(hf.FedAvg(lr=0.1), problem(), hf.server(NODES))
    run = Execution(simulation, 5, 5, Evaluation({}))
    times = []

    class Watch(hf.Callback):
        def on_round(self, job, round) -> None:
            times.append(run.seconds)

    run.execute(None, [Watch()])
    assert times[0] == 0
    assert times == sorted(set(times))
    assert run.rows[-1]["seconds"] == run.seconds
