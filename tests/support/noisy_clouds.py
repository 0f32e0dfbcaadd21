"""Data sets whose items are drawn at random at every read, as a user's module would give them."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

import holdfast as hf

NAMES = "abc"  # of the nodes in a federation
SHAPE, CLASSES = 4, 3


class Noisy(Dataset[tuple[Tensor, int]]):
    """The items of one node, with noise from all three global generators."""

    def __init__(self, node: int) -> None:
        self.node = node

    def __len__(self) -> int:
        return 10 + self.node

    def __getitem__(self, item: int) -> tuple[Tensor, int]:
        label = (item * (self.node + 1)) % CLASSES
        x = torch.nn.functional.one_hot(torch.tensor(label), SHAPE) + 0.5 * torch.randn(SHAPE)
        return x + 0.5 * random.random() + torch.tensor(0.5 * np.random.random()), label


def tested() -> tuple[Tensor, Tensor]:
    y = torch.arange(9) % CLASSES
    return torch.nn.functional.one_hot(y, SHAPE).float(), y


def everybody(nodes: int, workers: int = 0) -> hf.TrainTest:
    """The data of all nodes, for an experiment."""
    parts = [Noisy(node) for node in range(nodes)]
    return hf.TrainTest(hf.from_datasets(parts, workers=workers, classes=CLASSES), tested())


def own(node: str) -> hf.TrainTest:
    """The data of one node, for its site."""
    return hf.TrainTest(Noisy(NAMES.index(node)), tested())


def batch(node: int, round: int, step: int) -> tuple[Tensor, Tensor]:
    """What a stream makes: labels that a node prefers."""
    y = (torch.randint(2, (6,)) + node) % CLASSES
    return torch.nn.functional.one_hot(y, SHAPE) + 0.5 * torch.randn(6, SHAPE), y


def streams(nodes: int) -> hf.TrainTest:
    return hf.TrainTest(hf.Stream(nodes=nodes, batch=batch, classes=CLASSES), tested())


def stream() -> hf.Stream:
    return hf.Stream(nodes=1, batch=batch)


def whole() -> Dataset[tuple[Tensor, int]]:
    """One data set, to be divided; without labels that are known beforehand."""
    return Noisy(20)
