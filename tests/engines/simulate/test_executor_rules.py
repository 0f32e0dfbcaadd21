"""What an executor must not take for granted: precisions, users' own code, and how much is done at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from command_line import experiment_file
from test_conformance import NODES
from test_executors import assert_close, dense, replay_of
from torch import Tensor

import holdfast as hf
from holdfast.contract import Algorithm, Oracle, Peers
from holdfast.core.memory import available_memory, total_memory
from holdfast.core.randomness import batch_indices
from holdfast.core.tree import tree_map
from holdfast.engines.common.simulation import Simulation
from holdfast.engines.simulate.programs import compiled
from holdfast.experiments.plan import Plan
from holdfast.problem.losses import CrossEntropy
from holdfast.problem.sampling import STEPS_DRAWN_AT_ONCE
from holdfast.problem.source import ArraySource

RING = hf.Network.of(hf.ring(NODES))
TWO_PRECISIONS = """
rounds = 1
precision = ["float32", "tf32"]
[problem]
dataset = "digits"
model = "linear"
nodes = 4
[network]
topology = "server"
[[algorithm]]
name = "fedavg"
lr = 0.1
"""


def test_every_job_of_a_sweep_is_computed_in_its_own_precision(tmp_path) -> None:
    plan = Plan.of_file(experiment_file(tmp_path, TWO_PRECISIONS), [], None, "cpu")
    plan.check()
    found = []
    for job in plan.jobs:
        plan.simulation(job)
        found.append(torch.get_float32_matmul_precision())
    torch.set_float32_matmul_precision("highest")
    assert found == ["highest", "high"]


class Scaled(NamedTuple):
    x: Tensor


@dataclass(frozen=True)
class SignDescent(Algorithm):
    """A user's method, whose step depends on how many columns a row has."""

    lr: float

    def init(self, x0: Tensor, oracle: Oracle, peers: Peers) -> Scaled:
        return Scaled(x0)

    def round(self, s: Scaled, oracle: Oracle, peers: Peers) -> Scaled:
        gradient = oracle.grad(s.x)
        step = gradient.sign() * gradient.abs().mean(-1, keepdim=True)
        return Scaled(peers.exchange(s.x - self.lr * step).mixed)

    def model(self, s: Scaled) -> Tensor:
        return s.x


@pytest.mark.parametrize(
    "algorithm", [SignDescent(lr=0.5), hf.Gossip(lr=0.05, local_steps=2)], ids=["own", "ours"]
)
def test_only_methods_that_declare_it_work_on_padded_rows(algorithm, monkeypatch) -> None:
    monkeypatch.setattr("torch._inductor.compile", lambda program, inputs: program)
    simulation = Simulation(algorithm, dense(), RING, seed=7)
    replay = replay_of(simulation)
    kept = tree_map(torch.clone, replay.state)
    program = compiled(replay)
    tree_map(lambda buffer, value: buffer.copy_(value), replay.state, kept)  # preparing runs a round
    plain = Simulation(algorithm, dense(), RING, seed=7)
    for round in range(20):
        replay.fill(round)
        program()
        plain.step()
    models = simulation.rounds.models(replay.state)
    assert_close(models, plain.models)
    padded = models.stride(0) > models.shape[1]
    assert padded == isinstance(algorithm, hf.Gossip)


class Annealed(CrossEntropy):
    """A user's loss that changes in time."""

    calls = 0

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        Annealed.calls += 1
        return super().values(outputs, targets)


def test_a_users_own_loss_is_called_in_every_step(monkeypatch) -> None:
    monkeypatch.setattr("holdfast.problem.gradients.stacked.TRACE_FROM_CALLS", 3)
    problem = dense().variant(loss=Annealed())
    before = Annealed.calls
    for step in range(10):
        problem.minibatch_values_and_grads([problem.x0.expand(NODES, -1)], torch.arange(NODES), 0, step)
    assert Annealed.calls >= before + 10


@pytest.mark.parametrize("nodes", [3, 2000])
def test_steps_drawn_ahead_are_those_drawn_one_by_one(nodes: int) -> None:
    counts = torch.full((nodes,), 50)
    data = hf.FederatedData(torch.zeros(50 * nodes, 2), torch.zeros(50 * nodes), counts)
    samples = ArraySource(data, torch.zeros(1), batch_size=8, seed=7).draws
    everybody = torch.arange(nodes)
    for step in (1, 2, 16, 17, 18, 1):
        got = samples.draw(everybody, 4, step).places
        assert torch.equal(got, batch_indices(7, everybody, counts, 4, step, 8))
    assert samples._drawn is not None
    assert len(samples._drawn[3]) == (STEPS_DRAWN_AT_ONCE if nodes == 3 else 2)  # 2**15 picks at once


def test_all_samples_of_equal_nodes_are_read_where_they_are() -> None:
    x, y = torch.arange(24.0).view(12, 2), torch.arange(12)
    samples = ArraySource(hf.FederatedData(x, y, torch.full((3,), 4)), x, std=2.0)
    everybody, others = torch.arange(3), torch.tensor([2, 0, 1])
    stretch = samples.stretch(everybody, 1, 3)
    rows = torch.tensor([[1, 2], [5, 6], [9, 10]])
    copied = samples.gather(rows)
    assert all(torch.equal(*parts) for parts in zip(stretch, copied, strict=True))
    assert stretch.x.untyped_storage()._cdata == samples._ready.x.untyped_storage()._cdata
    assert samples.stretch(others, 1, 3) is None  # these are not in the order of the samples
    unequal = ArraySource(hf.FederatedData(x, y, torch.tensor([4, 5, 3])), x, std=2.0)
    assert unequal.stretch(everybody, 1, 3) is None


def test_evaluation_keeps_to_the_memory_for_activations() -> None:
    whole = dense().global_value_and_grad(dense().x0)[1]
    problem = dense(samples_at_once=30)
    seen = []
    transform = problem.source.input_transform
    prepare = transform.prepare
    transform.prepare = lambda x: seen.append(len(x)) or prepare(x)
    assert_close(problem.global_value_and_grad(problem.x0)[1], whole)
    assert max(seen) == 30


def test_the_check_of_memory_counts_activations() -> None:
    problem = dense()
    one = problem.activations.of_sample
    # Layers keep their 64 and 12 inputs, ReLU the latter too; the loss 10 slopes and a weight.
    assert one == (64 + 12 + 10 + 1) * 4
    assert problem.step_bytes == 3 * one * 16 * NODES
    problem = dense(samples_at_once=32)
    assert problem.step_bytes == 3 * one * 32
    problem = dense(backend="loop")
    assert problem.step_bytes == 3 * one * 16 * min(NODES, torch.get_num_threads())


def test_a_containers_limit_counts(tmp_path, monkeypatch) -> None:
    free, total = available_memory("cpu"), total_memory(torch.device("cpu"))
    monkeypatch.setattr("holdfast.core.memory.CGROUP", tmp_path)
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 200\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert total_memory(torch.device("cpu")) >= total
    assert available_memory("cpu") > 1000
    (tmp_path / "memory.max").write_text("1000\n")
    assert total_memory(torch.device("cpu")) == 1000
    assert available_memory("cpu") == 500
    assert free > 500
