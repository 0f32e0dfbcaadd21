"""DP-FedAvg and DP-SCAFFOLD of Noble et al. (2022), written out, against our methods with private gradients.

Their noise has the standard deviation 2 sigma C / (s R), for batches of s R samples of which one is replaced;
ours is that of a sample that is there or not, so our noise multiplier is their 2 sigma.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

import holdfast as hf
from holdfast.core.randomness import cohort
from holdfast.engines.common.simulation import Simulation
from holdfast.problem.flat import FlatModel
from holdfast.problem.losses import CrossEntropy
from holdfast.problem.model_problem import ModelProblem
from holdfast.problem.private import Release, counted_noise

USERS, SIZE, STEPS, ROUNDS, SEED = 4, 3, 3, 4, 5
CLIP, SIGMA, LR, SERVER_LR, PER_ROUND = 0.9, 0.6, 0.2, 0.7, 2
F64 = torch.float64


def problem() -> ModelProblem:
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(9 + i, 5, generator=generator), torch.arange(9 + i) % 3) for i in range(USERS)]
    torch.manual_seed(0)
    flat = FlatModel(nn.Sequential(nn.Linear(5, 3)), torch.device("cpu"), F64)
    options = {"batch_size": SIZE, "sampling": "poisson", "seed": SEED}
    return ModelProblem(flat, CrossEntropy(), hf.from_datasets(data), **options)


def private_gradient(own: ModelProblem, y: torch.Tensor, user: int, round: int, step: int) -> torch.Tensor:
    """H: the mean of clipped gradients of a batch, sample by sample, plus 2 sigma C / (s R) times noise."""
    batch = own.source.batch(torch.tensor([user]), round, step)
    total = torch.zeros_like(y)
    for x, label, weight in zip(batch.samples.x[0], batch.samples.y[0], batch.weight[0], strict=True):
        if weight:
            at = y.clone().requires_grad_()
            outputs = functional_call(own.model.template, own.model.parameters(at), (x[None],))
            [g] = torch.autograd.grad(nn.functional.cross_entropy(outputs, label[None]), at)
            total += g / max(1.0, float(g.norm()) / CLIP)
    noise = counted_noise(SEED)(torch.tensor([user]), round, step, 0, own.dim)[0].double()
    return total / SIZE + 2 * (SIGMA / 2) * CLIP / SIZE * noise


def published(scaffold: bool) -> torch.Tensor:
    """The server's model after all rounds."""
    own = problem()
    x, c = own.x0.clone(), torch.zeros_like(own.x0)
    own_c = [torch.zeros_like(x) for _ in range(USERS)]
    for t in range(ROUNDS):
        users = cohort(SEED, t, USERS, PER_ROUND).tolist()
        of_x, of_c = torch.zeros_like(x), torch.zeros_like(x)
        for i in users:
            y, gradients = x.clone(), []
            for k in range(STEPS):
                gradients.append(private_gradient(own, y, i, t, k))
                y = y - LR * (gradients[-1] - own_c[i] + c)
            of_x += (y - x) / PER_ROUND
            if scaffold:
                after = torch.stack(gradients).mean(0)  # nothing more is clipped or noised
                of_c += (after - own_c[i]) / USERS
                own_c[i] = after
        x, c = x + SERVER_LR * of_x, c + of_c
    return x


@pytest.mark.parametrize("scaffold", [False, True])
def test_they_are_our_methods_with_private_gradients(scaffold) -> None:
    kind = hf.SCAFFOLD if scaffold else hf.FedAvg
    method = kind(lr=LR, local_steps=STEPS, server_lr=SERVER_LR)
    noised = problem().protected(Release(CLIP, SIGMA, counted_noise(SEED)))
    run = Simulation(method, noised, hf.server(USERS), seed=SEED, cohort=PER_ROUND)
    for _ in range(ROUNDS):
        run.step()
    expected = published(scaffold)
    assert np.abs((expected - problem().x0).numpy()).max() > 0.05
    torch.testing.assert_close(run.models[0], expected, rtol=1e-10, atol=1e-12)
