"""The backend ``loop``: one row after the other, by plain automatic differentiation.

It works for every layer on every device. On a CPU it is also the fastest for convolutions: the rows are
spread over the cores, and images may be laid out pixel by pixel.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.core.tree import tree_map
from holdfast.problem.gradients.backend import Activations, no_key, row_gradient
from holdfast.problem.row_loss import RowLoss, without_fused_layers
from holdfast.problem.source import Batch

PLANES_AT_ONCE = 8  # numbers in a register of a CPU: with fewer planes, going pixel by pixel takes longer

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Loop:
    """One row after the other; on a CPU, gradients on all cores."""

    stacked = False
    vmapped = False
    fuses = False
    traceable = False

    def __init__(self, loss: RowLoss, activations: Activations, why: str) -> None:
        self.loss, self.activations, self.why = loss, activations, why
        self.on_cpu = loss.model.x0.device.type == "cpu"
        self._own = threading.local()

    @cached_property
    def by_pixel(self) -> bool:
        """Whether images are laid out pixel by pixel; found when first asked, after the model was checked."""
        return self.on_cpu and _planes_fill_registers(self.loss.model.template) and self._runs_by_pixel()

    @property
    def how(self) -> str:
        where = f" on {torch.get_num_threads()} cores" if self.on_cpu else ""
        return f"nodes one by one{where}, {self.why}"

    def gradients(self, x: Tensor, batch: Batch, keys: Tensor) -> Tensor:
        rows = (x, unbound(batch), keys)
        if not self.on_cpu:
            return torch.stack([row_gradient(self.loss, *row) for row in zip(*rows, strict=True)])
        lay_out = laid_out_by_pixel if self.by_pixel else _as_it_is  # asked here, not by several threads
        if len(x) == 1:  # a node on its own has all cores
            return row_gradient(self.loss, x[0], lay_out(next(unbound(batch))), keys[0])[None]

        def in_thread(row: Tensor, batch: Batch, key: Tensor) -> Tensor:
            if not hasattr(self._own, "loss"):
                self._own.loss = self.loss.copy()
            return row_gradient(self._own.loss, row, lay_out(batch), key)

        return torch.stack(list(_pool(torch.get_num_threads()).map(in_thread, *rows)))

    def values(self, x: Tensor, batch: Batch, keys: Tensor) -> Tensor:
        return torch.stack([self.loss.value(*row) for row in zip(x, unbound(batch), keys, strict=True)])

    def hessians(self, x: Tensor, batch: Batch, keys: Tensor) -> Tensor:
        def second(row: Tensor, batch: Batch, key: Tensor) -> Tensor:
            derivative: Tensor = torch.autograd.functional.hessian(  # type: ignore[no-untyped-call]
                lambda at: self.loss.value(at, batch, key), row.detach()
            )
            return derivative

        with without_fused_layers():
            return torch.stack([second(*row) for row in zip(x, unbound(batch), keys, strict=True)])

    def hessian_products(self, x: Tensor, v: Tensor, batch: Batch, keys: Tensor) -> Tensor:
        def product(row: Tensor, v: Tensor, batch: Batch, key: Tensor) -> Tensor:
            at = row.detach().requires_grad_()
            [gradient] = torch.autograd.grad(self.loss.value(at, batch, key), at, create_graph=True)
            return torch.autograd.grad(gradient @ v, at)[0]

        with torch.enable_grad(), without_fused_layers():
            return torch.stack([product(*row) for row in zip(x, v, unbound(batch), keys, strict=True)])

    def tested(self, x: Tensor, samples: Any) -> Tensor:
        samples = laid_out_by_pixel(samples) if self.by_pixel else samples
        return torch.stack([self.loss.tested(row, samples) for row in x])

    def step_bytes(self, nodes: int, batch: int) -> int:
        return self.activations.of_step(min(nodes, torch.get_num_threads() if self.on_cpu else 1) * batch)

    def _runs_by_pixel(self) -> bool:
        """Whether the model has a gradient pixel by pixel; one that takes a ``view`` of planes has not."""
        row = self.loss.model.x0
        try:
            with torch.enable_grad():
                row_gradient(self.loss, row, laid_out_by_pixel(self.activations.example), no_key(row))
        except RuntimeError:  # torch's word for a layout that an operation cannot take
            return False
        return True


def unbound(batch: Batch) -> Iterator[Batch]:
    """The batch of every row, one by one."""
    return (tree_map(lambda part, row=row: part[row], batch) for row in range(len(batch.weight)))


def laid_out_by_pixel(tree: Any) -> Any:
    """``tree`` with all images [B, C, H, W] in it copied so that the planes of a pixel lie side by side."""

    def by_pixel(part: Tensor) -> Tensor:
        if part.ndim != 4:
            return part
        # Not ``contiguous``: grey images already are, in both layouts, and would be taken for the usual one.
        return torch.empty_like(part, memory_format=torch.channels_last).copy_(part)

    return tree_map(by_pixel, tree)


def _as_it_is(tree: Any) -> Any:
    return tree


def _planes_fill_registers(model: nn.Module) -> bool:
    layers = [part for part in model.modules() if isinstance(part, CONVOLUTIONS)]
    return bool(layers) and all(layer.out_channels % PLANES_AT_ONCE == 0 for layer in layers)


@cache
def _pool(cores: int) -> ThreadPoolExecutor:
    """Threads whose kernels use one core each."""
    pool = ThreadPoolExecutor(cores, initializer=_settle_on_one_core)
    all_started = threading.Barrier(cores + 1)
    for _ in range(cores):
        pool.submit(all_started.wait)
    all_started.wait()
    torch.set_num_threads(cores)  # what was set last, anywhere, is what other threads of the user start with
    return pool


def _settle_on_one_core() -> None:
    """Has this thread's kernels use one core, whatever is set later.

    A thread's first convolution fixes the number of cores of all its convolutions. With two for each of two
    threads, they wait for one another most of the time: a round took five times as long.
    """
    torch.set_num_threads(1)
    nn.functional.conv2d(torch.ones(1, 8, 8, 8), torch.ones(8, 8, 3, 3))
