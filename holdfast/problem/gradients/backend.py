"""What a gradient backend does: everything that is computed for many rows, each with its own parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from holdfast.core.memory import total_memory
from holdfast.core.tree import Tree, tree_map
from holdfast.problem.row_loss import RowLoss
from holdfast.problem.source import Batch

# The share of memory that the activations of rows computed together may take.
SHARE_FOR_ACTIVATIONS = 0.25
# Memory of a backward pass over what the forward pass keeps for it: that, its own results, and inputs.
BACKWARD_OVER_FORWARD = 3

BackendName = Literal["auto", "stacked", "loop", "adapters"]


class Backend(Protocol):
    """Rows ``x`` [m, d], each on its own batch: the tensors of ``batch`` are [m, B, ...].

    ``keys`` [m, 4] = (seed, node, round, step) feed dropout.
    """

    stacked: bool  # whether all rows are computed by the same operations, in one call
    vmapped: bool  # whether torch's function transforms have to batch every layer of the model
    fuses: bool  # whether updates of rows are worth compiling together with gradients
    traceable: bool  # whether a gradient does the same in every call, as far as its parts declare

    @property
    def description(self) -> str:
        """How rows are computed, and why, in words."""

    def values_and_gradients(self, x: Tensor, batch: Batch, keys: Tensor) -> tuple[Tensor, Tensor]:
        """The training losses, [m], and their gradients, [m, d]."""

    def values(self, x: Tensor, batch: Batch, keys: Tensor) -> Tensor:
        """The training losses, [m]."""

    def hessians(self, x: Tensor, batch: Batch, keys: Tensor) -> Tensor:
        """Their Hessians, [m, d, d]."""

    def hessian_products(self, x: Tensor, v: Tensor, batch: Batch, keys: Tensor) -> Tensor:
        """Those Hessians times ``v`` [m, d], without forming them."""

    def tested(self, x: Tensor, samples: Tree) -> Tensor:
        """[m, 2]: correct samples and summed losses of every row in eval mode, on the same ``samples``."""

    def evaluated(self, row: Tensor, batch: Batch) -> Tensor:
        """The weighted sum of losses [] of one row [d] in eval mode, for a batch [B, ...]."""

    def outputs(self, x: Tensor, samples: Tree) -> Any:
        """The outputs of every row in eval mode, [m, B, ...], on the same ``samples``."""

    def step_bytes(self, nodes: int, batch: int) -> int:
        """Bytes of the activations while so many nodes compute a gradient, each of ``batch`` samples."""


class Activations:
    """The memory that gradients take beside their rows.

    ``example``: a batch of one or two samples. ``at_once``: samples of all rows whose activations are kept;
    by default as many as a share of the memory holds. Both are found on first use, which must come before
    anything is compiled or recorded.
    """

    def __init__(
        self,
        loss: RowLoss,
        example: Batch,
        at_once: int | None = None,
        *,
        share: float = SHARE_FOR_ACTIVATIONS,
        over_forward: float = BACKWARD_OVER_FORWARD,
    ) -> None:
        self.loss, self.example, self._given = loss, example, at_once
        self.share, self.over_forward = share, over_forward

    def allowing(self, share: float, over_forward: float) -> Activations:
        """The same with another share of memory, and another need relative to the forward pass."""
        return Activations(self.loss, self.example, self._given, share=share, over_forward=over_forward)

    @cached_property
    def at_once(self) -> int:
        """Samples of all rows together."""
        budget = self.share * total_memory(self.loss.model.x0.device)
        return self._given or int(budget // (self.over_forward * self.of_sample))

    @cached_property
    def of_sample(self) -> int:
        """Bytes that the forward pass of one sample keeps for the backward pass."""
        model = self.loss.model
        row = model.x0.detach().clone().requires_grad_()
        [[module, _], _] = model.parts
        of_model = {_memory(tensor) for tensor in (row, *module.parameters(), *module.buffers())}
        kept = {}

        def keep(tensor: Tensor) -> Tensor:
            if _memory(tensor) not in of_model:  # the model itself, frozen or not, is no activation
                kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            value = self.loss.differentiable(model.parameters(row), self.example, no_key(row))
        del value  # alive until here, so that no two tensors had the same address
        return max(1, sum(kept.values()) // len(self.example.weight))

    def of_step(self, samples: int) -> int:
        """Bytes while a gradient of so many samples is computed."""
        return int(self.over_forward * samples * self.of_sample)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def in_parts(
    compute: Callable[[Tensor, Batch, Tensor], tuple[Tensor, Tensor]],
    at_once: int,
    x: Tensor,
    batch: Batch,
    keys: Tensor,
) -> tuple[Tensor, Tensor]:
    """``compute(x, batch, keys)``, of so many rows at a time that they have about ``at_once`` samples."""
    size = max(1, at_once // batch.weight.shape[1])
    if len(x) <= size:
        return compute(x, batch, keys)
    parts = []
    for first in range(0, len(x), size):
        some = slice(first, first + size)
        own = tree_map(lambda part, some=some: part[some], batch)
        parts.append(compute(x[some], own, keys[some]))
    values, gradients = zip(*parts, strict=True)
    return torch.cat(values), torch.cat(gradients)


def row_value_and_gradient(loss: RowLoss, row: Tensor, batch: Batch, key: Tensor) -> tuple[Tensor, Tensor]:
    """Value and gradient [d] of one row, written layer by layer to its place, without a second copy."""
    gradient = torch.zeros_like(row)
    parameters = loss.model.parameters(row.detach())
    for parameter, place in zip(parameters.values(), loss.model.parameters(gradient).values(), strict=True):
        parameter.requires_grad_().grad = place
    return loss.backward(parameters, batch, key), gradient


def no_key(row: Tensor) -> Tensor:
    """A key for dropout where it does not matter."""
    return torch.zeros(4, dtype=torch.int64, device=row.device)
