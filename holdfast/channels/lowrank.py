"""Vectors as matrices of low rank."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, isqrt
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from holdfast.channels.compressor import COARSE, Compressor, Uniforms
from holdfast.contract.channel import CHANNELS, Wire
from holdfast.core.validation import Count


class Factors(NamedTuple):
    numbers: Tensor  # [m, rank (rows + columns)]: P times a number, then P^T X divided by it


@CHANNELS.register("low-rank")
@dataclass(frozen=True)
class LowRank(Compressor):
    """Sends a vector as a matrix of low rank: its projection on a few random combinations of its columns.

    A vector is laid out as a matrix X with so many ``columns``, by default about the square root of its size.
    With P an orthonormal basis of X Q, Q random, P and P^T X are sent. Where X Q has a lower rank than
    columns, the rest of P is zero.
    """

    serves = COARSE
    numeric: ClassVar[bool] = True

    rank: Count
    columns: Count | None = None  # of the matrix, such as a layer's number of inputs

    def shape(self, d: int) -> tuple[int, int, int]:
        """Rows and columns of the matrix, and the rank, which is at most either."""
        columns = min(d, self.columns or max(1, isqrt(d)))
        rows = ceil(d / columns)
        return rows, columns, min(self.rank, rows, columns)

    def numbers(self, d: int) -> int:
        rows, columns, rank = self.shape(d)
        return rank * (rows + columns)

    def trial_size(self, d: int, most: int) -> int:
        return d  # a smaller matrix would be nearer to its low-rank part

    def compress(self, x: Tensor, uniforms: Uniforms) -> Factors:
        d = x.shape[-1]
        rows, columns, rank = self.shape(d)
        matrix = torch.nn.functional.pad(x, (0, rows * columns - d)).view(-1, rows, columns)
        across = matrix.mT.contiguous()
        random = uniforms(rank * columns).to(x.dtype).view(-1, rank, columns) - 0.5
        # Sums over the last dimension, in place of batched products: those give other last bits if there are
        # other rows beside.
        tiny = torch.finfo(x.dtype).tiny
        basis: list[Tensor] = []
        for j in range(rank):
            column = (matrix * random[:, j, None]).sum(-1)
            # Squares of very small or large numbers would be 0 or infinite.
            column = column / column.abs().amax(-1, keepdim=True).clamp(min=tiny)
            # After two passes a column is orthogonal to the last bits, or else the first left only rounding
            # noise, of which the second removes much again. That is dropped: the basis spans it already.
            once = _without(basis, column)
            twice = _without(basis, once)
            norm = twice.norm(dim=-1, keepdim=True)
            kept = norm > 0.5 * once.norm(dim=-1, keepdim=True)
            basis.append(torch.where(kept, twice / norm.clamp(min=tiny), 0))
        left = torch.cat(basis, -1)
        right = torch.cat([(across * p[:, None]).sum(-1) for p in basis], -1)
        # Both factors alike in size, so that a compressor after this one loses neither.
        size = right.abs().amax(-1, keepdim=True).clamp(min=tiny).sqrt()
        return Factors(torch.cat([left * size, right / size], -1))

    def expand(self, wire: Wire, like: Tensor) -> Tensor:
        d = like.shape[-1]
        rows, columns, rank = self.shape(d)
        left = wire.numbers[:, : rank * rows].view(-1, rank, rows)
        right = wire.numbers[:, rank * rows :].view(-1, rank, columns)
        matrix: Tensor = left[:, 0, :, None] * right[:, 0, None]
        for j in range(1, rank):
            matrix = matrix + left[:, j, :, None] * right[:, j, None]
        return matrix.flatten(1)[:, :d]

    def delta(self, d: int) -> float:
        """On average over Q: P P^T X is at least as near to X as X projected on the columns of Q."""
        _, columns, rank = self.shape(d)
        return rank / columns


def _without(basis: list[Tensor], column: Tensor) -> Tensor:
    """``column`` [m, rows] less its projections on the columns of ``basis``, one after the other."""
    for before in basis:
        column = column - before * (before * column).sum(-1, keepdim=True)
    return column
