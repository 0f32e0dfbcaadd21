"""Images with augmentation: shifted and noisy anew whenever they are drawn, from a torch Dataset.

python examples/images.py [--rounds 30]

Six nodes have seen other digits. The transforms draw from torch's generator, which holdfast seeds from
(seed, node, round, step): every batch is new, and a run that is resumed sees the same.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset

import holdfast as hf

NODES = 6


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Images of 8 x 8 pixels, moved by up to a pixel, with noise."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        down, right = torch.randint(-1, 2, (2,)).tolist()
        moved = torch.roll(self.images[i], (down, right), dims=(1, 2))
        return moved + 0.1 * torch.randn_like(moved), self.labels[i]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    given = parser.parse_args()
    x, y = load_digits(return_X_y=True)
    images, labels = torch.tensor(x / 16, dtype=torch.float32).reshape(-1, 1, 8, 8), torch.tensor(y)
    split = hf.partition(images[:1400], labels[:1400], hf.Dirichlet(0.2), nodes=NODES, seed=0)
    data = hf.from_datasets([Augmented(*split.node(node)) for node in range(NODES)])
    print(data.description)
    result = hf.train(
        hf.SCAFFOLD(lr=0.1, local_steps=5),
        model=net(),
        data=data,
        test=(images[1400:], labels[1400:]),
        metrics=["average_accuracy"],
        evaluate_every=given.rounds,
        rounds=given.rounds,
        progress=False,
    )
    print(f"test accuracy {result.history['average_accuracy'][-1]:.3f}")


if __name__ == "__main__":
    main()
