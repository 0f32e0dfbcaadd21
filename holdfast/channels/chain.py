"""One compressor after the other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from torch import Tensor

from holdfast.channels.bits import BFloat16, Half
from holdfast.channels.compressor import COARSE, Compressor, Gamma, Uniforms
from holdfast.channels.lowrank import LowRank
from holdfast.contract.channel import CHANNELS, ChosenChannel, Wire
from holdfast.core.errors import HoldfastError


def _as_tuple(steps: Any) -> Any:
    """A file has lists only."""
    return tuple(steps) if isinstance(steps, list) else steps


@CHANNELS.register("chain")
@dataclass(frozen=True)
class Chain(Compressor):
    """Compressors one after the other: each gets the numbers that the one before would send."""

    serves = COARSE

    steps: Annotated[tuple[ChosenChannel, ...], Field(min_length=2), BeforeValidator(_as_tuple)]

    def __post_init__(self) -> None:
        super().__post_init__()
        for step in self.steps:
            if not isinstance(step, Compressor):
                raise HoldfastError(f"Chain: {type(step).__name__} compresses nothing; leave it out")
            if step.gamma != "safe":
                raise HoldfastError(
                    f"Chain: {type(step).__name__}.gamma: a chain has one gamma for all its steps; give it "
                    "to the chain"
                )
        for before, after in pairwise(self.parts):
            first, second = type(before).__name__, type(after).__name__
            if not before.numeric:
                raise HoldfastError(f"Chain: {first} leaves no numbers to compress further; put {first} last")
            if isinstance(before, LowRank) and not isinstance(after, Half | BFloat16):
                raise HoldfastError(
                    f"Chain: {second} after LowRank would spoil the product of its factors; use half or "
                    "bfloat16"
                )

    @cached_property
    def parts(self) -> tuple[Compressor, ...]:
        """The steps as they are used here."""
        return tuple(
            replace(step, feedback=self.feedback) for step in self.steps if isinstance(step, Compressor)
        )

    @property
    def numeric(self) -> bool:  # type: ignore[override]
        return self.parts[-1].numeric

    def numbers(self, d: int) -> int:
        for part in self.parts:
            d = part.numbers(d)
        return d

    def trial_size(self, d: int, most: int) -> int:
        return self.parts[0].trial_size(d, most)

    @property
    def keeps_zeros(self) -> bool:
        return all(part.keeps_zeros for part in self.parts)

    def compress(self, x: Tensor, uniforms: Uniforms) -> Wire:
        return _compress(self.parts, x, uniforms)

    def expand(self, wire: Wire, like: Tensor) -> Tensor:
        return _expand(self.parts, wire, like)

    def delta(self, d: int) -> float:
        """A step loses at most its share of what the steps before have kept."""
        kept = 1.0
        for part in self.parts:
            kept, d = kept * part.delta(d), part.numbers(d) if part.numeric else d
        return kept


def _compress(parts: tuple[Compressor, ...], x: Tensor, uniforms: Uniforms) -> Wire:
    wire = parts[0].compress(x, uniforms)
    return wire._replace(numbers=_compress(parts[1:], wire.numbers, uniforms)) if parts[1:] else wire


def _expand(parts: tuple[Compressor, ...], wire: Wire, like: Tensor) -> Tensor:
    if parts[1:]:
        numbers = like.new_empty(len(like), parts[0].numbers(like.shape[-1]))
        wire = wire._replace(numbers=_expand(parts[1:], wire.numbers, numbers))
    return parts[0].expand(wire, like)


def chain(*steps: Compressor, gamma: Gamma = "safe", feedback: bool = True) -> Chain:
    """Compressors one after the other, such as ``hf.chain(hf.TopK(0.05), hf.Uniform(bits=8))``.

    Each gets the numbers that the one before would send: here 8 bits for each of the largest entries.
    ``gamma`` and ``feedback`` are those of the whole chain.
    """
    return Chain(steps, gamma=gamma, feedback=feedback)
