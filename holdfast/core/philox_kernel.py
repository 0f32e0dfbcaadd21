"""Philox as one kernel for a GPU; imported where it is used, as only torch for a GPU comes with Triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256
# Numbers that differ from draw to draw; without this, each kind of number is a kernel to compile.
_NUMBERS = ["k1", "columns", "size", *(f"{way}{word}" for word in range(5) for way in ("down", "across"))]


@triton.jit(do_not_specialize=_NUMBERS)
def _kernel(  # Triton reads the annotations of its kernels itself
    out, c0, c1, c2, c3, k0, k1, columns, size,
    down0, across0, down1, across1, down2, across2, down3, across3, down4, across4,
    ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = place < size
    row, column = place // columns, place % columns
    x0 = tl.load(c0 + row * down0 + column * across0, mask=there, other=0).to(tl.uint32)
    x1 = tl.load(c1 + row * down1 + column * across1, mask=there, other=0).to(tl.uint32)
    x2 = tl.load(c2 + row * down2 + column * across2, mask=there, other=0).to(tl.uint32)
    x3 = tl.load(c3 + row * down3 + column * across3, mask=there, other=0).to(tl.uint32)
    key = tl.load(k0 + row * down4 + column * across4, mask=there, other=0).to(tl.uint32)
    second = tl.zeros((BLOCK,), tl.uint32) + k1.to(tl.uint32)
    x0, x1, x2, x3 = tl.philox_impl(x0, x1, x2, x3, key, second, ROUNDS)
    tl.store(out + 4 * place, x0.to(tl.int64), mask=there)
    tl.store(out + 4 * place + 1, x1.to(tl.int64), mask=there)
    tl.store(out + 4 * place + 2, x2.to(tl.int64), mask=there)
    tl.store(out + 4 * place + 3, x3.to(tl.int64), mask=there)


def philox_on_gpu(words: Sequence[Tensor], k1: int, rounds: int) -> Tensor:
    """Four random words [..., 4] for the counter and the first word of the key, which broadcast."""
    shape = torch.broadcast_shapes(*(word.shape for word in words))
    out = words[0].new_empty(*shape, 4)
    columns, size = (shape[-1] if shape else 1), out.numel() // 4
    if size:
        tables = [word.expand(shape).reshape(-1, columns) for word in words]
        strides = [step for table in tables for step in table.stride()]
        grid = (triton.cdiv(size, _BLOCK),)
        with torch.cuda.device(out.device):
            _kernel[grid](out, *tables, k1, columns, size, *strides, ROUNDS=rounds, BLOCK=_BLOCK)
    return out
