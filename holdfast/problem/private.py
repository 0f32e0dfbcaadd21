"""Gradients that a method may see under differential privacy: clipped sample by sample, summed, and noised.

Whatever a method computes from them and sends is post-processing, so one place protects every method. Two
data sets are neighbours if one has a sample that the other lacks; how many samples a node has is public.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from holdfast.core.errors import HoldfastError
from holdfast.core.memory import total_memory
from holdfast.core.precision import excess
from holdfast.core.randomness import Stream, Word, philox
from holdfast.core.tree import tree_map
from holdfast.problem.gradients.backend import in_parts
from holdfast.problem.gradients.layerwise import Layerwise, clipping, fits
from holdfast.problem.row_loss import RowLoss
from holdfast.problem.source import Batch, Source

SHARE_FOR_GRADIENTS = 0.25  # of all memory, what the gradients of single samples may take
COPIES = 3  # of them that are alive at once: as computed, without those that are not finite, multiplied
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
        # Rounded factors may make a gradient longer in the sum; there it must not exceed what noise is for.
        self.clip = release.clip * (1 - excess(loss.model.x0))
        numbers = loss.model.dim * loss.model.x0.element_size()
        memory = SHARE_FOR_GRADIENTS * total_memory(loss.model.x0.device)
        self.at_once = max(1, int(memory // (COPIES * numbers)))  # samples
        one: Callable[[Tensor, Batch, Tensor], tuple[Tensor, Tensor]] = self._row
        if fits(loss):
            layers = Layerwise(loss)
            layers.try_on(source.some(1))
            one = layers.clipped_by(self.clip)
        self._together = vmap(one)

    def values_and_gradients(self, x: Tensor, batch: Batch, keys: Tensor) -> tuple[Tensor, Tensor]:
        """The losses, [m], and the weighted sums of clipped gradients, [m, d], without noise."""
        return in_parts(self._some, self.at_once, x, batch, keys)

    def noised(self, sums: Tensor, nodes: Tensor, round: Word, step: Word, draw: int, points: int) -> Tensor:
        """``sums`` [m, d] of one access, in which ``points`` gradients of the same samples are released.

        All of them together have the sensitivity of one, times the root of their number, and so the noise
        has: an access costs the same, however many points it has.
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
        weights = batch.weight * clipping(norms, self.clip)
        gradients = torch.where(norms.isfinite()[:, None], gradients, 0.0)
        return (values * batch.weight).sum(), weights @ gradients


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

    Whoever knows the seed can take it away again.
    """

    def noise(nodes: Tensor, round: Word, step: Word, draw: int, dim: int) -> Tensor:
        blocks = torch.arange(max(2, -(-dim // 4)), device=nodes.device)
        key = (seed, int(Stream.NOISE) + draw)
        return normals(philox((blocks, step, round, nodes.unsqueeze(-1)), key))[:, :dim]

    return noise


def normals(words: Tensor) -> Tensor:
    """Standard normal numbers [..., 4 k] of random 32-bit words [..., k, 4], by Box and Muller."""
    uniform = (words.to(torch.float32) + 0.5) * 2.0**-32  # (0, 1]
    radius = (-2 * uniform[..., :2].log()).sqrt()
    angle = 2 * math.pi * uniform[..., 2:]
    return torch.cat([radius * angle.cos(), radius * angle.sin()], -1).flatten(-2)
