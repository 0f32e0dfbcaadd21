"""Audit by insertion: a lower bound of epsilon from one run (Steinke, Nasr and Jagielski 2023).

Made-up samples, canaries, are put into one node's data, each with probability 1/2. An attacker that hears all
messages of that node guesses which are in. Under (epsilon, delta)-privacy the number of right guesses is
bounded, so many right guesses refute a small epsilon.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from scipy.special import bdtr
from torch import Tensor
from torch.func import grad, vmap

from holdfast.audit.subject import Subject, overheard
from holdfast.core.errors import HoldfastError
from holdfast.data import FederatedData
from holdfast.data.samples import Pair
from holdfast.privacy import DP
from holdfast.problem.source import Batch

MOST_CANARIES = 128
LARGE = 10.0  # their norms relative to an ordinary sample's: so large that gradients are clipped
GUESSED = 0.8  # the share of canaries that are guessed; on the others there is no guess
UNCERTAINTY = 0.05
PENALTY = 0.1  # of squared shares


class Bound(NamedTuple):
    """The largest epsilon that is refuted, with 95 % confidence."""

    epsilon: float
    right: int
    guesses: int
    canaries: int


def refuted_epsilon(canaries: int, guesses: int, right: int, delta: float) -> float:
    """The largest epsilon that so many ``right`` of ``guesses`` refute (Theorem 5.2 of the paper)."""

    def p_value(epsilon: float) -> float:
        q = 1 / (1 + math.exp(-epsilon))
        fewer = bdtr(np.arange(right), guesses, q)  # [right]: at most 0, 1, ... right - 1 of them right
        below = np.concatenate([fewer[-2::-1], [0.0]]) if right else fewer
        alpha = np.max((fewer[-1:] - below) / np.arange(1, right + 1), initial=0.0)
        return float(1 - (fewer[-1] if right else 0.0) + alpha * delta * 2 * canaries)

    if p_value(0.0) > UNCERTAINTY:
        return 0.0
    low, high = 0.0, 1.0
    while p_value(high) < UNCERTAINTY and high < 50:
        low, high = high, 2 * high
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(middle) < UNCERTAINTY else (low, middle)
    return low


def insert_canaries(subject: Subject, seed: int = 0) -> Bound:
    """Runs ``subject`` once with canaries at its first node; it has to be private."""
    private = subject.setting.objective.private
    if not isinstance(private, DP):
        raise HoldfastError("audit: canaries measure the epsilon of samples; set private = {epsilon = ...}")
    rng = np.random.default_rng(seed)
    made = make_canaries(subject.data, rng)
    inside = rng.random(len(made.y)) < 0.5
    simulation = subject.with_data(
        with_canaries(subject.data, made, inside), subject.setting.seed
    ).simulation()
    moved = torch.zeros_like(subject.problem.x0, dtype=torch.float64)
    for _ in range(subject.rounds):
        heard = overheard(simulation)
        if heard.sent[0]:
            moved += heard.models[0] - heard.before[0]
    scores = -_shares(subject, made, moved)
    order = scores.argsort(descending=True).numpy()
    half = int(GUESSED * len(order)) // 2
    right = int(inside[order[:half]].sum() + (~inside[order[-half:]]).sum())
    return Bound(refuted_epsilon(len(order), 2 * half, right, private.delta), right, 2 * half, len(order))


def without_noise(subject: Subject) -> Subject:
    """The same with clipped gradients and no noise, which the test must notice."""
    assert isinstance(subject.setting.objective.private, DP)
    return replace(subject, noiseless=True)


def make_canaries(data: FederatedData, rng: np.random.Generator) -> Pair:
    """Inputs in orthogonal directions, each with two of the classes."""
    if not data.x.is_floating_point():
        raise HoldfastError(
            "audit: canaries are made of floating-point numbers, and samples are stored as integers"
        )
    shape, numbers, classes = data.x.shape[1:], data.x[0].numel(), data.classes or 2
    directions = min(numbers, MOST_CANARIES // 2)
    axes = np.linalg.qr(rng.standard_normal((numbers, directions)))[0].T
    inputs = (
        torch.as_tensor(np.repeat(axes, 2, 0)).to(data.x) * LARGE * data.x.flatten(1).norm(dim=1).median()
    )
    labels = np.stack([rng.choice(classes, 2, replace=False) for _ in range(directions)]).ravel()
    return Pair(inputs.view(-1, *shape), torch.as_tensor(labels).to(data.y))


def with_canaries(data: FederatedData, made: Pair, inside: np.ndarray) -> FederatedData:
    """``data`` with the canaries ``inside`` [m] at the end of node 0's samples."""
    assert data.y is not None
    first, rows = int(data.counts[0]), torch.as_tensor(np.flatnonzero(inside))
    counts = data.counts.copy()
    counts[0] += len(rows)
    x, y = (
        torch.cat([whole[:first], more[rows], whole[first:]])
        for whole, more in ((data.x, made.x), (data.y, made.y))
    )
    return replace(data, x=x, y=y, counts=counts)


def _shares(subject: Subject, made: Pair, moved: Tensor) -> Tensor:
    """[m]: the component of every canary's gradient in the direction ``moved`` [d].

    The node's other samples are known to the strongest adversary, so their gradients are fitted, too: least
    squares, with a small penalty.
    """
    others = subject.data.node(0)
    both = Pair(torch.cat([made.x, others.x]), torch.cat([made.y, others.y]))
    slopes = _slopes(subject, both)
    gram = slopes @ slopes.T
    fitted = torch.linalg.solve(gram + PENALTY * torch.eye(len(gram), dtype=gram.dtype), slopes @ moved)
    shares: Tensor = fitted[: len(made.y)]
    return shares


def _slopes(subject: Subject, samples: Pair) -> Tensor:
    """[m, d]: the gradient of every sample at the initial model, scaled to length 1."""
    problem, key = subject.problem, torch.zeros(4, dtype=torch.int64)

    def one(row: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return problem.row_loss.value(row, Batch(Pair(x[None], y[None]), row.new_ones(1)), key)

    [prepared] = problem.source.input_transform.in_parts(samples, len(samples.y))
    found = vmap(grad(one), in_dims=(None, 0, 0))(problem.x0, prepared.x, prepared.y).double()
    slopes: Tensor = found / found.norm(dim=1, keepdim=True).clamp(min=1e-30)
    return slopes
