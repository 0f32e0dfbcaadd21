"""Running statistics of BatchNorm, estimated from data where models are evaluated.

While a model trains, BatchNorm normalises by the statistics of the batch, here as in torch. The means and
variances that it uses in eval mode are not averaged along the way: they are computed from a fixed number of a
node's training samples for the model as it then is ("precise BatchNorm", Wu and Johnson, "Rethinking Batch in
BatchNorm", 2021). An average of models is a new model, whose statistics are no average of theirs. And a
training step stays a function of the parameters alone: methods, checkpoints and engines need no knowledge of
statistics.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

Buffers = Literal["local", "average"]
"""Whose statistics a node's model is evaluated with: those of its own data, as in FedBN (Li et al., 2021), or
the average over all nodes. The average of all models is evaluated with the latter."""

_now = threading.local()  # ``found``: the statistics of every layer that ran in this thread, by its name


class Measuring(nn.Module):
    """BatchNorm that normalises by the batch and notes its statistics where ``measuring`` says so."""

    traceable = True
    place: str
    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def _get_name(self) -> str:
        return type(self).__name__

    def forward(self, input: Tensor) -> Any:
        if (found := getattr(_now, "found", None)) is None:
            return super().forward(input)
        over = [0, *range(2, input.ndim)]
        variance, mean = torch.var_mean(input, over, correction=0)
        found.setdefault(self.place, []).append(torch.cat([mean, variance]))
        return functional.batch_norm(input, None, None, self.weight, self.bias, training=True, eps=self.eps)


_MEASURING: dict[type, type] = {
    kind: type(kind.__name__, (Measuring, kind), {"traceable": True})
    for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
}


class Tracked(NamedTuple):
    """A layer with statistics."""

    place: str
    features: int


def tracks(layer: nn.Module) -> TypeGuard[nn.modules.batchnorm._BatchNorm]:
    """Whether ``layer`` is a BatchNorm that torch would keep running statistics for while it trains."""
    kinds = (*_MEASURING, *_MEASURING.values())
    return type(layer) in kinds and layer.training and bool(layer.track_running_stats)


def tracked(module: nn.Module) -> list[Tracked]:
    """The layers whose statistics are estimated; those in eval mode keep what they have."""
    return [Tracked(name, layer.num_features) for name, layer in module.named_modules() if tracks(layer)]


def by_batch(module: nn.Module) -> nn.Module:
    """``module``, for training, without running statistics, in place."""
    for layer in module.modules():
        if tracks(layer):
            layer.track_running_stats = False
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None
    return module


def to_measure(module: nn.Module) -> nn.Module:
    """``module``, for evaluation, with layers that can note their statistics, in place."""
    for name, layer in module.named_modules():
        if tracks(layer):
            layer.place = name
            layer.__class__ = _MEASURING.get(type(layer), type(layer))
    return module


@contextmanager
def measuring() -> Iterator[dict[str, list[Tensor]]]:
    """Layers of this thread's models note their statistics, [2 C] for each call."""
    _now.found = {}
    try:
        yield _now.found
    finally:
        _now.found = None


def pooled(statistics: Tensor) -> Tensor:
    """Statistics of several equal shares of the data, [k, ..., 2, s], as those of the whole, [..., 2, s].

    By the law of total variance: the mean of the variances plus the variance of the means.
    """
    return from_moments(moments(statistics).mean(0))


def moments(statistics: Tensor) -> Tensor:
    """Means and second moments, [..., 2, s], of means and variances: moments of shares are averaged."""
    mean, variance = statistics.unbind(-2)
    return torch.stack([mean, variance + mean.square()], -2)


def from_moments(given: Tensor) -> Tensor:
    """The inverse of ``moments``."""
    mean, second = given.unbind(-2)
    return torch.stack([mean, (second - mean.square()).clamp_min(0)], -2)
