"""Private gradients on a GPU against the CPU, and rounds replayed against the plain simulator."""

from __future__ import annotations

import pytest
import torch
from devices import GPU_MARKS
from torch import nn

import holdfast as hf
from holdfast.core.precision import compute_in
from holdfast.engines.common.simulation import Simulation
from holdfast.engines.simulate.choice import executor_for
from holdfast.problem.flat import FlatModel
from holdfast.problem.losses import CrossEntropy
from holdfast.problem.model_problem import ModelProblem
from holdfast.problem.private import Release, counted_noise

pytestmark = GPU_MARKS

NODES = 5


def chain() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 3),
    )


class Residual(nn.Module):
    """Not a chain, so samples are taken one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.norm, self.last = nn.GroupNorm(2, 6), nn.Linear(6 * 64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        return self.last((x + self.norm(self.second(x))).flatten(1))


def problem(module: nn.Module, device: str, **options) -> ModelProblem:
    compute_in("float32")
    generator = torch.Generator().manual_seed(1)
    data = [
        (torch.randn(20 + node, 1, 8, 8, generator=generator), torch.arange(20 + node) % 3)
        for node in range(NODES)
    ]
    model = FlatModel(module, torch.device(device), torch.float32)
    given = {"batch_size": 4, "sampling": "poisson", **options}
    own = ModelProblem(model, CrossEntropy(), hf.from_datasets(data), seed=5, **given)
    return own.protected(Release(0.7, 1.3, counted_noise(9)))


@pytest.mark.parametrize("make", [chain, Residual])
@pytest.mark.parametrize("options", [{}, {"batch_size": None, "sampling": "replacement"}])
def test_gradients_are_those_of_the_cpu(make, options) -> None:
    torch.manual_seed(0)
    module = make()
    here, there = (problem(module, device, **options) for device in ("cpu", "cuda"))
    for round in range(3):
        one, other = (
            own.minibatch_values_and_grads(
                [own.x0.expand(NODES, -1), own.x0.expand(NODES, -1) + 0.1],
                torch.arange(NODES, device=own.x0.device),
                round,
                1,
            )
            for own in (here, there)
        )
        for (value, gradient), (found, got) in zip(one, other, strict=True):
            torch.testing.assert_close(found.cpu(), value, rtol=1e-4, atol=1e-4)
            assert (got.cpu() - gradient).norm() <= 1e-4 * gradient.norm()


@pytest.mark.parametrize("planned", [1, 10**4], ids=["recorded", "compiled"])
@pytest.mark.parametrize(
    ("method", "network"),
    [
        (hf.FedAvg(lr=0.1, local_steps=3), hf.server(NODES)),
        (hf.SCAFFOLD(lr=0.1, local_steps=2), hf.server(NODES)),
        (hf.LocalGECL(lr=0.1, local_steps=2), hf.Network.of(hf.ring(NODES))),
    ],
    ids=["fedavg", "scaffold", "local-gecl"],
)
def test_replayed_rounds_have_the_same_noise(method, network, planned) -> None:
    torch.manual_seed(0)
    module = chain()
    plain = Simulation(method, problem(module, "cuda"), network, seed=7)
    replayed = Simulation(
        method, problem(module, "cuda"), network, seed=7, executor=executor_for(torch.device("cuda"))
    )
    assert "CUDA graph" in replayed.prepare(planned)
    for _ in range(3):
        plain.step()
        replayed.step()
    assert (plain.models - replayed.models).norm() <= 1e-4 * plain.models.norm()


def test_a_private_run_on_a_gpu_stays_within_its_budget() -> None:
    pytest.importorskip("dp_accounting", reason="the accounting needs holdfast[privacy]")
    result = hf.train(
        hf.FedAvg(lr=0.3, local_steps=2),
        model="linear",
        data="digits",
        nodes=4,
        rounds=4,
        batch_size=16,
        sampling="poisson",
        private=hf.DP(epsilon=3.0, delta=1e-5, clip=1.0),
        device="cuda",
        progress=False,
    )
    assert 2.9 < result.history.rows[-1]["epsilon"] <= 3.0
