"""Every rule alone: against the real classes of torch in float64, row by row, and as a schedule says."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch import Tensor

import holdfast as hf
from holdfast.contract.optimizer import OPTIMIZERS, LocalOptimizer, Optimizer
from holdfast.contract.parameters import Weight
from holdfast.core.tree import leaves, tree_map
from holdfast.core.validation import check

DIM, LR = 7, 0.03
ROUNDS, STEPS = 80, 5


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


START = torch.randn(DIM, dtype=torch.float64, generator=generator(0))
CENTRE = 3 * torch.randn(DIM, dtype=torch.float64, generator=generator(1))
NOISE = torch.randn(ROUNDS * STEPS, DIM, dtype=torch.float64, generator=generator(2))


def slope(x: Tensor, step: int) -> Tensor:
    """A noisy gradient of a function that is far from quadratic."""
    return torch.sinh((x - CENTRE) / 3) + 0.5 * NOISE[step]


def ours(optimizer: LocalOptimizer, rounds: int = ROUNDS) -> Tensor:
    """One node's path, a row for each round."""
    x, memory, taken, path = START[None], optimizer.memory(START[None]), iter(range(ROUNDS * STEPS)), []
    for _ in range(rounds):
        x, memory = optimizer.descend(x, lambda x: slope(x, next(taken)), LR, STEPS, memory)
        path.append(x[0])
    return torch.stack(path)


def torchs(make, max_norm: float | None = None, factor=None) -> Callable[[], Tensor]:
    """torch's path, found when it is asked for."""
    return cache(partial(torch_path, make, max_norm, factor))


def torch_path(make, max_norm: float | None, factor) -> Tensor:
    parameter = torch.nn.Parameter(START.clone())
    optimizer = make([parameter])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor or (lambda step: 1.0))
    path = []
    for step in range(ROUNDS * STEPS):
        parameter.grad = slope(parameter.detach(), step)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_([parameter], max_norm)
        optimizer.step()
        scheduler.step()
        if step % STEPS == STEPS - 1:
            path.append(parameter.detach().clone())
    return torch.stack(path)


def torch_adamw(parameters):
    return torch.optim.AdamW(parameters, lr=LR, betas=(0.8, 0.99), eps=1e-7, weight_decay=0.1)


ADAMW = hf.AdamW(beta1=0.8, beta2=0.99, eps=1e-7, weight_decay=0.1, keep=True)


def warmup_cosine(step: int) -> float:
    """Written anew, from the docstring: 30 steps up, a cosine from there to 0.1 in step 300, then 0.1."""
    if step < 30:
        return (step + 1) / 30
    return 0.1 + 0.9 * (1 + math.cos(math.pi * min((step - 30) / 270, 1))) / 2


PAIRS = {
    "adamw": (ADAMW, torchs(torch_adamw)),
    "torch's defaults": (
        hf.AdamW(keep=True),
        torchs(lambda parameters: torch.optim.AdamW(parameters, lr=LR)),
    ),
    "adam": (
        hf.AdamW(weight_decay=0.0, keep=True),
        torchs(lambda parameters: torch.optim.Adam(parameters, lr=LR)),
    ),
    "beta1 = 0": (
        hf.AdamW(beta1=0.0, weight_decay=0.0, keep=True),
        torchs(lambda parameters: torch.optim.Adam(parameters, lr=LR, betas=(0.0, 0.999))),
    ),
    "sgd with weight decay": (
        hf.SGD(weight_decay=0.2),
        torchs(lambda parameters: torch.optim.SGD(parameters, lr=LR, weight_decay=0.2)),
    ),
    "momentum with weight decay": (
        hf.Momentum(beta=0.7, average=False, weight_decay=0.2, keep=True),
        torchs(lambda parameters: torch.optim.SGD(parameters, lr=LR, momentum=0.7, weight_decay=0.2)),
    ),
    "clipped sgd": (
        hf.Clip(0.9),
        torchs(lambda parameters: torch.optim.SGD(parameters, lr=LR), max_norm=0.9),
    ),
    "clipped adamw": (hf.Clip(0.9, ADAMW), torchs(torch_adamw, max_norm=0.9)),
    "warm-up and cosine": (
        hf.WarmupCosine(warmup=30, steps=300, end=0.1, inner=ADAMW),
        torchs(torch_adamw, factor=warmup_cosine),
    ),
    "all together": (
        hf.WarmupCosine(warmup=30, steps=300, end=0.1, inner=hf.Clip(0.9, ADAMW)),
        torchs(torch_adamw, max_norm=0.9, factor=warmup_cosine),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_one_node_follows_torch(name):
    optimizer, expected = PAIRS[name][0], PAIRS[name][1]()
    assert (expected[-1] - START).norm() > 0.3  # it goes somewhere
    assert (ours(optimizer) - expected).abs().max() < 1e-12


def test_the_pairs_are_not_all_the_same():
    ends = torch.stack([expected()[-1] for _, expected in PAIRS.values()])
    assert torch.pdist(ends).min() > 1e-3


def test_anew_in_each_round_is_a_new_torch_optimiser_in_each_round():
    parameter, path = torch.nn.Parameter(START.clone()), []
    for step in range(ROUNDS * STEPS):
        if step % STEPS == 0:
            optimizer = torch_adamw([parameter])
        parameter.grad = slope(parameter.detach(), step)
        optimizer.step()
        if step % STEPS == STEPS - 1:
            path.append(parameter.detach().clone())
    assert (ours(replace(ADAMW, keep=False)) - torch.stack(path)).abs().max() < 1e-12


def test_steps_are_counted_over_rounds_also_where_the_inner_rule_begins_anew():
    inner = replace(ADAMW, keep=False)
    warm = hf.WarmupCosine(warmup=STEPS, inner=inner)
    memory = warm.memory(START[None])
    assert [tensor.shape for tensor in leaves(memory)] == [(1, 1)]  # the counter alone
    x, memory = warm.descend(START[None], lambda x: x, LR, STEPS, memory)
    assert float(memory.t) == STEPS
    expected, _ = inner.descend(x, lambda x: x, LR, STEPS, ())
    assert torch.equal(warm.descend(x, lambda x: x, LR, STEPS, memory)[0], expected)  # the factor is 1 now


def test_the_first_steps_are_exact_in_single_precision():
    """1 - beta^t, computed as it stands, would be off by 6e-5 in the first step."""
    gradient = START.float()[None]
    adam = hf.AdamW(weight_decay=0.0, eps=1e-30)
    direction, _ = adam.update(gradient, adam.init(gradient), gradient)
    assert (direction - gradient.sign()).abs().max() < 1e-6


COMPOSED = [*(OPTIMIZERS.build(name, {}) for name in OPTIMIZERS), *(pair[0] for pair in PAIRS.values())]


@pytest.mark.parametrize("optimizer", COMPOSED, ids=repr)
def test_every_row_is_a_node_of_its_own(optimizer):
    """What a rank of a cluster or a deployed node computes is the simulator's row."""
    rows = torch.tensor([[0.1], [1.0], [9.0]]) * NOISE[:3]

    def after(rows: Tensor) -> list[Tensor]:
        end, memory = optimizer.descend(rows, lambda x: 5 * x.tanh(), LR, 4, optimizer.memory(rows))
        return [end, *leaves(memory)]

    together = after(rows)
    apart = [torch.cat(parts) for parts in zip(*(after(rows[i : i + 1]) for i in range(3)), strict=True)]
    assert all((a - b).abs().max() < 1e-14 for a, b in zip(together, apart, strict=True))
    assert together[0].isfinite().all()


@pytest.mark.parametrize("optimizer", COMPOSED, ids=repr)
def test_zeros_behind_a_row_stay_zeros(optimizer):
    """What ``columnwise`` promises."""
    assert optimizer.may_be_padded
    start = START.expand(2, -1)

    def after(rows: Tensor) -> Tensor:
        return optimizer.descend(rows, lambda x: x.sinh(), LR, 4, optimizer.memory(rows))[0]

    wide = after(torch.nn.functional.pad(start, (0, 3)))
    assert (wide[:, :DIM] - after(start)).abs().max() < 1e-15
    assert not wide[:, DIM:].any()


def test_a_rule_around_one_that_depends_on_the_columns_depends_on_them():
    class Own(hf.SGD):
        pass

    assert not hf.Clip(1.0, Own()).may_be_padded
    assert not hf.Gossip(lr=0.1, optimizer=hf.WarmupCosine(inner=hf.Clip(1.0, Own()))).may_be_padded


# --- schedules ----------------------------------------------------------------------------------------------


def test_schedules_inside_an_optimiser_are_those_of_the_round():
    optimizer = hf.Clip(hf.halving(4.0, every=2), hf.AdamW(weight_decay=hf.linear(0.2, rounds=4)))
    method = hf.LocalGECL(lr=0.1, optimizer=optimizer)
    assert method.at(0).optimizer == hf.Clip(4.0, hf.AdamW(weight_decay=0.2))
    assert method.at(3).optimizer == hf.Clip(2.0, hf.AdamW(weight_decay=0.2 + (0.0 - 0.2) * 3 / 4))
    same = hf.LocalGECL(lr=0.1, optimizer=hf.AdamW())
    assert same.at(3) is same


def test_a_schedule_inside_an_optimiser_may_come_from_a_file():
    table = {
        "name": "clip",
        "max_norm": {"schedule": "halving", "start": 4.0, "every": 2},
        "inner": {"name": "adamw", "weight_decay": 0.0, "keep": True},
    }
    optimizer = check("optimizer", Optimizer, table)
    assert optimizer.at(2) == hf.Clip(2.0, hf.AdamW(weight_decay=0.0, keep=True))


def test_a_weight_may_be_zero_and_not_negative():
    assert check("decay", Weight, 0) == 0
    with pytest.raises(hf.HoldfastError, match=r"AdamW.weight_decay at round 1: .* got -1"):
        hf.Gossip(lr=0.1, optimizer=hf.AdamW(weight_decay=lambda round: -round)).at(1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hf.AdamW(beta2=1.0), r"AdamW.beta2: should be less than 1, got 1.0"),
        (lambda: hf.AdamW(eps=0.0), r"AdamW.eps: should be greater than 0, got 0"),
        (lambda: hf.AdamW(weight_decay=-0.1), r"AdamW.weight_decay: should be greater than or equal to 0"),
        (lambda: hf.Clip(0.0), r"Clip.max_norm: should be greater than 0, got 0"),
        (lambda: hf.Clip(1.0, 0.1), r"Clip.inner: .*LocalOptimizer, got 0.1"),
        (
            lambda: hf.Clip(1.0, torch.optim.AdamW),
            r"Clip.inner: torch's AdamW holds the parameters of one model, .* such as hf.AdamW\(\)",
        ),
        (
            lambda: hf.Gossip(lr=0.1, optimizer=torch.optim.SGD([torch.zeros(1)])),
            r"Gossip.optimizer: torch's SGD",
        ),
        (
            lambda: hf.Gossip(lr=0.1, optimizer=hf.AdamW),
            r"Gossip.optimizer: expected an optimiser, got its class: write AdamW\(\)",
        ),
        (lambda: hf.Clip(hf.linear(0.0, 5, 1.0)), r"Clip.max_norm: linear\(0.0, .* at round 0: should be gr"),
        (lambda: hf.WarmupCosine(warmup=10, steps=10), r"steps: should be more than warmup = 10, got 10"),
        (lambda: hf.WarmupCosine(warmup=0.5), r"WarmupCosine.warmup: should be a valid integer, got 0.5"),
        (lambda: hf.FedAdam(tau=0.0), r"FedAdam.tau: should be greater than 0"),
        (
            lambda: hf.Gossip(lr=0.1, optimizer={"name": "adamw", "lr": 1}),
            r"Gossip.optimizer: unknown key in optimizer 'adamw' 'lr': choose from beta1, beta2, eps, keep",
        ),
        (
            lambda: hf.Gossip(lr=0.1, optimizer={"name": "clip", "inner": {"name": "adamw", "beta1": 2.0}}),
            r"Gossip.optimizer: optimizer 'clip'.inner: optimizer 'adamw'.beta1: should be less than 1",
        ),
    ],
)
def test_wrong_parameters_are_named(make, message):
    with pytest.raises(hf.HoldfastError, match=message):
        make()


def test_optimisers_print_as_they_are_written():
    optimizer = hf.WarmupCosine(warmup=3, inner=hf.Clip(hf.halving(2.0, every=5), hf.AdamW(keep=True)))
    text = "WarmupCosine(warmup=3, inner=Clip(max_norm=halving(2.0, every=5), inner=AdamW(keep=True)))"
    assert repr(optimizer) == text
    assert repr(hf.SGD()) == "SGD()"


def test_memories_are_trees_of_rows():
    for name in OPTIMIZERS:
        memory = OPTIMIZERS.build(name, {}).init(START[None])
        assert {tensor.shape for tensor in leaves(memory)} <= {(1, DIM), (1, 1)}
        tree_map(torch.clone, memory)
