"""Regression on the sensors of eight plants, on a ring: nobody is in the middle.

python examples/sensors.py [--rounds 60]

Every plant has worn its sensors in another way, so their data differ. Gossip averages with neighbours,
Local G-ECL corrects each plant's drift; both take as many gradients.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import holdfast as hf

PLANTS, SAMPLES = 8, 150


def readings(plant: int, seed: int) -> tuple[Tensor, Tensor]:
    """Six sensors, of which each plant runs in another range, and the wear in hours that they tell of."""
    draw = torch.Generator().manual_seed(1000 * seed + plant)
    x = torch.randn(SAMPLES, 6, generator=draw) * (0.5 + 0.25 * plant) + 0.4 * plant
    wear = torch.tanh(x[:, 0]) + 0.5 * x[:, 1] * torch.sigmoid(x[:, 2]) - 0.3 * x[:, 3]
    return x, wear + 0.05 * torch.randn(SAMPLES, generator=draw)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1), nn.Flatten(0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    given = parser.parse_args()
    for method in (hf.Gossip(lr=0.02, local_steps=20), hf.LocalGECL(lr=0.02, local_steps=20)):
        result = hf.train(
            method,
            model=net(),
            data=[readings(plant, seed=0) for plant in range(PLANTS)],
            test=[readings(plant, seed=1) for plant in range(PLANTS)],
            topology="ring",
            loss="mse",
            metrics={"mae": lambda outputs, targets: (outputs - targets).abs()},
            rounds=given.rounds,
            progress=False,
        )
        last = result.history.rows[-1]
        name = type(method).__name__
        print(f"{name:10} test loss {last['average_loss']:.4f}, mean error {last['mae']:.3f} hours")


if __name__ == "__main__":
    main()
