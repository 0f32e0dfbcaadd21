"""Convolutions of all nodes at once for a GPU; imported where it is used, as it needs Triton.

Images are [B, n C, H, W], of which every node has C planes, and lie in memory pixel by pixel. Convolutions
are square and in float32; with ``tf32``, factors are rounded to ten bits, as cuDNN does.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

Grid = tuple[int, int, int]
Numbers = tuple[int | str, ...]  # the arguments of a kernel beside its tensors

_COMPILER = ThreadPoolExecutor(4, "compiler")


@triton.jit
def _products(  # Triton reads the annotations of its kernels itself
    x, w, y, images, height, width, rows, columns, nodes,
    C: tl.constexpr, M: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    PRECISION: tl.constexpr, PIXELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Every program: some pixels of some planes of one node. The weights are [n, K, K, C, M]."""
    node = tl.program_id(2)
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    blocks: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    image, row, column = pixel // (rows * columns), pixel // columns % rows, pixel % columns
    real = pixel < images * rows * columns
    w += node.to(tl.int64) * (K * K * C * M)
    total = tl.zeros((PIXELS, BLOCK_M), tl.float32)
    for part in range(K * K * blocks):
        tap, c = part // blocks, part % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
        r, q = row * STRIDE - PAD + tap // K, column * STRIDE - PAD + tap % K
        there = real & (r >= 0) & (q >= 0) & (r < height) & (q < width)
        at = (image.to(tl.int64) * (height * width) + r * width + q) * (nodes * C) + node * C
        values = tl.load(x + at[:, None] + c[None, :], mask=there[:, None] & (c < C)[None, :], other=0.0)
        inside = (c < C)[:, None] & (m < M)[None, :]
        weights = tl.load(w + tap * (C * M) + c[:, None] * M + m[None, :], mask=inside, other=0.0)
        total = tl.dot(values, weights, total, input_precision=PRECISION)
    at = pixel.to(tl.int64) * (nodes * M) + node * M
    tl.store(y + at[:, None] + m[None, :], total, mask=real[:, None] & (m < M)[None, :])


@triton.jit
def _correlations(
    x, g, w, images, height, width, rows, columns, nodes, splits,
    C: tl.constexpr, M: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    PRECISION: tl.constexpr, PIXELS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Every program: some pixels of one node, and part of a row of taps; sums are [splits, n, K, K, C, M]."""
    blocks: tl.constexpr = (K * C + BLOCK_N - 1) // BLOCK_N
    tap_row = tl.program_id(0) // blocks
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    node, split = tl.program_id(2) // splits, tl.program_id(2) % splits
    n = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    tap, c = n // C, n % C
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    pixels = images * rows * columns
    share = tl.cdiv(tl.cdiv(pixels, splits), PIXELS) * PIXELS
    for start in range(split * share, tl.minimum(split * share + share, pixels), PIXELS):
        pixel = start + tl.arange(0, PIXELS)
        image, row, column = pixel // (rows * columns), pixel // columns % rows, pixel % columns
        real = pixel < pixels
        r = row * STRIDE - PAD + tap_row
        q = column[:, None] * STRIDE - PAD + tap[None, :]
        there = (real & (r >= 0) & (r < height))[:, None] & (tap < K)[None, :] & (q >= 0) & (q < width)
        line = (image.to(tl.int64) * height + r) * width
        at = (line[:, None] + q) * (nodes * C) + node * C + c[None, :]
        values = tl.load(x + at, mask=there, other=0.0)
        of_g = pixel.to(tl.int64) * (nodes * M) + node * M
        slopes = tl.load(g + of_g[:, None] + m[None, :], mask=real[:, None] & (m < M)[None, :], other=0.0)
        total = tl.dot(tl.trans(values), slopes, total, input_precision=PRECISION)
    at = ((split.to(tl.int64) * nodes + node) * K + tap_row) * (K * C) + n
    tl.store(w + at[:, None] * M + m[None, :], total, mask=(n < K * C)[:, None] & (m < M)[None, :])


def products(x: Tensor, w: Tensor, stride: int, padding: int, size: tuple[int, int], tf32: bool) -> Tensor:
    """The convolution of ``x`` with ``w`` [n, M, C, k, k], so far as to have images of ``size``."""
    y = x.new_empty(len(x), *size, w.shape[0] * w.shape[1]).permute(0, 3, 1, 2)
    grid, numbers = _of_products(x, w, stride, padding, size, tf32)
    with torch.cuda.device(x.device):
        _products[grid](x, w.permute(0, 3, 4, 2, 1).contiguous(), y, *numbers, num_stages=1)
    return y


def compile_products(
    x: Tensor, w: Tensor, stride: int, padding: int, size: tuple[int, int], tf32: bool
) -> None:
    """Begins to compile the kernel of ``products``, which is called later; these tensors hold no numbers."""
    grid, numbers = _of_products(x, w, stride, padding, size, tf32)
    _compile(_products, x.device, grid, numbers, num_stages=1)


def _of_products(
    x: Tensor, w: Tensor, stride: int, padding: int, size: tuple[int, int], tf32: bool
) -> tuple[Grid, Numbers]:
    n, m, c, k, _ = w.shape
    images, _, height, width = x.shape
    rows, columns = size
    pixels, block_m = 128, _block(m, 64)
    grid = (triton.cdiv(images * rows * columns, pixels), triton.cdiv(m, block_m), n)
    forms = (c, m, k, stride, padding, "tf32" if tf32 else "ieee", pixels, _block(c, 64), block_m)
    return grid, (images, height, width, rows, columns, n, *forms)


def correlations(x: Tensor, g: Tensor, n: int, k: int, stride: int, padding: int, tf32: bool) -> Tensor:
    """The gradient [n, M, C, k, k] in the weights, where ``g`` [B, n M, P, Q] is that in the outputs."""
    grid, splits, numbers = _of_correlations(x, g, n, k, stride, padding, tf32)
    w = x.new_empty(splits, n, k, k, x.shape[1] // n, g.shape[1] // n)
    with torch.cuda.device(x.device):
        _correlations[grid](x, g, w, *numbers, num_stages=2)
    return w.sum(0).permute(0, 4, 3, 1, 2).contiguous()


def compile_correlations(x: Tensor, g: Tensor, n: int, k: int, stride: int, padding: int, tf32: bool) -> None:
    """Begins to compile the kernel of ``correlations``, which is called later."""
    grid, _, numbers = _of_correlations(x, g, n, k, stride, padding, tf32)
    _compile(_correlations, x.device, grid, numbers, num_stages=2)


def _of_correlations(
    x: Tensor, g: Tensor, n: int, k: int, stride: int, padding: int, tf32: bool
) -> tuple[Grid, int, Numbers]:
    images, planes, height, width = x.shape
    rows, columns = g.shape[2:]
    c, m = planes // n, g.shape[1] // n
    block_n, block_m = _block(k * c, 128), _block(m, 64)
    taps, outputs = k * triton.cdiv(k * c, block_n), triton.cdiv(m, block_m)
    splits = max(1, min(16, 1024 // (taps * outputs * n)))  # as many programs as keep a GPU busy
    forms = (c, m, k, stride, padding, "tf32" if tf32 else "ieee", 64, block_n, block_m)
    return (taps, outputs, n * splits), splits, (images, height, width, rows, columns, n, splits, *forms)


def _block(size: int, most: int) -> int:
    return int(min(most, max(16, triton.next_power_of_2(size))))


def _compile(kernel: Any, device: torch.device, grid: Grid, numbers: Numbers, num_stages: int) -> None:
    """While torch compiles the rest of a round, which takes longer. Where it fails, the call will say so."""

    def run() -> None:
        with torch.cuda.device(device):
            kernel.warmup(*[torch.float32] * 3, *numbers, grid=grid, num_stages=num_stages)

    _COMPILER.submit(run)
