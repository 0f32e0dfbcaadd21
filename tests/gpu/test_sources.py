"""Samples that are drawn, augmented and read on the way to a GPU; these tests need one."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from devices import GPU_MARKS
from torch import Tensor, nn
from torch.utils.data import Dataset

import holdfast as hf
from holdfast.engines.simulate.choice import executor_for

pytestmark = GPU_MARKS

COUNTS = (40, 55, 48)


class Rows(Dataset):
    """Items that may be changed at random."""

    def __init__(self, count: int, noise: float) -> None:
        self.x = torch.randn(count, 6, generator=torch.Generator().manual_seed(count))
        self.noise = noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        x = self.x[i]
        return (x + self.noise * torch.randn(6) * random.random() if self.noise else x), i % 3


def shifted(samples: Any, key: Tensor) -> Any:
    return samples._replace(x=samples.x + hf.random_normal(key, samples.x.shape).to(samples.x))


def models(device: str, data: Any, rounds: int = 6, **options: Any) -> tuple[Tensor, str]:
    torch.manual_seed(0)
    options = {"batch_size": 8, "device": device, "dtype": torch.float64, "seed": 3, **options}
    problem = hf.build_problem(nn.Linear(6, 3), data, **options)
    problem.check_model()
    method, network = hf.LocalGECL(lr=0.1, local_steps=4), hf.Network.of(hf.ring(3))
    simulation = hf.Simulation(method, problem, network, executor=executor_for(torch.device(device)))
    how = simulation.prepare(rounds)
    for _ in range(rounds):
        simulation.step()
    return simulation.models.cpu(), how


@pytest.mark.parametrize("sampling", ["replacement", "epochs", "poisson"])
def test_recorded_rounds_draw_and_augment_as_a_cpu_does(sampling) -> None:
    data = hf.from_datasets([Rows(count, 0.0) for count in COUNTS])
    there, how = models("cuda", data, sampling=sampling, augment=shifted)
    assert "replayed from a CUDA graph" in how
    here, _ = models("cpu", data, sampling=sampling, augment=shifted)
    assert torch.allclose(there, here, rtol=1e-5, atol=1e-6)  # normal numbers are drawn in float32


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_items_read_when_drawn(workers, noise) -> None:
    data = hf.from_datasets([Rows(count, noise) for count in COUNTS], workers=workers, streaming=True)
    there, how = models("cuda", data)
    assert "step by step" in how
    assert "samples are read on the host" in how
    here, _ = models("cpu", data)
    assert torch.allclose(there, here, rtol=1e-10)
