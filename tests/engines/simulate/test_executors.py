"""Every way of running a round gives the same trajectory: stacked, in chunks, row by row, and fused."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Callable
from copy import deepcopy
from functools import cache

import numpy as np
import pytest
import torch
from test_conformance import CASES, NODES, Case, case_id, method, network
from torch import nn

import holdfast as hf
from holdfast.core.tree import tree_map
from holdfast.data import DATASETS
from holdfast.engines.common.links import ShortRows, SparseRows, StackedLinks, exact_product
from holdfast.engines.common.simulation import Simulation
from holdfast.engines.simulate.fused import FusedRound
from holdfast.engines.simulate.programs import _padded
from holdfast.engines.simulate.replay import Replay
from holdfast.models import MODELS
from holdfast.problem.flat import FlatModel
from holdfast.problem.gradients.convolution import PixelConv2d
from holdfast.problem.gradients.support import NarrowLinear, PlaneConv2d, ready_to_stack
from holdfast.problem.losses import CrossEntropy
from holdfast.problem.model_problem import ModelProblem

ROUNDS = 10
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def digits(
    model: str = "mlp", backend="auto", samples_at_once=None, sampling="replacement", **options
) -> ModelProblem:
    data = DATASETS.build("digits", {})
    split = hf.partition(data.x_train, data.y_train, hf.Dirichlet(0.5), nodes=NODES, seed=0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = MODELS.build(model, options, input_shape=data.input_shape, outputs=10)
    flat = FlatModel(module, torch.device("cpu"), torch.float32)
    how = {"backend": backend, "samples_at_once": samples_at_once, "sampling": sampling}
    return ModelProblem(flat, CrossEntropy(), split, batch_size=16, seed=7, **how)


def dense(**options) -> ModelProblem:
    return digits(hidden=[12], **options)


def in_chunks() -> ModelProblem:
    return dense(samples_at_once=40)  # of the 16 of every node: two nodes at a time


def row_by_row() -> ModelProblem:
    return dense(backend="loop")


@cache
def shared(make: Callable[[], ModelProblem]) -> ModelProblem:
    """One problem for all cases, which trace its gradient only once."""
    return make()


def models(case: Case, problem: ModelProblem) -> torch.Tensor:
    simulation = Simulation(method(case), problem, network(case), seed=7)
    for _ in range(ROUNDS):
        simulation.step()
    return simulation.models


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert (got - expected).norm() <= 1e-5 * expected.norm()


# The others take as long again; they are run with the slow tests.
QUICK = {"local-gecl", "net-fleet", "scaffold", "fedavg", "fedpd", "dualfl", "dspodfl", "ecl"}


def is_quick(case: Case) -> bool:
    """Momentum is the same few lines in every method: one method of each kind tries it."""
    return case.name in (QUICK if "optimizer" not in case.options else {"local-gecl", "scaffold", "fedavg"})


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if is_quick(case) else pytest.mark.slow) for case in CASES],
    ids=case_id,
)
def test_executors_agree(case: Case) -> None:
    stacked = models(case, shared(dense))
    for other in (in_chunks, row_by_row):
        assert_close(models(case, shared(other)), stacked)


def replay_of(simulation: Simulation, rounds: int = ROUNDS) -> Replay:
    """A round of ``simulation`` on memory of its own, as executors prepare it."""
    kept = tree_map(torch.clone, simulation.state)
    replay = Replay(simulation, rounds)
    replay.count(simulation.state)
    replay.load(kept)
    return replay


def fused_models(case: Case, compiler, problem=None) -> tuple[torch.Tensor, FusedRound]:
    simulation = Simulation(method(case), problem or shared(dense), network(case), seed=7)
    replay = replay_of(simulation)
    wide = _padded(replay) if simulation.method.may_be_padded else replay.state
    assert simulation.problem.dim % 4 != 0  # otherwise no row is padded
    fused = FusedRound(replay.advance, tree_map(torch.clone, wide), simulation.problem, compiler)
    for round in range(ROUNDS):
        replay.fill(round)
        fused(wide)  # in place
    return simulation.rounds.models(replay.state), fused


def reads_values(case: Case) -> bool:
    """Whether a round decides by values that it computed: it cannot be traced and runs step by step."""
    names = ("scaffnew", "d-scaffnew", "dualfl", "apda-inexact", "dspodfl", "tamuna")
    return case.name in names or case.options.get("solver") == "vr"


@pytest.mark.parametrize("graph", [hf.ring(7), hf.star(5)], ids=["ring", "star"])
@pytest.mark.parametrize("form", [ShortRows, SparseRows])
def test_a_matrix_by_its_entries_is_the_same_matrix(form, graph) -> None:
    weights = hf.Network.of(graph).weights
    rows = torch.randn(weights.shape[0], 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    got = exact_product(form.of(weights, rows), rows)
    assert_close(got, torch.as_tensor(weights.toarray()) @ rows)


def test_a_round_on_a_sparse_network_is_cut_into_pieces_too(monkeypatch) -> None:
    case = next(case for case in CASES if case.name == "local-gecl")
    expected = models(case, dense())
    monkeypatch.setattr("holdfast.engines.common.links.SPARSE_FROM_NODES", 1)
    monkeypatch.setattr("holdfast.engines.common.links.SPARSE_BELOW_DENSITY", 2)
    # A problem of its own: programs that other tests compiled for the shared one have no code to look at.
    got, fused = fused_models(case, lambda program: program, dense())
    assert_close(got, expected)
    assert any("sparse_product" in piece.program.code for piece in fused.pieces)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if is_quick(case) or reads_values(case) else pytest.mark.slow)
        for case in CASES
    ],
    ids=case_id,
)
def test_a_round_cut_into_pieces_is_the_same_round(case: Case) -> None:
    if reads_values(case):
        with pytest.raises(RuntimeError, match="data-dependent"):
            fused_models(case, compiler=lambda program: program)
        return
    got, fused = fused_models(case, compiler=lambda program: program)
    assert_close(got, models(case, shared(dense)))
    assert len({id(piece.program) for piece in fused.pieces}) <= 4


def test_a_sum_of_neighbours_rows_is_compiled_also_before_the_first_gradient(monkeypatch) -> None:
    # On a GPU an exchange on a ring is such a sum, which takes eight passes if it is not compiled.
    monkeypatch.setattr(StackedLinks, "_short", lambda self, matrix: ShortRows.of(matrix, self.like))
    compiled = []
    simulation = Simulation(hf.NETFLEET(lr=0.05), dense(), hf.Network.of(hf.ring(NODES)), seed=7)
    replay = replay_of(simulation)
    fused = FusedRound(replay.advance, replay.state, simulation.problem, compiled.append)
    assert "index" in compiled[0].code
    assert len(fused.pieces) == 2


def test_what_was_compiled_for_one_step_size_serves_for_all() -> None:
    compiled, after = [], []

    def compiler(program):
        compiled.append(program)
        return program

    problem = dense()
    for lr in (0.05, 0.02):
        algorithm = hf.LocalGECL(lr=lr, local_steps=3)
        simulation = Simulation(algorithm, problem, hf.Network.of(hf.ring(NODES)), seed=7)
        replay = replay_of(simulation)
        state = replay.state
        FusedRound(replay.advance, tree_map(torch.clone, state), problem, compiler)(state)
        plain = Simulation(algorithm, dense(), hf.Network.of(hf.ring(NODES)), seed=7)
        plain.step()
        assert_close(algorithm.model(state), plain.models)
        after.append(len(compiled))
    assert after[0] == after[1] > 0


@pytest.mark.parametrize(
    "algorithm",
    [hf.LocalGECL(lr=0.05, local_steps=4), hf.LocalGECL(lr=0.05, local_steps=4, first_grad_at="mixed")],
)
def test_the_steps_of_a_round_share_one_program(algorithm) -> None:
    # The first takes its gradient elsewhere than where it starts, and the last is followed by an exchange.
    compiled = []
    simulation = Simulation(algorithm, dense(), hf.Network.of(hf.ring(NODES)), seed=7)
    replay = replay_of(simulation)
    FusedRound(replay.advance, replay.state, simulation.problem, compiled.append)
    assert sum("gradient" in program.code for program in compiled) == 1


class Counting(nn.Linear):
    """A layer whose calls have an effect."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counting.calls += 1
        return super().forward(x)


def with_a_hook() -> nn.Module:
    def count(*_) -> None:
        Counting.calls += 1

    model = nn.Linear(8, 10)
    model.register_forward_hook(count)
    return model


@pytest.mark.parametrize("make", [lambda: Counting(8, 10), with_a_hook], ids=["layer", "hook"])
def test_a_users_own_code_is_called_in_every_step(make, monkeypatch) -> None:
    monkeypatch.setattr("holdfast.problem.gradients.stacked.TRACE_FROM_CALLS", 3)
    data = hf.FederatedData(torch.rand(20, 8), torch.arange(20) % 10, np.array([10, 10]))
    flat = FlatModel(make(), CPU, torch.float32)
    problem = ModelProblem(flat, CrossEntropy(), data, batch_size=4, seed=0)
    before = Counting.calls
    for step in range(10):
        problem.minibatch_values_and_grads([flat.x0.expand(2, -1)], torch.arange(2), 0, step)
    assert Counting.calls >= before + 10


def test_steps_that_fall_from_round_to_round_are_traced_too() -> None:
    case = Case("fedpd", {"eta": 0.5, "lr": 0.1, "local_steps": 3, "decreasing": True}, 2, 3, True, rate=None)
    got, _ = fused_models(case, compiler=lambda program: program)
    assert_close(got, models(case, dense()))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_what_was_compiled_does_not_keep_the_data() -> None:
    problem = dense()
    simulation = Simulation(hf.LocalGECL(lr=0.1), problem, hf.Network.of(hf.ring(NODES)), seed=7)
    replay = replay_of(simulation)
    state = replay.state
    FusedRound(replay.advance, state, problem)(state)
    data = weakref.ref(problem)
    del problem, simulation, replay
    gc.collect()
    assert data() is None


@pytest.mark.parametrize(
    "options", [{}, {"padding": 1}, {"padding": (2, 0), "bias": False}, {"kernel_size": (3, 5)}]
)
def test_a_convolution_of_one_plane_as_a_product(options) -> None:
    plain = nn.Conv2d(1, 4, **{"kernel_size": 3, **options}).double()
    product = ready_to_stack(deepcopy(plain), GPU)
    assert type(product) is PlaneConv2d
    x = torch.randn(3, 1, 9, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(product(x), plain(x), rtol=1e-12, atol=1e-12)


def test_other_convolutions_stay_as_they_are() -> None:
    for layer in (nn.Conv2d(2, 4, 3), nn.Conv2d(1, 4, 3, stride=2)):
        assert type(ready_to_stack(layer, GPU)) is PixelConv2d
    for layer in (nn.Conv2d(2, 4, (3, 1)), nn.Conv2d(2, 4, 3, groups=2), nn.Conv2d(1, 4, 3, padding="same")):
        assert type(ready_to_stack(layer, GPU)) is nn.Conv2d
    assert type(ready_to_stack(nn.Conv2d(1, 4, 3), CPU)) is nn.Conv2d


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 7), (2, 3, 7)])
def test_a_layer_with_few_outputs_as_weight_times_inputs(bias, shape) -> None:
    plain = nn.Linear(7, 4, bias=bias).double()
    turned = ready_to_stack(deepcopy(plain), CPU)
    assert type(turned) is NarrowLinear
    x = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(turned(x), plain(x), rtol=1e-12, atol=1e-12)
    assert type(ready_to_stack(nn.Linear(7, 40), CPU)) is nn.Linear


def test_convolutions_on_a_cpu_are_computed_row_by_row_and_agree() -> None:
    rows = digits("netfleet-cnn")
    stacked = digits("netfleet-cnn", backend="stacked")
    assert not rows.stacked
    nodes = torch.arange(NODES)
    x = rows.x0 + 0.1 * torch.randn(NODES, rows.dim, generator=torch.Generator().manual_seed(0))
    got, expected = (f.minibatch_values_and_grads([x], nodes, 0, 0)[0][1] for f in (rows, stacked))
    assert_close(got, expected)


class WithView(nn.Module):
    """Its view of what the convolution gave exists only where planes lie one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.convolve, self.score = nn.Conv2d(1, 8, 3), nn.Linear(288, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.score(self.convolve(x).view(len(x), 288))


def test_images_are_laid_out_by_pixel_unless_the_model_objects() -> None:
    x = torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    data = hf.FederatedData(x, torch.arange(20) % 10, np.array([10, 10]))
    objecting = WithView()
    willing = nn.Sequential(deepcopy(objecting.convolve), nn.Flatten(), deepcopy(objecting.score))
    gradients = []
    for model, by_pixel in ((objecting, False), (willing, True)):
        flat = FlatModel(model, CPU, torch.float32)
        problem = ModelProblem(flat, CrossEntropy(), data, batch_size=None, seed=0)
        assert problem.backend.by_pixel == by_pixel
        gradients.append(problem.full_grads(flat.x0.expand(2, -1).contiguous(), torch.arange(2)))
    assert_close(*gradients)


def test_a_gradient_that_was_traced_is_the_same_gradient(monkeypatch) -> None:
    x = torch.randn(NODES, dense().dim, generator=torch.Generator().manual_seed(0))

    def gradients(problem: ModelProblem) -> list[torch.Tensor]:
        """Of all nodes and of two of them, by turns."""
        some = [torch.arange(NODES), torch.arange(2)] * 5
        return [problem.minibatch_values_and_grads([x[n]], n, 0, step)[0][1] for step, n in enumerate(some)]

    plain = gradients(dense())
    monkeypatch.setattr("holdfast.problem.gradients.stacked.TRACE_FROM_CALLS", 3)
    traced = dense()
    assert all(map(torch.equal, gradients(traced), plain))
    assert len(traced.backend._traced) == 2


def test_computing_in_bfloat16_keeps_models_in_float32() -> None:
    problem = digits(hidden=[12])
    problem.model.compute = torch.bfloat16
    nodes = torch.arange(NODES)
    x = problem.x0.expand(NODES, -1).contiguous()
    got = problem.minibatch_values_and_grads([x], nodes, 0, 0)[0][1]
    expected = dense().minibatch_values_and_grads([x], nodes, 0, 0)[0][1]
    assert got.dtype == torch.float32
    error = (got - expected).norm() / expected.norm()
    assert 1e-5 < error < 0.03  # eight bits of a number are kept: really computed in bfloat16
