"""Values that take over the memory of others: no round may notice."""

from __future__ import annotations

import pytest
import torch
from test_executors import counted, dense
from torch import Tensor

import holdfast as hf
from holdfast.core.tree import tree_map
from holdfast.engines.common.links import StackedLinks
from holdfast.engines.common.products import ShortRows
from holdfast.engines.simulate.executors.captured import CapturedSimulation
from holdfast.engines.simulate.executors.fused import FusedRound
from holdfast.engines.simulate.executors.replayed import in_place

OBJECTIVE = dense()
EVERYBODY = torch.arange(OBJECTIVE.nodes)
MIXING = torch.rand(OBJECTIVE.nodes, OBJECTIVE.nodes, generator=torch.Generator().manual_seed(1))

CONSTANT = torch.rand(OBJECTIVE.nodes, OBJECTIVE.dim, generator=torch.Generator().manual_seed(2))


def stepped(x: Tensor, step: int) -> Tensor:
    return x - 0.1 * OBJECTIVE.minibatch_grads([x], EVERYBODY, 0, step)[0]


def steps(x: Tensor, first: int, last: int) -> Tensor:
    for step in range(first, last):
        x = stepped(x, step)
    return x


def crosswise(a: Tensor, b: Tensor, c: Tensor):
    return stepped(b, 0), stepped(c, 1), stepped(a, 2)


def exchanged(a: Tensor, b: Tensor, c: Tensor):
    return b, c, a


def both_of_one(a: Tensor, b: Tensor, c: Tensor):
    x = steps(a, 0, 3)
    return x, x, steps(b, 3, 5)


def early_value_kept(a: Tensor, b: Tensor, c: Tensor):
    first = stepped(a, 0)
    last = steps(first, 1, 4)
    return last, first, last - first


def old_value_needed_late(a: Tensor, b: Tensor, c: Tensor):
    x = steps(a, 0, 3)
    return x, b + (a - x), c


def view_kept(a: Tensor, b: Tensor, c: Tensor):
    x = stepped(a, 0)
    part = x[:, :10]
    y = steps(x, 1, 3)
    return y, b + part.sum(1, keepdim=True), y[:, :]


def changed_in_place(a: Tensor, b: Tensor, c: Tensor):
    x = stepped(a, 0)
    y = stepped(x, 1)
    x.mul_(2)
    return stepped(y, 2), x, c.copy_(stepped(b, 3)) + stepped(c, 4)


def copied_by_the_method(a: Tensor, b: Tensor, c: Tensor):
    x = stepped(a, 0)
    b.copy_(x)
    z = b * 2
    return stepped(x, 1), b, z


def constant_by_another_name(a: Tensor, b: Tensor, c: Tensor):
    return a + steps(CONSTANT[:], 0, 2), b, c


def state_by_another_name(a: Tensor, b: Tensor, c: Tensor):
    x = stepped(a[:], 0)
    return stepped(x, 1) + b, x, c


def state_changed_in_place(a: Tensor, b: Tensor, c: Tensor):
    x = stepped(a.mul_(2), 0)
    return stepped(x, 1) + b, x, c


def copied_at_the_end(a: Tensor, b: Tensor, c: Tensor):
    x, y = stepped(a, 0), stepped(b, 1)
    own = torch.empty_like(x)
    own.copy_(x)
    return own, y, c


def copied_onto_itself(a: Tensor, b: Tensor, c: Tensor):
    x = stepped(a, 0)
    x.copy_(x)
    return x, b, c


def nothing_done(a: Tensor, b: Tensor, c: Tensor):
    return a, b, c


def mixed_between(a: Tensor, b: Tensor, c: Tensor):
    x = MIXING @ steps(a, 0, 2)
    return x, MIXING @ steps(b - x, 2, 5), c - x


def roles_changed(a: Tensor, b: Tensor, c: Tensor):
    x, y = stepped(a, 0), stepped(b, 1)
    x, y = stepped(y, 2) + x, stepped(x, 3) - y
    return y, x, stepped(x, 4) + c


ROUNDS = [crosswise, exchanged, both_of_one, early_value_kept, old_value_needed_late, view_kept]
ROUNDS += [constant_by_another_name, state_by_another_name, state_changed_in_place, copied_at_the_end]
ROUNDS += [
    copied_onto_itself,
    nothing_done,
    changed_in_place,
    copied_by_the_method,
    mixed_between,
    roles_changed,
]


@pytest.mark.parametrize("compiler", [lambda p: p, lambda p: torch.compile(p, backend="aot_eager")])
@pytest.mark.parametrize("one_round", ROUNDS, ids=lambda one_round: one_round.__name__)
def test_no_round_notices(one_round, compiler) -> None:
    rng = torch.Generator().manual_seed(0)
    start = tuple(torch.rand(OBJECTIVE.nodes, OBJECTIVE.dim, generator=rng) for _ in range(3))
    expected, state = tree_map(torch.clone, start), tree_map(torch.clone, start)
    OBJECTIVE.programs.clear()
    fused = FusedRound(in_place(lambda s: one_round(*s)), tree_map(torch.clone, start), OBJECTIVE, compiler)
    for _ in range(3):
        expected = one_round(*expected)
        fused(state)  # in place
    for got, wanted in zip(state, expected, strict=True):
        torch.testing.assert_close(got, wanted)


def fused_round(method, network) -> FusedRound:
    simulation = CapturedSimulation(method, dense(), network, seed=7)
    advance, state = counted(simulation), tree_map(torch.clone, simulation.state)
    return FusedRound(in_place(advance), state, simulation.objective, lambda program: program)


def test_a_step_writes_the_new_model_over_the_old_one() -> None:
    fused = fused_round(hf.FedAvg(lr=0.1, local_steps=6), hf.server(OBJECTIVE.nodes))
    assert [piece.outputs for piece in fused.pieces[1:-1]] == [[]] * 5
    assert len({id(piece.program) for piece in fused.pieces[2:-1]}) == 1


def test_an_exchange_reads_the_new_models_where_the_state_keeps_them(monkeypatch) -> None:
    monkeypatch.setattr(StackedLinks, "_short", lambda self, matrix: ShortRows.of(matrix, self.like))
    network = hf.Network.of(hf.ring(OBJECTIVE.nodes))
    fused = fused_round(hf.LocalGECL(lr=0.1, local_steps=4), network)
    *steps_, exchange = fused.pieces
    model, _, dual = fused.arguments
    assert all("index" not in piece.program.code for piece in steps_)
    assert {model, dual} <= set(exchange.inputs)
    # Written: the model once in every step, and at the end what was mixed and the dual.
    assert [piece.program.code.count("copy_") > 0 for piece in steps_] == [True] * 4
    assert fused.results[0] == model
