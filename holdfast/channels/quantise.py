"""Every entry in a few bits, relative to a scale that a block of entries shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from holdfast.channels.bits import pack, unpack
from holdfast.channels.compressor import COARSE, Compressor, Uniforms
from holdfast.contract.channel import CHANNELS, Wire
from holdfast.core.errors import HoldfastError
from holdfast.core.validation import Count

Bits = Literal[1, 2, 3, 4, 5, 6, 7, 8]
TINY = 1e-38


class Codes(NamedTuple):
    codes: Tensor  # uint8
    scale: Tensor  # [m, blocks], float32


def in_blocks(x: Tensor, block: int) -> Tensor:
    """[m, blocks, block], zeros at the end."""
    size = min(block, x.shape[-1])
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % size)).view(len(x), -1, size)


def spread(scale: Tensor, block: int, like: Tensor) -> Tensor:
    """The ``scale`` [m, blocks] of every entry, [m, d]."""
    d = like.shape[-1]
    return scale.to(like.dtype).repeat_interleave(min(block, d), -1)[:, :d]


@dataclass(frozen=True)
class Quantiser(Compressor):
    """What both kinds have in common: blocks, packing, and signs where there is but one bit."""

    bits: Bits = 8
    block: Count = 256  # entries that share a scale
    dithered: bool = False  # rounds up or down at random, so that the mean is right; else to the nearest

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        if self.dithered and self.bits == 1:
            raise HoldfastError(f"{name}.dithered: one bit holds a sign and nothing to round; use 2 bits")
        if self.dithered and self.feedback and self.delta(self.block) <= 0:
            raise HoldfastError(
                f"{name}.dithered: with {self.bits} bits, random rounding can lose more than there is in "
                f"blocks of {self.block}; take smaller blocks or more bits, or feedback=False for a method "
                "that makes up for it itself (SCALLION)"
            )

    @property
    def levels(self) -> int:
        """Magnitudes above zero."""
        return int(2 ** (self.bits - 1) - 1)

    @property
    def keeps_zeros(self) -> bool:
        return self.bits > 1  # a bit holds a sign, also of zero

    def compress(self, x: Tensor, uniforms: Uniforms) -> Codes:
        blocks = in_blocks(x, self.block)
        if self.bits == 1:
            counts = in_blocks(torch.ones_like(x[:1]), self.block).sum(-1)
            return Codes(pack(x >= 0, 1), (blocks.abs().sum(-1) / counts).to(torch.float32))
        scale = blocks.abs().amax(-1).to(torch.float32)
        share = x / spread(scale.clamp(min=TINY), self.block, x)  # in [-1, 1]
        dither = uniforms(x.shape[-1]).to(x.dtype) if self.dithered else None
        return Codes(pack(self.code(share, dither), self.bits), scale)

    def expand(self, wire: Wire, like: Tensor) -> Tensor:
        codes = unpack(wire.codes, self.bits, like.shape[-1])
        share = 2 * codes.to(like.dtype) - 1 if self.bits == 1 else self.share(codes, like)
        return share * spread(wire.scale, self.block, like)

    def code(self, share: Tensor, dither: Tensor | None) -> Tensor:
        """Of numbers in [-1, 1], whole numbers below 2**bits; ``dither`` holds numbers in [0, 1)."""
        raise NotImplementedError

    def share(self, codes: Tensor, like: Tensor) -> Tensor:
        """The numbers that ``codes`` stand for, of the type of ``like``."""
        raise NotImplementedError


@CHANNELS.register("uniform")
@dataclass(frozen=True)
class Uniform(Quantiser):
    """Sends every entry in 1 to 8 bits: equal steps up to the largest of its block, or its sign."""

    serves = COARSE

    def code(self, share: Tensor, dither: Tensor | None) -> Tensor:
        steps = share * self.levels
        whole = steps.round() if dither is None else (steps + dither).floor()
        return whole.clamp(-self.levels, self.levels).to(torch.int64) + self.levels

    def share(self, codes: Tensor, like: Tensor) -> Tensor:
        return (codes - self.levels).to(like.dtype) / self.levels

    def delta(self, d: int) -> float:
        others, steps = min(self.block, d) - 1, 4 * self.levels**2
        if self.bits == 1:  # (sum |x_i|)^2 / (n sum x_i^2), least where one entry is alone
            return 1 / (others + 1)
        # The largest entry is exact, the others are off by half a step at most, and by no more than they are.
        return 1 - others / steps if self.dithered else steps / (steps + others)


@CHANNELS.register("natural")
@dataclass(frozen=True)
class Natural(Quantiser):
    """Sends every entry in 1 to 8 bits: its block's largest times a power of two (Horvath et al. 2019)."""

    serves = COARSE

    def code(self, share: Tensor, dither: Tensor | None) -> Tensor:
        size, least = share.abs(), 2.0 ** (1 - self.levels)
        mantissa, exponent = torch.frexp(size)  # size = mantissa 2^exponent, with a mantissa from 1/2 to 1
        up = mantissa >= 0.75 if dither is None else dither < 2 * mantissa - 1
        halvings = (torch.where(up, -exponent, 1 - exponent)).clamp(0, self.levels - 1)
        bottom = size >= least / 2 if dither is None else size > dither * least
        kept = torch.where(size < least, bottom, True)
        return torch.where(kept, 2 * (halvings.to(torch.int64) + 1) + (share < 0), 0)

    def share(self, codes: Tensor, like: Tensor) -> Tensor:
        halvings = (codes >> 1) - 1
        size = torch.exp2(-halvings.to(like.dtype))
        return torch.where(halvings >= 0, torch.where((codes & 1).bool(), -size, size), 0.0)

    def delta(self, d: int) -> float:
        others = min(self.block, d) - 1
        if self.bits == 1:
            return 1 / (others + 1)
        small = others * 4.0 ** (
            -self.levels
        )  # of what is below the smallest level, if the largest entry is 1
        # A number is at most a third off, on random rounding an eighth of its square in the mean.
        return 1 - 1 / 8 - small if self.dithered else 1 - max(1 / 9, small / (1 + small))
