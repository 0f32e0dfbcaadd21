"""Numbers in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.channels.compressor import Compressor, Uniforms
from holdfast.contract.channel import CHANNELS, EVERY_USE, Channel, Wire


class Scaled(NamedTuple):
    shares: Tensor  # [m, d], float16
    scale: Tensor  # [m, 1], float32


@CHANNELS.register("half")
@dataclass(frozen=True)
class Half(Compressor):
    """Numbers travel as float16 and are added up in the model's own type.

    Between neighbours a node keeps at home what its own message lost, so that sums are kept. Through a server
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
