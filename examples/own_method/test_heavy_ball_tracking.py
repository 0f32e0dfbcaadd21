"""What a method has to prove: it is exact, momentum helps, and for beta = 0 it is what it says."""

from __future__ import annotations

import torch
from heavy_ball_tracking import HeavyBallTracking
from torch import Tensor

import holdfast as hf

draw = torch.Generator().manual_seed(0)
TARGETS = torch.randn(6, 4, generator=draw, dtype=torch.float64)
SCALES = 1 + torch.rand(6, 4, generator=draw, dtype=torch.float64)
OPTIMUM = (SCALES * TARGETS).sum(0) / SCALES.sum(0)


def function(i: int):
    return lambda x: (SCALES[i] * (x - TARGETS[i]) ** 2).sum()


def run(method: hf.Algorithm, rounds: int) -> Tensor:
    functions = [function(i) for i in range(6)]
    return hf.minimize(functions, [0.0] * 4, method, rounds=rounds, topology="ring").x


def test_it_is_exact_on_heterogeneous_quadratics() -> None:
    assert (run(HeavyBallTracking(lr=0.05), 600)[-1] - OPTIMUM).abs().max() < 1e-10


def test_momentum_makes_it_faster() -> None:
    far = [(run(HeavyBallTracking(lr=0.02, beta=beta), 150)[-1] - OPTIMUM).abs().max() for beta in (0.0, 0.5)]
    assert far[1] < 0.1 * far[0]


def test_without_momentum_it_is_gradient_tracking() -> None:
    theirs = run(hf.GTSGD(lr=0.05, order="atc"), 30)
    assert torch.allclose(run(HeavyBallTracking(lr=0.05, beta=0.0), 30), theirs, rtol=0, atol=1e-12)
