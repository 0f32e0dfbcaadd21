"""How samples enter a model: on its device, in its type of numbers, as (x - mean)/std."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.tree import leaves, tree_map
from holdfast.data.dataset import prepare
from holdfast.data.samples import described, map_inputs, targets_of


class Entrance:
    """``like``: a tensor with the type and device of the model."""

    def __init__(self, like: Tensor, mean: float = 0.0, std: float = 1.0) -> None:
        self.device, self.dtype = like.device, like.dtype
        self.prepare = partial(prepare, mean=mean, std=std, dtype=self.dtype)
        self._copying = torch.cuda.Stream(self.device) if like.is_cuda else None  # type: ignore[no-untyped-call]

    def place(self, samples: Any) -> Any:
        """Samples as they are stored where the model is; real targets in its type of numbers."""
        there = tree_map(lambda part: part.to(self.device), samples)
        target = targets_of(there)
        if target is None or not target.is_floating_point() or target.dtype == self.dtype:
            return there
        cast = target.to(self.dtype)
        return tree_map(lambda part: cast if part is target else part, there)

    def enter(self, samples: Any) -> Any:
        """Samples read on the host as the model sees them."""
        return map_inputs(self.prepare, self.place(self.send(samples)))

    def send(self, tree: Any) -> Any:
        """What lies on the host, on the device.

        A GPU copies it beside what it computes, so that neither it nor the host waits for the other.
        """
        if self._copying is None:
            return tree
        now = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._copying):
            there = tree_map(lambda part: part.pin_memory().to(self.device, non_blocking=True), tree)
        now.wait_stream(self._copying)
        for part in leaves(there):
            part.record_stream(now)
        return there

    def in_parts(self, stored: Any, at_once: int) -> Iterator[Any]:
        """Stored samples as the model sees them, some at a time."""
        for first in range(0, len(next(leaves(stored))), at_once):
            some = slice(first, first + at_once)
            yield map_inputs(self.prepare, tree_map(lambda part, some=some: part[some], stored))

    @staticmethod
    def check_alike(samples: Any, expected: dict[str, str]) -> None:
        """Refuses a test set whose samples are not as those for training, which are ``described`` so."""
        given = described(samples)
        if list(given) != list(expected):
            raise HoldfastError(f"test: columns are {list(given)}, for training {list(expected)}")
        for name in expected:
            if given[name] != expected[name]:
                raise HoldfastError(
                    f"test {name}: samples are {given[name]}, for training {expected[name]}; make them alike"
                )
