"""The loss of one row of parameters on a batch: a model and a loss together, as backends use them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from holdfast.core.tree import Tree
from holdfast.problem.flat import FlatModel, Run
from holdfast.problem.forward import forward
from holdfast.problem.losses import Loss
from holdfast.problem.source import Batch


class RowLoss:
    """A loss of a model: weighted sums over the samples of a batch.

    A loss returns a number for each sample, [B], which are weighted one by one; or, where it is not
    ``per_sample``, one number [] for the batch, which is weighted by the sum of all weights. ``run``, if it
    is given, is called instead of the model's module.
    """

    def __init__(self, model: FlatModel, loss: Loss) -> None:
        self.model, self.loss = model, loss
        model.draws |= not loss.traceable  # a user's own loss or step may call dropout, too

    def copy(self) -> RowLoss:
        """The same with a model of its own, for another thread: modules are altered while they are called."""
        return RowLoss(self.model.copy(), self.loss)

    def differentiable(
        self, parameters: dict[str, Tensor], batch: Batch, key: Tensor, run: Run | None = None
    ) -> Tensor:
        """A number whose gradient is that of ``value``; of the model's parameters by name."""
        losses = self.model.train(parameters, self.loss.slopes, batch.samples, key, run)
        return (losses * batch.weight).sum()

    def backward(self, parameters: dict[str, Tensor], batch: Batch, key: Tensor) -> Tensor:
        """Adds the gradient of ``differentiable``, which is returned, to that of ``parameters``.

        All within one call of the model: a part with gradient checkpointing is computed again in the backward
        pass, and must find the same parameters there.
        """

        def call(model: Any, samples: Tree) -> Tensor:
            total: Tensor = (self.loss.slopes(model, samples) * batch.weight).sum()
            total.backward()
            return total.detach()

        return self.model.train(parameters, call, batch.samples, key)

    def value(self, row: Tensor, batch: Batch, key: Tensor, run: Run | None = None) -> Tensor:
        """The weighted sum of losses in training."""
        losses = self.model.train(self.model.parameters(row), self.loss.costs, batch.samples, key, run)
        return (losses * batch.weight).sum()

    def evaluated(self, row: Tensor, batch: Batch) -> Tensor:
        """The weighted sum of losses in eval mode."""
        return (self.model.evaluate(row, self.loss.costs, batch.samples) * batch.weight).sum()

    def evaluated_gradient(self, row: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """``evaluated`` and its gradient [d]."""
        at = row.detach().requires_grad_()

        def call(model: Any, samples: Tree) -> Any:  # both at once, for the reason in ``backward``
            value = (self.loss.costs(model, samples) * batch.weight).sum()
            return value.detach(), *torch.autograd.grad(value, at, materialize_grads=True)

        plain = without_fused_layers() if self.model.recurrent else nullcontext()
        with torch.enable_grad(), plain:
            value, gradient = self.model.evaluate(at, call, batch.samples)
        return value, gradient[: self.model.dim]

    def measured(self, row: Tensor, samples: Tree) -> Tensor:
        """The statistics [2, s] of BatchNorm on a batch."""
        return self.model.measured(row, self.loss.costs, samples)

    def tested(self, row: Tensor, samples: Tree, run: Run | None = None) -> Tensor:
        """[2]: the number of samples that are classified correctly, and the sum of losses, in eval mode."""
        return self.model.evaluate(row, self.loss.tested, samples, run)

    def outputs(self, row: Tensor, samples: Tree, run: Run | None = None) -> Any:
        """The model's outputs in eval mode."""
        return self.model.evaluate(row, forward, samples, run)

    def probe(self, samples: Tree, stacked: bool) -> Any:
        """The outputs in training; raises, naming the layer, if copies of the model cannot be trained."""
        return self.model.probe(self.loss.first_part, samples, stacked, self.loss.calls)


@contextmanager
def without_fused_layers() -> Iterator[None]:
    """Without kernels for whole recurrent layers, which lack second derivatives or gradients in eval mode."""
    libraries: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.mkldnn)
    before = [library.enabled for library in libraries]
    for library in libraries:
        library.enabled = False
    try:
        yield
    finally:
        for library, enabled in zip(libraries, before, strict=True):
            library.enabled = enabled
