"""Whole numbers in few bits, and positions in fewer: what wires are packed with."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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
