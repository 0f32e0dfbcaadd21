"""Gradients that a method may see under differential privacy: clipped sample by sample, summed, and noised.

Whatever a method computes from them and sends is post-processing, so one place protects every method. Two
data sets are neighbours if one has a sample that the other lacks; how many samples a node has is public.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, vmap
from torch.nn import functional

from holdfast.core.errors import HoldfastError
from holdfast.core.memory import total_memory
from holdfast.core.precision import full_product
from holdfast.core.randomness import RandomStream, Word, philox
from holdfast.core.tree import tree_map
from holdfast.problem.gradients.backend import in_parts, no_key
from holdfast.problem.gradients.convolution import PixelConv2d
from holdfast.problem.gradients.support import NarrowLinear, PlaneConv2d
from holdfast.problem.row_loss import RowLoss
from holdfast.problem.source import Batch, Source

# --- clipped gradients layer by layer, without the gradient of any single sample ------------------------
#
# The gradient of a sample in the weights of a layer is made of the layer's input, a, and of the gradient in
# its output, g. In a linear layer it is g aᵀ, whose norm is |g| |a|, and a weighted sum over samples is one
# product. So one backward pass to the layers' outputs is enough for all norms and for the clipped sum (Bu et
# al., "Differentially private optimization on large model at small cost", 2023).


LINEAR, CONVOLUTIONS = (nn.Linear, NarrowLinear), (nn.Conv2d, PlaneConv2d, PixelConv2d)
ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Softplus)
BY_SAMPLE = (*ACTIVATIONS, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.Identity)


class Layerwise:
    """Norms and weighted sums of the gradients of samples, for models that ``fits`` accepts."""

    def __init__(self, loss: RowLoss) -> None:
        self.loss = loss
        [[module, _], _] = loss.model.parts
        self.module = deepcopy(module, {id(t): t for t in (*module.parameters(), *module.buffers())})
        self._entered: dict[str, Tensor] = {}  # the inputs of the layers, while the module runs
        self._moved: dict[str, Tensor] = {}  # zeros that are added to their outputs
        self.layers = {
            name: layer
            for name, layer in self.module.named_modules()
            if any(f"{name}.{part}".lstrip(".") in loss.model.shapes for part in ("weight", "bias"))
        }
        for name, layer in self.layers.items():
            layer.forward = partial(self._observed, name, layer)
        self.shapes: dict[str, torch.Size] = {}  # of their outputs for a sample

    def try_on(self, batch: Batch) -> None:
        """Finds the shapes of the layers' outputs, on a batch [B, ...] of any samples."""
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
        """The loss of each sample, [B]; leaves the layers' inputs in ``_entered``."""
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
    """The factors of gradients with these ``norms``: at most 1, and 0 for those that are not finite.

    A sample whose gradient is not finite must not show, so it counts as if it were absent.
    """
    return torch.where(norms.isfinite(), clip / norms.clamp(min=clip), 0.0)


class _Product:
    """Gradients g aᵀ [B, out, in] of a layer with inputs a [B, T, in], and g [B, T, out] in its outputs."""

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
        """The sums over samples, each times its weight; what is not finite has weight 0.

        In TF32, a gradient in the sum could be longer than it was clipped to.
        """
        counts = (weights > 0)[:, None]
        own = torch.where(counts, weights[:, None] * self.bias, 0.0)
        if self.each is None:
            scaled = torch.where(counts, weights[:, None] * self.g[:, 0], 0.0)
            entered = torch.where(counts, self.a[:, 0], 0.0)
            weight = full_product(scaled.mT, entered)
        else:
            each = torch.where(counts[..., None], self.each, 0.0)
            weight = full_product(weights[None], each.flatten(1))[0].view(each.shape[1:])
        return {"weight": weight.reshape(self.shape)} | ({"bias": own.sum(0)} if self.biased else {})


def _of_layer(layer: nn.Module, a: Tensor, g: Tensor) -> _Product:
    if isinstance(layer, nn.Conv2d):
        return _Product(layer, _patches(layer, a), g.flatten(2).mT)
    assert isinstance(layer, nn.Linear)
    return _Product(layer, a.reshape(len(a), -1, a.shape[-1]), g.reshape(len(g), -1, g.shape[-1]))


def _patches(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """The input pixels of each output pixel of a convolution of images [B, C, H, W]: [B, P Q, C k k]."""
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
    """Whether all trained parameters lie in linear and convolutional layers, called as torch calls them."""
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
    """Whether the layers run once each, one after the other, and samples do not mix."""
    if type(module) is not nn.Sequential:
        return type(module) in (*LINEAR, *CONVOLUTIONS, *BY_SAMPLE) or (
            type(module) is nn.Flatten and module.start_dim == 1
        )
    return len(set(map(id, module))) == len(module) and all(map(_is_chain, module))


# --- gradients that a method may see under differential privacy -----------------------------------------


SHARE_FOR_GRADIENTS = 0.25  # the share of memory that the gradients of single samples may take
COPIES = 3  # of them that exist at once: as computed, without those that are not finite, multiplied
OF_ALL_DATA = 1 << 16  # draws for gradients of all data; minibatches have those below
WHOLE_BATCHES = OF_ALL_DATA + (1 << 15)  # and for minibatches that are all data: steps are counted apart
WEYL = 0x9E3779B1  # an odd number that tells samples' keys apart

Noise = Callable[[Tensor, Word, Word, int, int], Tensor]
"""(nodes [m], round, step, draw, dim) -> [m, dim] standard normal numbers in float32."""


class OwnRandomness(ABC):
    """Noise and Poisson samples that only one node can draw, in a real federation."""

    @abstractmethod
    def shuffle(
        self, nodes: Tensor, counts: Tensor, longest: int, round: Word, draw: Word
    ) -> tuple[Tensor, Tensor]:
        """The node's samples in a random order, in the form of ``core.randomness.shuffled``."""

    @abstractmethod
    def noised(
        self, sums: Tensor, sensitivity: Tensor, multiplier: float, round: Word, step: Word, draw: int
    ) -> Tensor:
        """``sums`` [1, d] with normal noise of ``multiplier`` times their ``sensitivity`` [1, 1].

        The same sums in the same draw get the same noise, so that nothing is released twice.
        """


@dataclass(frozen=True)
class Release:
    """How gradients are protected.

    ``clip``: the largest Euclidean norm that the gradient of a sample keeps. ``multiplier``: the standard
    deviation of the noise over the sensitivity, which is the clipped norm times the weight of a sample.
    """

    clip: float
    multiplier: float
    noise: Noise | OwnRandomness


class PrivateGradients:
    """Losses and gradients of rows ``x`` [m, d], each on its own batch, as ``release`` allows."""

    def __init__(self, loss: RowLoss, source: Source, release: Release) -> None:
        check_releasable(loss, source)
        self.loss, self.source, self.release = loss, source, release
        numbers = loss.model.dim * loss.model.x0.element_size()
        memory = SHARE_FOR_GRADIENTS * total_memory(loss.model.x0.device)
        self.at_once = max(1, int(memory // (COPIES * numbers)))  # samples
        one: Callable[[Tensor, Batch, Tensor], tuple[Tensor, Tensor]] = self._row
        if fits(loss):
            layers = Layerwise(loss)
            layers.try_on(source.some(1))
            one = layers.clipped_by(release.clip)
        self._together = vmap(one)

    def values_and_gradients(self, x: Tensor, batch: Batch, keys: Tensor) -> tuple[Tensor, Tensor]:
        """The losses, [m], and the weighted sums of clipped gradients, [m, d], without noise."""
        return in_parts(self._some, self.at_once, x, batch, keys)

    def noised(self, sums: Tensor, nodes: Tensor, round: Word, step: Word, draw: int, points: int) -> Tensor:
        """``sums`` [m, d] of one access, in which ``points`` gradients of the same samples are released.

        Together they have the sensitivity of one times the root of their number, and the noise is scaled
        likewise. So an access costs the same, however many points it has.
        """
        release = self.release
        weight = self.source.sample_weight(nodes, of_all_data=draw >= OF_ALL_DATA)
        sensitivity = weight.unsqueeze(-1) * (release.clip * math.sqrt(points))
        return noised(release.noise, sums, sensitivity, release.multiplier, nodes, round, step, draw)

    def _some(self, x: Tensor, batch: Batch, keys: Tensor) -> tuple[Tensor, Tensor]:
        size, width = max(1, self.at_once // len(x)), batch.weight.shape[1]
        numbers = torch.arange(width, device=keys.device)
        own = keys.unsqueeze(1).expand(-1, width, -1).clone()  # [m, B, 4]: dropout differs between samples
        own[..., 0] = own[..., 0] + (numbers + 1) * WEYL & 0xFFFFFFFF
        values, sums = x.new_zeros(len(x)), torch.zeros_like(x)
        for first in range(0, width, size):
            some = slice(first, first + size)
            part = tree_map(lambda tensor, some=some: tensor[:, some], (batch, own))
            more = self._together(x, *part)
            values, sums = values + more[0], sums + more[1]
        return values, sums

    def _row(self, row: Tensor, batch: Batch, keys: Tensor) -> tuple[Tensor, Tensor]:
        def one(row: Tensor, samples: object, key: Tensor) -> Tensor:
            alone = Batch(tree_map(lambda part: part.unsqueeze(0), samples), row.new_ones(1))
            return self.loss.differentiable(self.loss.model.parameters(row), alone, key)

        gradients, values = vmap(grad_and_value(one), in_dims=(None, 0, 0))(row, batch.samples, keys)
        norms = gradients.norm(dim=-1)  # [B]
        weights = batch.weight * clipping(norms, self.release.clip)
        gradients = torch.where(norms.isfinite()[:, None], gradients, 0.0)
        # In TF32, a gradient in the sum could be longer than it was clipped to.
        return (values * batch.weight).sum(), full_product(weights[None], gradients)[0]


def noised(
    noise: Noise | OwnRandomness,
    sums: Tensor,
    sensitivity: Tensor,
    multiplier: float,
    nodes: Tensor,
    round: Word,
    step: Word,
    draw: int,
) -> Tensor:
    """``sums`` [m, d] of ``nodes`` [m] with noise of ``multiplier`` times their ``sensitivity`` [m, 1]."""
    if isinstance(noise, OwnRandomness):
        return noise.noised(sums, sensitivity, multiplier, round, step, draw)
    normal = noise(nodes, round, step, draw, sums.shape[1])
    return sums + (multiplier * sensitivity * normal).to(sums.dtype)


def check_releasable(loss: RowLoss, source: Source) -> None:
    """Refuses what cannot be private: samples that affect one another, or are drawn in another way."""
    if loss.model.statistics:
        raise HoldfastError(
            "private: BatchNorm mixes the samples of a batch, so no sample has a gradient of its own; use "
            "GroupNorm or LayerNorm"
        )
    if not loss.loss.per_sample:
        raise HoldfastError(
            "private: the loss gives one number for a batch, so samples cannot be clipped one by one; give "
            "a number for each sample, such as nn.CrossEntropyLoss(reduction='none')"
        )
    if not source.finite:
        raise HoldfastError("private: a Stream has no samples that could be counted; give data sets")
    if source.batch_size is not None and source.sampling != "poisson":
        raise HoldfastError(
            f"private: minibatches are accounted for as Poisson samples, and sampling = {source.sampling!r} "
            'draws others; set sampling = "poisson", or batch_size = "full"'
        )


def counted_noise(seed: Word) -> Noise:
    """Noise from our counters, the same in every engine: for simulations, not for a real federation.

    Anyone with the seed can subtract it.
    """

    def noise(nodes: Tensor, round: Word, step: Word, draw: int, dim: int) -> Tensor:
        blocks = torch.arange(max(2, -(-dim // 4)), device=nodes.device)
        key = (seed, int(RandomStream.NOISE) + draw)
        return normals(philox((blocks, step, round, nodes.unsqueeze(-1)), key))[:, :dim]

    return noise


def normals(words: Tensor) -> Tensor:
    """Standard normal numbers [..., 4 k] of random 32-bit words [..., k, 4], by Box and Muller."""
    uniform = (words.to(torch.float32) + 0.5) * 2.0**-32  # (0, 1]
    radius = (-2 * uniform[..., :2].log()).sqrt()
    angle = 2 * math.pi * uniform[..., 2:]
    return torch.cat([radius * angle.cos(), radius * angle.sin()], -1).flatten(-2)
