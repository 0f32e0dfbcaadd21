"""The backend ``loop``: one row after the other, by plain automatic differentiation.

It works for every layer on every device. On a CPU it is also the fastest for convolutions: the rows are
spread over the cores, and images may be laid out pixel by pixel.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from holdfast.core.tree import Tree, leaves, tree_map
from holdfast.problem.gradients.backend import Activations, no_key, row_value_and_gradient
from holdfast.problem.row_loss import RowLoss, without_fused_layers
from holdfast.problem.source import Batch

# Without gradients on a CPU: so many samples' planes of a layer stay near the core. With thousands at once, a
# small CNN takes three times as long.
SAMPLES_AT_ONCE = 256
PLANES_AT_ONCE = 8  # numbers in a register of a CPU: with fewer planes, going pixel by pixel takes longer

Result = TypeVar("Result")

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
    def description(self) -> str:
        where = f" on {torch.get_num_threads()} cores" if self.on_cpu else ""
        return f"nodes one by one{where}, {self.why}"

    def values_and_gradients(self, x: Tensor, batch: Batch, keys: Tensor) -> tuple[Tensor, Tensor]:
        lay_out = laid_out_by_pixel if self.by_pixel else _as_it_is  # asked here, not by several threads

        def of_row(loss: RowLoss, row: Tensor, batch: Batch, key: Tensor) -> tuple[Tensor, Tensor]:
            return row_value_and_gradient(loss, row, lay_out(batch), key)

        values, gradients = zip(*self._spread(of_row, x, unbound(batch), keys), strict=True)
        if len(gradients) == 1:  # without a copy: a node on its own may have a large model
            return values[0][None], gradients[0][None]
        return torch.stack(values), torch.stack(gradients)

    def _spread(self, work: Callable[..., Result], parts: Sequence[Any] | Tensor, *more: Any) -> list[Result]:
        """``work(loss, part, ...)`` for all parts: on a CPU on all cores, which a single part has as well."""
        if not self.on_cpu or len(parts) == 1:
            return [work(self.loss, *each) for each in zip(parts, *more, strict=True)]
        pool = _pool(torch.get_num_threads())
        return list(pool.map(lambda *each: work(self._loss_of_thread(), *each), parts, *more))

    def _loss_of_thread(self) -> RowLoss:
        if not hasattr(self._own, "loss"):
            self._own.loss = self.loss.copy()
        loss: RowLoss = self._own.loss
        return loss

    def values(self, x: Tensor, batch: Batch, keys: Tensor) -> Tensor:
        return torch.stack([self.loss.value(*row) for row in zip(x, unbound(batch), keys, strict=True)])

    def hessians(self, x: Tensor, batch: Batch, keys: Tensor) -> Tensor:
        def second(row: Tensor, batch: Batch, key: Tensor) -> Tensor:
            derivative: Tensor = torch.autograd.functional.hessian(
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

    def tested(self, x: Tensor, samples: Tree) -> Tensor:
        pieces = list(self._pieces(samples))

        @torch.no_grad()  # not inherited by threads
        def of_row(loss: RowLoss, row: Tensor) -> Tensor:
            return torch.stack([loss.tested(row, some) for some in pieces]).sum(0)

        return torch.stack(self._spread(of_row, x))

    def evaluated(self, row: Tensor, batch: Batch) -> Tensor:
        @torch.no_grad()
        def of_piece(loss: RowLoss, some: Batch) -> Tensor:
            return loss.evaluated(row, some)

        return torch.stack(self._spread(of_piece, list(self._pieces(batch)))).sum(0)

    def outputs(self, x: Tensor, samples: Tree) -> Any:
        samples = laid_out_by_pixel(samples) if self.by_pixel else samples
        return tree_map(lambda *rows: torch.stack(rows), *(self.loss.outputs(row, samples) for row in x))

    def _pieces(self, samples: Tree) -> Iterator[Tree]:
        """``samples`` as they are computed best: on a CPU a few at a time, images pixel by pixel.

        A loss that gives one number for a batch sees all at once.
        """
        size = len(next(leaves(samples)))
        step = SAMPLES_AT_ONCE if self.on_cpu and self.loss.loss.per_sample else size
        for first in range(0, size, step):
            some = tree_map(lambda part, first=first: part[first : first + step], samples)
            yield laid_out_by_pixel(some) if self.by_pixel else some

    def step_bytes(self, nodes: int, batch: int) -> int:
        return self.activations.of_step(min(nodes, torch.get_num_threads() if self.on_cpu else 1) * batch)

    def _runs_by_pixel(self) -> bool:
        """Whether the model has a gradient with this layout; with a ``view`` of planes it has none."""
        row = self.loss.model.x0
        try:
            with torch.enable_grad():
                example = laid_out_by_pixel(self.activations.example)
                row_value_and_gradient(self.loss, row, example, no_key(row))
        except RuntimeError:  # torch's word for a layout that an operation cannot take
            return False
        return True


def unbound(batch: Batch) -> Iterator[Batch]:
    """The batch of every row, one by one."""
    return (tree_map(lambda part, row=row: part[row], batch) for row in range(len(batch.weight)))


def laid_out_by_pixel(tree: Tree) -> Tree:
    """``tree`` with all images [B, C, H, W] in it copied so that the planes of a pixel lie side by side."""

    def by_pixel(part: Tensor) -> Tensor:
        if part.ndim != 4:
            return part
        # Not ``contiguous``: grey images already are, in both layouts, and would be taken for the usual one.
        return torch.empty_like(part, memory_format=torch.channels_last).copy_(part)

    return tree_map(by_pixel, tree)


def _as_it_is(tree: Tree) -> Tree:
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
