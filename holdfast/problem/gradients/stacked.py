"""The backend ``stacked``: all rows in one call, by torch's function transforms.

Stacking turns the layers of all rows into batched ones, which is fast on a GPU, and for dense layers on a
CPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import grad, grad_and_value, hessian, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from holdfast.core.tree import Tree, leaves, tree_map
from holdfast.problem.gradients.backend import Activations, in_parts, row_value_and_gradient
from holdfast.problem.row_loss import RowLoss
from holdfast.problem.source import Batch

# On a CPU, working out a gradient again takes a millisecond or more; tracing it, a tenth of a second. Without
# tracing, a stacked step takes about a third longer there.
TRACE_FROM_CALLS = 20

# What torch's tracer raises for what it cannot follow, such as a branch that depends on numbers.
UNTRACEABLE = (RuntimeError, fx.proxy.TraceError)

ValueAndGradient = Callable[[Tensor, Batch, Tensor], tuple[Tensor, Tensor]]


class Stacked:
    """All rows in one call, in parts where their activations would not fit the memory."""

    stacked = True
    vmapped = True
    fuses = True

    def __init__(self, loss: RowLoss, activations: Activations, why: str = "") -> None:
        self.loss, self.activations = loss, activations
        self.description = "all nodes stacked" + (f", {why}" if why else "")
        self.on_cpu = loss.model.x0.device.type == "cpu"
        known = loss.loss.traceable and all(map(_is_known, loss.model.template.modules()))
        self.traceable = self.on_cpu and known
        self._together = stacked_value_and_gradient(loss)
        self._calls: Counter[tuple[torch.Size, ...]] = Counter()
        self._traced: dict[tuple[torch.Size, ...], ValueAndGradient] = {}

    def values_and_gradients(self, x: Tensor, batch: Batch, keys: Tensor) -> tuple[Tensor, Tensor]:
        if self.on_cpu and len(x) == 1:  # a node on its own, whose model may be large
            alone = tree_map(lambda part: part[0], batch)
            value, gradient = row_value_and_gradient(self.loss, x[0], alone, keys[0])
            return value[None], gradient[None]
        return in_parts(self._some, self.activations.at_once, x, batch, keys)

    def _some(self, x: Tensor, batch: Batch, keys: Tensor) -> tuple[Tensor, Tensor]:
        """``_together``; on a CPU, shapes that come often are traced into the operations it comes down to."""
        if not self.traceable or type(x) is not Tensor or torch.compiler.is_compiling():
            return self._together(x, batch, keys)
        shapes = (x.shape, *(part.shape for part in leaves(batch)))
        self._calls[shapes] += 1
        if self._calls[shapes] == TRACE_FROM_CALLS:
            with suppress(*UNTRACEABLE):  # tracing is optional; fall back to the untraced gradient
                self._traced[shapes] = make_fx(self._together)(x, batch, keys)
        return self._traced.get(shapes, self._together)(x, batch, keys)

    def values(self, x: Tensor, batch: Batch, keys: Tensor) -> Tensor:
        values: Tensor = vmap(self.loss.value)(x, batch, keys)
        return values

    def hessians(self, x: Tensor, batch: Batch, keys: Tensor) -> Tensor:
        second: Tensor = vmap(hessian(self.loss.value))(x, batch, keys)
        return second

    def hessian_products(self, x: Tensor, v: Tensor, batch: Batch, keys: Tensor) -> Tensor:
        def product(row: Tensor, v: Tensor, batch: Batch, key: Tensor) -> Tensor:
            image: Tensor = grad(lambda at: grad(self.loss.value)(at, batch, key) @ v)(row)
            return image

        products: Tensor = vmap(product)(x, v, batch, keys)
        return products

    def tested(self, x: Tensor, samples: Tree) -> Tensor:
        figures: Tensor = vmap(self.loss.tested, in_dims=(0, None))(x, samples)
        return figures

    def evaluated(self, row: Tensor, batch: Batch) -> Tensor:
        return self.loss.evaluated(row, batch)

    def outputs(self, x: Tensor, samples: Tree) -> Any:
        return vmap(self.loss.outputs, in_dims=(0, None))(x, samples)

    def step_bytes(self, nodes: int, batch: int) -> int:
        return self.activations.of_step(min(nodes * batch, max(batch, self.activations.at_once)))


def stacked_value_and_gradient(loss: RowLoss) -> ValueAndGradient:
    """The losses of all rows and their gradients as one function."""

    def value(row: Tensor, batch: Batch, key: Tensor) -> Tensor:
        return loss.differentiable(loss.model.parameters(row), batch, key)

    together = vmap(grad_and_value(value))

    def value_and_gradient(x: Tensor, batch: Batch, keys: Tensor) -> tuple[Tensor, Tensor]:
        gradients, values = together(x, batch, keys)
        return values, gradients

    return value_and_gradient


def _is_known(layer: nn.Module) -> bool:
    """Whether a layer does the same in every call: one of torch's own, or of a class that declares it."""
    kind, hooks = type(layer), layer._forward_hooks or layer._forward_pre_hooks
    return (kind.__module__.startswith("torch.nn.") or vars(kind).get("traceable", False)) and not hooks
