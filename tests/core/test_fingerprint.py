"""Fingerprints: the same in another process, different for anything that changes a result."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.core.fingerprint import fingerprint


def scaled(factor: float) -> Any:
    return lambda r: factor / (r + 1)


class Thing:
    def __init__(self, value: Any) -> None:
        self.value = value
        self.me = self

    def plus_one(self, x: float) -> float:
        return x + 1

    def plus_two(self, x: float) -> float:
        return x + 2


@dataclass(frozen=True, slots=True)
class Slotted:
    value: float


class Slots:
    __slots__ = ("value",)

    def __init__(self, value: float) -> None:
        self.value = value


def with_default(value: float) -> Any:
    def function(x: float, *, factor: float = value) -> float:
        return factor * x

    return function


class Scaled(nn.Linear):
    def __init__(self, factor: float) -> None:
        super().__init__(2, 2)
        self.factor = factor


def frozen(value: float) -> nn.Module:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.bias, value)
    model.bias.requires_grad_(False)
    return model


ALIKE = {
    "methods": lambda: hf.LocalGECL(lr=0.1, optimizer=hf.Momentum(0.9)),
    "schedules": lambda: hf.Gossip(lr=scaled(0.5)),
    "named schedules": lambda: hf.Gossip(lr=hf.cosine(0.5, 10)),
    "modules, however initialised": lambda: nn.Sequential(nn.Linear(3, 2), nn.ReLU()),
    "networks": lambda: hf.Network.of(hf.ring(5)),
    "data": lambda: hf.partition(torch.zeros(6, 2), torch.arange(6) % 2, hf.IID(), nodes=2, seed=0),
    "datasets": lambda: torch.utils.data.TensorDataset(torch.ones(3)),
    "cycles": lambda: Thing([1, {"a": Thing(2)}]),
    "sets": lambda: {"b", "a", "c"},
    "bfloat16": lambda: torch.ones(3, dtype=torch.bfloat16),
    "slots": lambda: [Slotted(1.0), Slots(2.0)],
    "paths and bytes": lambda: [Path("a"), b"a", np.int64(3)],
    "bound methods": lambda: Thing(1).plus_one,
    "words": lambda: np.array(["a", None], dtype=object),
}


@pytest.mark.parametrize("make", ALIKE.values(), ids=ALIKE)
def test_made_twice_it_is_the_same(make) -> None:
    assert fingerprint(make()) == fingerprint(make())


def test_shared_or_copied_is_the_same() -> None:
    one = [1.0, 2.0]
    assert fingerprint([one, one]) == fingerprint([[1.0, 2.0], [1.0, 2.0]])


DIFFERENT = {
    "hyperparameters": (hf.LocalGECL(lr=0.1), hf.LocalGECL(lr=0.2)),
    "classes": (hf.Gossip(lr=0.1), hf.DSGD(lr=0.1)),
    "what a function has captured": (scaled(0.5), scaled(0.25)),
    "what a function computes": (lambda x: x + 1, lambda x: x + 2),
    "arguments of a partial": (partial(scaled, 1.0), partial(scaled, 2.0)),
    "one number": (torch.zeros(100), torch.zeros(100).index_fill(0, torch.tensor(99), 1e-30)),
    "types": (torch.zeros(2), torch.zeros(2).double()),
    "shapes": (np.zeros((2, 3)), np.zeros((3, 2))),
    "frozen values": (frozen(0.0), frozen(1.0)),
    "what is trained": (nn.Linear(2, 2), frozen(0.0)),
    "layers": (nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Sequential(nn.Linear(2, 2), nn.Tanh())),
    "settings of layers": (nn.Dropout(0.1), nn.Dropout(0.2)),
    "graphs": (nx.path_graph(4), nx.cycle_graph(4)),
    "mixing weights": (hf.Network.of(hf.ring(5)), hf.Network.of(hf.ring(5), "laplacian")),
    "attributes": (Thing(1), Thing(2)),
    "order": ([1, 2], [2, 1]),
    "1 and 1.0": (1, 1.0),
    "methods of an object": (Thing(1).plus_one, Thing(1).plus_two),
    "the object of a method": (Thing(1).plus_one, Thing(2).plus_one),
    "defaults of keywords": (with_default(1.0), with_default(2.0)),
    "slots": (Slots(1.0), Slots(2.0)),
    "a dataclass with slots": (Slotted(1.0), Slotted(2.0)),
    "numbers of numpy": (np.int64(1), np.int64(2)),
    "paths": (Path("a"), Path("b")),
    "bytes": (b"a", b"b"),
    "numbers in a model of one's own": (Scaled(1.0), Scaled(2.0)),
    "layers in eval mode": (nn.Sequential(nn.Dropout(0.5)), nn.Sequential(nn.Dropout(0.5).eval())),
}


@pytest.mark.parametrize("pair", DIFFERENT.values(), ids=DIFFERENT)
def test_a_difference_shows(pair: tuple[Any, Any]) -> None:
    assert fingerprint(pair[0]) != fingerprint(pair[1])


def test_another_process_agrees() -> None:
    code = (
        "import torch, holdfast as hf\n"
        "from torch import nn\n"
        "from holdfast.core.fingerprint import fingerprint\n"
        "print(fingerprint([hf.LocalGECL(lr=hf.cosine(0.1, 9)), nn.Linear(2, 3), {'b', 'a'}, torch.ones(2)]))"
    )
    here = fingerprint([hf.LocalGECL(lr=hf.cosine(0.1, 9)), nn.Linear(2, 3), {"b", "a"}, torch.ones(2)])
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == here
