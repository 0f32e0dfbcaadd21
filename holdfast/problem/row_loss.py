"""What one row of parameters costs on a batch: a model and a loss together, as backends see them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from holdfast.problem.flat import FlatModel
from holdfast.problem.losses import Loss
from holdfast.problem.source import Batch


class RowLoss:
    """The only place that looks into a batch: its samples are inputs for the model, targets for the loss."""

    def __init__(self, model: FlatModel, loss: Loss) -> None:
        self.model, self.loss = model, loss

    def copy(self) -> RowLoss:
        """The same with a model of its own, for another thread: modules are altered while they are called."""
        return RowLoss(self.model.copy(), self.loss)

    def through(self, run: Callable[..., Any]) -> RowLoss:
        """The same with another way to run the model's modules."""
        return RowLoss(self.model.through(run), self.loss)

    def differentiable(self, parameters: dict[str, Tensor], batch: Batch, key: Tensor) -> Tensor:
        """A number whose gradient is that of ``value``; of the model's parameters by name."""
        outputs = self.model.train(parameters, batch.samples.x, key)
        return (self.loss.differentiable(outputs, batch.samples.y) * batch.weight).sum()

    def value(self, row: Tensor, batch: Batch, key: Tensor) -> Tensor:
        """The weighted sum of losses in training."""
        outputs = self.model.train(self.model.parameters(row), batch.samples.x, key)
        return (self.loss.values(outputs, batch.samples.y) * batch.weight).sum()

    def evaluated(self, row: Tensor, batch: Batch) -> Tensor:
        """The weighted sum of losses in eval mode."""
        return (self.loss.values(self.outputs(row, batch.samples), batch.samples.y) * batch.weight).sum()

    def evaluated_gradient(self, row: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """``evaluated`` and its gradient [d]."""
        plain = without_fused_layers() if self.model.recurrent else nullcontext()
        with torch.enable_grad(), plain:
            at = row.detach().requires_grad_()
            value = self.evaluated(at, batch)
            [gradient] = torch.autograd.grad(value, at, materialize_grads=True)
        return value.detach(), gradient

    def tested(self, row: Tensor, samples: Any) -> Tensor:
        """[2]: the number of samples that are classified correctly, and the sum of losses, in eval mode."""
        outputs = self.outputs(row, samples)
        loss = self.loss.values(outputs, samples.y).sum()
        if not self.loss.has_accuracy:
            return torch.stack([torch.zeros_like(loss), loss])
        return torch.stack([self.loss.correct(outputs, samples.y).sum(), loss])

    def outputs(self, row: Tensor, samples: Any) -> Tensor:
        """The model's outputs in eval mode."""
        return self.model.evaluate(row, samples.x)

    def probe(self, samples: Any, stacked: bool) -> tuple[int, ...]:
        """The shape of the outputs; raises, naming the layer, if copies of the model cannot be trained."""
        return self.model.probe(samples.x, stacked)


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
