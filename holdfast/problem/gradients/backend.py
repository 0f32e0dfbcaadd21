"""What a gradient backend does: everything that is computed for many rows, each with its own parameters."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from holdfast.core.memory import total_memory
from holdfast.problem.row_loss import RowLoss
from holdfast.problem.source import Batch

# Of all memory, what the activations of rows that are computed together may take.
SHARE_FOR_ACTIVATIONS = 0.25
# What a backward pass needs, over what the forward pass keeps for it: that, its own results, and inputs.
BACKWARD_OVER_FORWARD = 3

BackendName = Literal["auto", "stacked", "loop"]


class Backend(Protocol):
    """Rows ``x`` [m, d], each on its own batch: the tensors of ``batch`` are [m, B, ...].

    ``keys`` [m, 4] = (seed, node, round, step) feed dropout.
    """

    stacked: bool  # whether all rows are computed by the same operations, in one call
    traceable: bool  # whether a gradient does the same in every call, as far as its parts declare

    @property
    def how(self) -> str:
        """How rows are computed, and why so, for people."""

    def gradients(self, x: Tensor, batch: Batch, keys: Tensor) -> Tensor:
        """Gradients [m, d] of the training losses."""

    def values(self, x: Tensor, batch: Batch, keys: Tensor) -> Tensor:
        """The training losses, [m]."""

    def hessians(self, x: Tensor, batch: Batch, keys: Tensor) -> Tensor:
        """Their Hessians, [m, d, d]."""

    def hessian_products(self, x: Tensor, v: Tensor, batch: Batch, keys: Tensor) -> Tensor:
        """Those Hessians times ``v`` [m, d], without forming them."""

    def tested(self, x: Tensor, samples: Any) -> Tensor:
        """[m, 2]: correct samples and summed losses of every row in eval mode, on the same ``samples``."""

    def step_bytes(self, nodes: int, batch: int) -> int:
        """What the activations take while so many nodes compute a gradient, each of ``batch`` samples."""


class Activations:
    """The memory that gradients take beside their rows.

    ``example``: a batch of one or two samples. ``at_once``: samples of all rows whose activations are kept;
    by default as many as a share of the memory holds. Both are found on first use, which must come before
    anything is compiled or recorded.
    """

    def __init__(self, loss: RowLoss, example: Batch, at_once: int | None = None) -> None:
        self.loss, self.example, self._given = loss, example, at_once

    @cached_property
    def at_once(self) -> int:
        """Samples of all rows together."""
        budget = SHARE_FOR_ACTIVATIONS * total_memory(self.loss.model.x0.device)
        return self._given or int(budget // (BACKWARD_OVER_FORWARD * self.of_sample))

    @cached_property
    def of_sample(self) -> int:
        """Bytes that the forward pass of one sample keeps for the backward pass."""
        model = self.loss.model
        row = model.x0.detach().clone().requires_grad_()
        kept = {}

        def keep(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage().data_ptr() != row.data_ptr():  # the model itself is no activation
                kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            value = self.loss.differentiable(model.parameters(row), self.example, no_key(row))
        del value  # alive until here, so that no two tensors were given the same place
        return max(1, sum(kept.values()) // len(self.example.weight))

    def of_step(self, samples: int) -> int:
        """Bytes while a gradient of so many samples is computed."""
        return BACKWARD_OVER_FORWARD * samples * self.of_sample


def row_gradient(loss: RowLoss, row: Tensor, batch: Batch, key: Tensor) -> Tensor:
    """The gradient [d] of one row, layer by layer put where it belongs: no second copy of it all."""
    gradient = torch.zeros_like(row)
    parameters = loss.model.parameters(row.detach())
    for parameter, place in zip(parameters.values(), loss.model.parameters(gradient).values(), strict=True):
        parameter.requires_grad_().grad = place
    loss.backward(parameters, batch, key)
    return gradient


def no_key(row: Tensor) -> Tensor:
    """A key for dropout where it does not matter."""
    return torch.zeros(4, dtype=torch.int64, device=row.device)
