"""Convolutions of many groups on a GPU, each of them a node's layer: products of patches that are not stored.

cuDNN has few kernels for convolutions with groups. For groups of 16 to 64 channels, those that it chooses do
without tensor cores, or compute one group after the other. Here a program computes a tile of one group's
result: channels by pixels of all images. Imported on a GPU only, where torch brings triton along.
"""

# mypy: ignore-errors
# (Triton's compiler reads these functions; to a type checker they are not Python.)

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS, STAGES = 4, 2
PIXELS = 128  # of a tile of outputs, or of inputs' gradients
CHANNELS, CHANNELS_AT_ONCE = 64, 32  # of such a tile, at most; and of the sums that go into it
COLUMNS, PIXELS_AT_ONCE = 64, 64  # of a tile of weights' gradients, and of the sums that go into it
PROGRAMS = 1024  # that keep a GPU busy


class Window(NamedTuple):
    """How a kernel moves over images: numbers for rows and for columns."""

    kernel: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]

    @property
    def numbers(self) -> list[int]:
        return [number for pair in self for number in pair]


def product(x: Tensor, weight: Tensor, result: Tensor, window: Window, backward: bool) -> Tensor:
    """Fills ``result`` [n, B, M, P, Q] with the convolution of x [n, B, C, H, W] and weight [n, M, C, i, j].

    ``backward``: what is transposed to a convolution, from slopes x of its outputs to those of its inputs.
    """
    nodes, images, channels, height, width = x.shape
    of_result, rows, columns = result.shape[2:]
    tile = _power_of_2(of_result, CHANNELS), PIXELS, _power_of_2(channels, CHANNELS_AT_ONCE)
    grid = triton.cdiv(images * rows * columns, PIXELS), triton.cdiv(of_result, tile[0]), nodes
    strides = *x.stride(), *weight.stride(), *result.stride()
    sizes = images, channels, height, width, of_result, rows, columns
    options = {"num_warps": WARPS, "num_stages": STAGES}
    _product[grid](x, weight, result, *strides, *sizes, *window.numbers, backward, *tile, **options)
    return result


def correlation(x: Tensor, slopes: Tensor, window: Window) -> Tensor:
    """The gradient of weights [n, M, C, i, j], from inputs [n, B, C, H, W] and slopes [n, B, M, P, Q]."""
    nodes, images, channels, height, width = x.shape
    of_slopes, rows, columns = slopes.shape[2:]
    numbers = channels * window.kernel[0] * window.kernel[1]
    tile = _power_of_2(of_slopes, CHANNELS), _power_of_2(numbers, COLUMNS), PIXELS_AT_ONCE
    tiles = triton.cdiv(numbers, tile[1]), triton.cdiv(of_slopes, tile[0])
    # Parts of the pixels are added up side by side, and then in one order: a run is the same every time.
    most = triton.cdiv(images * rows * columns, 4 * PIXELS_AT_ONCE)
    parts = min(most, triton.cdiv(PROGRAMS, tiles[0] * tiles[1] * nodes))
    sums = torch.empty(parts, nodes, of_slopes, numbers, device=x.device)
    strides = *x.stride(), *slopes.stride()
    sizes = images, channels, height, width, of_slopes, rows, columns, numbers, parts
    options = {"num_warps": WARPS, "num_stages": STAGES}
    grid = *tiles, nodes * parts
    _correlation[grid](x, slopes, sums, *strides, *sizes, *window.numbers, *tile, **options)
    return sums.sum(0).view(nodes, of_slopes, channels, *window.kernel).to(x.dtype)


def _power_of_2(size: int, most: int) -> int:
    """The width of a tile for ``size`` channels: tensor cores take 16 at least."""
    return min(most, max(16, triton.next_power_of_2(size)))


@triton.jit
def _product(
    x, weight, result,
    x_node, x_image, x_channel, x_row, x_column,
    w_node, w_result, w_channel, w_row, w_column,
    y_node, y_image, y_channel, y_row, y_column,
    B, C, H, W, M, P, Q,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    BACKWARD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    node = tl.program_id(2).to(tl.int64)
    x, weight, result = x + node * x_node, weight + node * w_node, result + node * y_node
    pixel = tl.program_id(0) * BN + tl.arange(0, BN)
    real = pixel < B * P * Q
    image, place = (pixel // (P * Q)).to(tl.int64), pixel % (P * Q)
    row, column = place // Q, place % Q
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    total = tl.zeros((BM, BN), tl.float32)
    blocks = tl.cdiv(C, BK)
    for step in range(KH * KW * blocks):
        tap, channel = step // blocks, (step % blocks) * BK + tl.arange(0, BK)
        i, j = tap // KW, tap % KW
        if BACKWARD:
            r, c = row + PH - i * DH, column + PW - j * DW
            there = real & (r >= 0) & (c >= 0)
            if SH > 1:
                there &= r % SH == 0
                r = r // SH
            if SW > 1:
                there &= c % SW == 0
                c = c // SW
        else:
            r, c = row * SH - PH + i * DH, column * SW - PW + j * DW
            there = real & (r >= 0) & (c >= 0)
        there &= (r < H) & (c < W)
        at = image * x_image + r * x_row + c * x_column
        inside = channel < C
        values = tl.load(
            x + channel[:, None] * x_channel + at[None, :], mask=inside[:, None] & there[None, :], other=0.0
        )
        factors = tl.load(
            weight + m[:, None] * w_result + channel[None, :] * w_channel + i * w_row + j * w_column,
            mask=(m < M)[:, None] & inside[None, :],
            other=0.0,
        )
        total = tl.dot(factors, values, total)
    at = image * y_image + row * y_row + column * y_column
    there = (m < M)[:, None] & real[None, :]
    tl.store(result + m[:, None] * y_channel + at[None, :], total.to(result.dtype.element_ty), mask=there)


@triton.jit
def _correlation(
    x, slopes, sums,
    x_node, x_image, x_channel, x_row, x_column,
    g_node, g_image, g_channel, g_row, g_column,
    B, C, H, W, M, P, Q, N, PARTS,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    node, part = (tl.program_id(2) // PARTS).to(tl.int64), tl.program_id(2) % PARTS
    x, slopes = x + node * x_node, slopes + node * g_node
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)  # counts (channel, row, column) of a kernel
    channel, tap = n // (KH * KW), n % (KH * KW)
    down, across = tap // KW * DH - PH, tap % KW * DW - PW
    total = tl.zeros((BM, BN), tl.float32)
    pixels = B * P * Q
    share = tl.cdiv(tl.cdiv(pixels, PARTS), BK) * BK
    for first in range(part * share, tl.minimum((part + 1) * share, pixels), BK):
        pixel = first + tl.arange(0, BK)
        real = pixel < pixels
        image, place = (pixel // (P * Q)).to(tl.int64), pixel % (P * Q)
        row, column = place // Q, place % Q
        r, c = row[None, :] * SH + down[:, None], column[None, :] * SW + across[:, None]
        there = real[None, :] & (n < N)[:, None] & (r >= 0) & (r < H) & (c >= 0) & (c < W)
        at = (image * x_image)[None, :] + (channel * x_channel)[:, None] + r * x_row + c * x_column
        values = tl.load(x + at, mask=there, other=0.0)
        at = image * g_image + row * g_row + column * g_column
        factors = tl.load(
            slopes + m[:, None] * g_channel + at[None, :], mask=(m < M)[:, None] & real[None, :], other=0.0
        )
        total = tl.dot(factors, tl.trans(values), total)
    nodes = tl.num_programs(2) // PARTS
    at = ((part * nodes + node) * M + m[:, None]) * N + n[None, :]
    tl.store(sums + at, total, mask=(m < M)[:, None] & (n < N)[None, :])
