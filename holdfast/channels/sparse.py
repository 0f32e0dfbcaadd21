"""A few entries of every vector: the largest, or random ones."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from holdfast.channels.bits import Positions, pack_positions, unpack_positions
from holdfast.channels.compressor import COARSE, Compressor, Uniforms
from holdfast.contract.channel import CHANNELS, Wire
from holdfast.core.randomness import RandomStream, philox
from holdfast.core.validation import Probability


def entries(share: float, d: int) -> int:
    """How many of ``d`` entries are at least a ``share`` of them."""
    return max(1, ceil(share * d - 1e-9))


class Largest(NamedTuple):
    numbers: Tensor  # [m, k]
    places: Positions


@CHANNELS.register("top-k")
@dataclass(frozen=True)
class TopK(Compressor):
    """Sends the entries that are largest in magnitude, a share of all, and where they are (Elias-Fano)."""

    serves = COARSE
    numeric: ClassVar[bool] = True

    share: Probability

    def numbers(self, d: int) -> int:
        return entries(self.share, d)

    @property
    def keeps_zeros(self) -> bool:
        return True

    def compress(self, x: Tensor, uniforms: Uniforms) -> Largest:
        d = x.shape[-1]
        places = x.abs().topk(self.numbers(d), dim=-1, sorted=False).indices.sort(dim=-1).values
        return Largest(x.gather(-1, places), pack_positions(places, d))

    def expand(self, wire: Wire, like: Tensor) -> Tensor:
        d = like.shape[-1]
        places = unpack_positions(wire.places, d, self.numbers(d))
        return torch.zeros_like(like).scatter(-1, places, wire.numbers)

    def delta(self, d: int) -> float:
        return self.numbers(d) / d


class Drawn(NamedTuple):
    numbers: Tensor  # [m, k]
    key: Tensor  # [m, 1], int32: where the numbers belong is computed from it


@CHANNELS.register("random-k")
@dataclass(frozen=True)
class RandomK(Compressor):
    """Sends random entries, a share of all, and a key of four bytes that tells which they are."""

    serves = COARSE
    numeric: ClassVar[bool] = True

    share: Probability

    def numbers(self, d: int) -> int:
        return entries(self.share, d)

    @property
    def keeps_zeros(self) -> bool:
        return True

    def compress(self, x: Tensor, uniforms: Uniforms) -> Drawn:
        key = (uniforms(1) * 2.0**31).to(torch.int32)
        return Drawn(x.gather(-1, self._places(key, x.shape[-1])), key)

    def expand(self, wire: Wire, like: Tensor) -> Tensor:
        places = self._places(wire.key, like.shape[-1])
        return torch.zeros_like(like).scatter(-1, places, wire.numbers)

    def _places(self, key: Tensor, d: int) -> Tensor:
        """[m, k]: the entries with the smallest of d random words; no two words are equal."""
        counter = torch.arange(max(2, ceil(d / 4)), device=key.device)
        words = philox((counter, 0, 0, 0), (key.to(torch.int64) & 0x7FFFFFFF, int(RandomStream.CHANNEL)))
        numbered = (words.flatten(1)[:, :d] << 31) + torch.arange(d, device=key.device)
        return numbered.topk(self.numbers(d), dim=-1, largest=False).indices.sort(dim=-1).values

    def delta(self, d: int) -> float:
        return self.numbers(d) / d
