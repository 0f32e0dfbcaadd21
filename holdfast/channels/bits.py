"""Whole numbers in few bits, and positions in fewer: what wires are packed with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.channels.compressor import Compressor, Uniforms
from holdfast.contract.channel import CHANNELS, EVERY_USE, Channel, Wire

# --- whole numbers in few bits, and positions in fewer: what wires are packed with ----------------------


def pack(codes: Tensor, bits: int) -> Tensor:
    """``codes`` [m, n], whole numbers below 2**bits, end to end: uint8 [m, ceil(n bits / 8)]."""
    if bits == 8:
        return codes.to(torch.uint8)
    if bits == 0:
        return codes.new_zeros(len(codes), 0, dtype=torch.uint8)
    small = codes.to(torch.uint8 if bits < 8 else torch.int64)
    digits = (small[..., None] >> torch.arange(bits, device=codes.device, dtype=small.dtype)) & 1
    flat = digits.to(torch.uint8).flatten(1)
    flat = torch.nn.functional.pad(flat, (0, -flat.shape[1] % 8)).view(len(codes), -1, 8)
    places = 2 ** torch.arange(8, device=codes.device, dtype=torch.uint8)
    return (flat * places).sum(-1, dtype=torch.uint8)


def unpack(packed: Tensor, bits: int, n: int) -> Tensor:
    """The inverse of ``pack``: int64 [m, n]."""
    if bits == 8:
        return packed.to(torch.int64)
    if bits == 0:
        return packed.new_zeros(len(packed), n, dtype=torch.int64)
    shifts = torch.arange(8, device=packed.device, dtype=torch.uint8)
    flat = ((packed[..., None] >> shifts) & 1).flatten(1)[:, : n * bits]
    digits = flat.view(len(packed), n, bits).to(torch.int64)
    return (digits << torch.arange(bits, device=packed.device)).sum(-1)


class Positions(NamedTuple):
    """k of d positions, ascending. Of which form they are, and how long, depends on d and k only.

    Elias and Fano: the lowest bits of every position as they are, and the other bits h_0 <= h_1 <= ... as
    marks at h_i + i. That takes about 2 + log2(d/k) bits for each position. Where a mark for each of the d
    positions is shorter, ``marks`` are these and ``low`` is empty.
    """

    low: Tensor  # uint8
    marks: Tensor  # uint8


def _shape(d: int, k: int) -> tuple[int, int]:
    """Bits of the low part of each position, and the number of marks."""
    low = (d // k).bit_length() - 1
    marks = ((d - 1) >> low) + k
    return (low, marks) if k * low + marks < d else (0, d)


def pack_positions(positions: Tensor, d: int) -> Positions:
    """``positions`` [m, k], ascending and different, of ``d``."""
    m, k = positions.shape
    low, marks = _shape(d, k)
    at = positions if marks == d else (positions >> low) + torch.arange(k, device=positions.device)
    marked = torch.zeros(m, marks, dtype=torch.uint8, device=positions.device)
    marked = marked.scatter(1, at, torch.ones_like(at, dtype=torch.uint8))
    return Positions(pack(positions & ((1 << low) - 1), low), pack(marked, 1))


def unpack_positions(packed: Positions, d: int, k: int) -> Tensor:
    """The inverse: int64 [m, k]. Whatever bits were sent, all of it lies in [0, d)."""
    low, marks = _shape(d, k)
    marked = unpack(packed.marks, 1, marks)
    at = marked.sort(dim=1, descending=True, stable=True).indices[:, :k]
    if marks != d:
        at = ((at - torch.arange(k, device=at.device)) << low) + unpack(packed.low, low, k)
    return at.clamp(0, d - 1)


# --- numbers in 16 bits ---------------------------------------------------------------------------------


class Scaled(NamedTuple):
    shares: Tensor  # [m, d], float16
    scale: Tensor  # [m, 1], float32


@CHANNELS.register("half")
@dataclass(frozen=True)
class Half(Compressor):
    """Numbers travel as float16 and are added up in the model's own type.

    Between neighbours a node keeps locally what its own message lost, so that sums are kept. Through a server
    they are not, and a dual that adds up means would drift, so there it has ``feedback`` by default: numbers
    are sent as shares of the largest, as float16 ends at 6e-8, and the server answers in full.
    """

    serves = EVERY_USE
    columnwise = True
    overflow = "a number is beyond 65504"

    feedback: bool | None = field(default=None, kw_only=True)

    @property
    def keeps_zeros(self) -> bool:
        return True

    def compress(self, x: Tensor, uniforms: Uniforms) -> Wire:
        if not self.feedback:
            return x.to(torch.float16)
        scale = x.abs().amax(-1, keepdim=True).to(torch.float32)
        return Scaled((x / scale.clamp(min=1e-38).to(x.dtype)).to(torch.float16), scale)

    def expand(self, wire: Wire, like: Tensor) -> Tensor:
        if isinstance(wire, Scaled):
            return wire.shares.to(like.dtype) * wire.scale.to(like.dtype)
        numbers: Tensor = wire
        return numbers.to(like.dtype)

    def delta(self, d: int) -> float:
        return 1 - 2.0**-22 - d * 2.0**-50  # half a unit in the last of 11 bits, or of the smallest number

    @property
    def down(self) -> Channel:
        return self


@CHANNELS.register("bfloat16")
@dataclass(frozen=True)
class BFloat16(Compressor):
    """Numbers travel as bfloat16: the range of float32, 8 bits of precision."""

    serves = EVERY_USE
    columnwise = True
    overflow = "a number is beyond 3.4e38"

    @property
    def keeps_zeros(self) -> bool:
        return True

    def compress(self, x: Tensor, uniforms: Uniforms) -> Tensor:
        return x.to(torch.bfloat16).view(torch.int16)  # numpy, which writes messages, does not know the type

    def expand(self, wire: Wire, like: Tensor) -> Tensor:
        numbers: Tensor = wire
        return numbers.view(torch.bfloat16).to(like.dtype)

    def delta(self, d: int) -> float:
        return 1 - 2.0**-16

    @property
    def down(self) -> Channel:
        return self
