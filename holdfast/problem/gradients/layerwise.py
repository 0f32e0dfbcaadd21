"""Clipped gradients layer by layer, without the gradient of any single sample.

The gradient of a sample in the weights of a layer is made of what enters the layer, a, and of the gradient in
what leaves it, g. In a linear layer it is g aᵀ, whose norm is |g| |a|, and a weighted sum over samples is one
product. So one backward pass to the layers' outputs is enough for all norms and for the clipped sum (Bu et
al., "Differentially private optimization on large model at small cost", 2023).
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn import functional

from holdfast.problem.gradients.backend import no_key
from holdfast.problem.gradients.convolution import PixelConv2d
from holdfast.problem.gradients.layers import NarrowLinear, PlaneConv2d
from holdfast.problem.row_loss import RowLoss
from holdfast.problem.source import Batch

LINEAR, CONVOLUTIONS = (nn.Linear, NarrowLinear), (nn.Conv2d, PlaneConv2d, PixelConv2d)
ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Softplus)
BY_SAMPLE = (*ACTIVATIONS, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.Identity)


class Layerwise:
    """Norms and weighted sums of the gradients of samples, for models that ``fits`` accepts."""

    def __init__(self, loss: RowLoss) -> None:
        self.loss = loss
        [[module, _], _] = loss.model.parts
        self.module = deepcopy(module, {id(t): t for t in (*module.parameters(), *module.buffers())})
        self._entered: dict[str, Tensor] = {}  # what the layers are given, while the module runs
        self._moved: dict[str, Tensor] = {}  # zeros that are added to what they give
        self.layers = {
            name: layer
            for name, layer in self.module.named_modules()
            if any(f"{name}.{part}".lstrip(".") in loss.model.shapes for part in ("weight", "bias"))
        }
        for name, layer in self.layers.items():
            layer.forward = partial(self._observed, name, layer)
        self.shapes: dict[str, torch.Size] = {}  # of what they give for a sample

    def try_on(self, batch: Batch) -> None:
        """Finds the shapes of what layers give, on a batch [B, ...] of any samples."""
        with torch.no_grad():
            self.losses(self.loss.model.x0, batch, no_key(self.loss.model.x0))

    def _observed(self, name: str, layer: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = type(layer).forward(layer, x)
        self._entered[name] = x
        if name not in self._moved:
            self.shapes[name] = y.shape[1:]
            return y
        return y + self._moved[name]

    def losses(self, row: Tensor, batch: Batch, key: Tensor) -> Tensor:
        """Of each sample, [B]; leaves what entered the layers in ``_entered``."""
        model, loss = self.loss.model, self.loss.loss

        def run(named: dict[str, Tensor], args: Any, kwargs: Any) -> Any:
            return functional_call(self.module, named, args, kwargs, tie_weights=False)

        return model.train(model.parameters(row), loss.slopes, batch.samples, key, run)

    def clipped_by(self, clip: float) -> Callable[[Tensor, Batch, Tensor], tuple[Tensor, Tensor]]:
        """(row [d], batch, keys [B, 4]) -> the weighted sums of losses, [], and of clipped gradients, [d]."""
        return lambda row, batch, keys: self._clipped(row, batch, keys[0], clip)

    def _clipped(self, row: Tensor, batch: Batch, key: Tensor, clip: float) -> tuple[Tensor, Tensor]:
        size = len(batch.weight)

        def value(moved: dict[str, Tensor]) -> tuple[Tensor, tuple[dict[str, Tensor], Tensor]]:
            self._moved, self._entered = moved, {}
            losses = self.losses(row, batch, key)
            entered, self._moved, self._entered = self._entered, {}, {}
            return losses.sum(), (entered, losses)

        start = {name: row.new_zeros(size, *shape) for name, shape in self.shapes.items()}
        leaving, (entered, losses) = grad(value, has_aux=True)(start)
        parts = {name: _of_layer(self.layers[name], entered[name], leaving[name]) for name in self.layers}
        squares = torch.stack([part.squares() for part in parts.values()]).sum(0)  # [B]
        weights = batch.weight * clipping(squares.sqrt(), clip)
        pieces = {
            f"{name}.{kind}".lstrip("."): piece.flatten()
            for name, part in parts.items()
            for kind, piece in part.weighted(weights).items()
        }
        total = [pieces[name] for name in self.loss.model.shapes]
        behind = len(row) - self.loss.model.dim
        gradient = torch.cat([*total, row.new_zeros(behind)] if behind else total)
        return (losses * batch.weight).sum(), gradient


def clipping(norms: Tensor, clip: float) -> Tensor:
    """What gradients of these ``norms`` are multiplied by: at most 1, and 0 for those that are not finite.

    A sample whose gradient is not finite must not show: it counts as if it were not there.
    """
    return torch.where(norms.isfinite(), clip / norms.clamp(min=clip), 0.0)


class _Product:
    """Gradients g aᵀ [B, out, in] of a layer that is given a [B, T, in], and g [B, T, out] of its outputs."""

    def __init__(self, layer: nn.Linear | nn.Conv2d, a: Tensor, g: Tensor) -> None:
        self.shape, self.biased = layer.weight.shape, layer.bias is not None
        self.a, self.g = a, g
        self.alone = a.shape[1] == 1  # T = 1: norms of products are products of norms
        self.each = None if self.alone else torch.bmm(g.mT, a)  # [B, out, in]
        self.bias = g.sum(1)  # [B, out]

    def squares(self) -> Tensor:
        """[B]: the squared norms."""
        if self.each is None:
            of_weight = self.a.square().sum((1, 2)) * self.g.square().sum((1, 2))
        else:
            of_weight = self.each.square().sum((1, 2))
        return of_weight + self.bias.square().sum(1) if self.biased else of_weight

    def weighted(self, weights: Tensor) -> dict[str, Tensor]:
        """The sums over samples, each times its weight; what is not finite has weight 0."""
        counts = (weights > 0)[:, None]
        own = torch.where(counts, weights[:, None] * self.bias, 0.0)
        if self.each is None:
            scaled = torch.where(counts, weights[:, None] * self.g[:, 0], 0.0)
            weight = scaled.mT @ torch.where(counts, self.a[:, 0], 0.0)
        else:
            each = torch.where(counts[..., None], self.each, 0.0)
            weight = (weights @ each.flatten(1)).view(each.shape[1:])
        return {"weight": weight.reshape(self.shape)} | ({"bias": own.sum(0)} if self.biased else {})


def _of_layer(layer: nn.Module, a: Tensor, g: Tensor) -> _Product:
    if isinstance(layer, nn.Conv2d):
        return _Product(layer, _patches(layer, a), g.flatten(2).mT)
    assert isinstance(layer, nn.Linear)
    return _Product(layer, a.reshape(len(a), -1, a.shape[-1]), g.reshape(len(g), -1, g.shape[-1]))


def _patches(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """What each output pixel of a convolution of images [B, C, H, W] sees: [B, P Q, C k k]."""
    assert not isinstance(layer.padding, str)
    (down, across), (s, t), (u, v) = layer.padding, layer.stride, layer.dilation
    padded = functional.pad(x, (across, across, down, down))
    height, width = layer.kernel_size
    rows = (padded.shape[2] - u * (height - 1) - 1) // s + 1
    columns = (padded.shape[3] - v * (width - 1) - 1) // t + 1
    seen = [
        padded[:, :, u * i : u * i + s * (rows - 1) + 1 : s, v * j : v * j + t * (columns - 1) + 1 : t]
        for i in range(height)
        for j in range(width)
    ]
    return torch.stack(seen, 2).flatten(1, 2).flatten(2).mT


def fits(loss: RowLoss) -> bool:
    """Whether all that is trained lies in linear and convolutional layers, called as torch calls them."""
    model = loss.model
    [[module, _], _] = model.parts
    if model.draws or model.frozen is not None or model.compute != model.x0.dtype or not loss.loss.traceable:
        return False
    covered: set[str] = set()
    for name, layer in module.named_modules():
        if _is_altered(layer):
            return False
        own = [f"{name}.{part}".lstrip(".") for part, _ in layer.named_parameters(recurse=False)]
        if not any(place in model.shapes for place in own):
            continue
        plain = type(layer) in LINEAR or (type(layer) in CONVOLUTIONS and _is_plain(layer))
        if not plain or not all(place in model.shapes for place in own):
            return False
        covered |= set(own)
    return covered == set(model.shapes) and _is_chain(module)


def _is_altered(layer: nn.Module) -> bool:
    """Whether a call does something else than its class says, perhaps with all samples of a batch at once."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "forward")
    return any(vars(layer).get(hook) for hook in hooks)


def _is_plain(layer: nn.Module) -> bool:
    assert isinstance(layer, nn.Conv2d)
    return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


def _is_chain(module: nn.Module) -> bool:
    """Whether each layer runs once, after the other, and each sample by itself."""
    if type(module) is not nn.Sequential:
        return type(module) in (*LINEAR, *CONVOLUTIONS, *BY_SAMPLE) or (
            type(module) is nn.Flatten and module.start_dim == 1
        )
    return len(set(map(id, module))) == len(module) and all(map(_is_chain, module))
