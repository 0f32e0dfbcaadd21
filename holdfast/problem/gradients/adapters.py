"""The backend ``adapters``: one call of the model for all rows, where only a small part of it is trained.

The batches of all nodes lie end to end, and the frozen part of the model sees them as one. No function
transform is needed for it: rows do not interact, so the gradient of the sum of all losses holds every row's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from holdfast.core.tree import tree_map
from holdfast.problem.gradients.backend import Activations, Backend, in_parts, no_key, row_value_and_gradient
from holdfast.problem.gradients.together import Together
from holdfast.problem.row_loss import RowLoss
from holdfast.problem.source import Batch

# Of all parameters, what may be trained for the rest to be called a backbone.
SMALL_PART = 0.25
# Rows are small beside the activations, which the backward pass of a frozen layer lets go one by one.
SHARE_FOR_ACTIVATIONS = 0.5
BACKWARD_OVER_FORWARD = 1.5
# How far gradients may be from those of single rows: rounding stays below it, samples that mix do not.
ROUNDING = {torch.float64: 1e-4, torch.float32: 1e-2, torch.float16: 0.2, torch.bfloat16: 0.2}


class Adapters:
    """All rows in one call of the model, in parts where their activations would not fit the memory.

    ``second``: makes the backend for second derivatives, which are seldom asked for.
    """

    stacked = True
    vmapped = False
    fuses = False
    traceable = False

    def __init__(
        self, loss: RowLoss, activations: Activations, second: Callable[[], Backend], why: str = ""
    ) -> None:
        self.loss = loss
        self.activations = activations.allowing(SHARE_FOR_ACTIVATIONS, BACKWARD_OVER_FORWARD)
        self.how = "all nodes end to end over one frozen model" + (f", {why}" if why else "")
        self._training, self._evaluation = (Together(*part) for part in loss.model.parts)
        self._make_second = second

    def values_and_gradients(self, x: Tensor, batch: Batch, keys: Tensor) -> tuple[Tensor, Tensor]:
        return in_parts(self._some, self.activations.at_once, x, batch, keys)

    def _some(self, x: Tensor, batch: Batch, keys: Tensor) -> tuple[Tensor, Tensor]:
        def value(run: Any, row: Tensor, batch: Batch, key: Tensor) -> Tensor:
            return self.loss.differentiable(self.loss.model.parameters(row), batch, key, run)

        # By autograd itself, not a function transform: it lets go of activations while it goes back, which
        # takes half the memory.
        with torch.enable_grad():
            rows = x.detach().requires_grad_()
            values = self._training.values(value, rows, batch, keys, keys=self._drawn_by(keys))
            return values.detach(), torch.autograd.grad(values.sum(), rows)[0]

    def _drawn_by(self, keys: Tensor) -> Tensor | None:
        return keys if self.loss.model.draws else None

    def values(self, x: Tensor, batch: Batch, keys: Tensor) -> Tensor:
        def value(run: Any, row: Tensor, batch: Batch, key: Tensor) -> Tensor:
            return self.loss.value(row, batch, key, run)

        return self._training.values(value, x, batch, keys, keys=self._drawn_by(keys))

    def tested(self, x: Tensor, samples: Any) -> Tensor:
        def figures(run: Any, row: Tensor) -> Tensor:
            return self.loss.tested(row, samples, run)

        return self._evaluation.values(figures, x)

    def evaluated(self, row: Tensor, batch: Batch) -> Tensor:
        return self.loss.evaluated(row, batch)

    def outputs(self, x: Tensor, samples: Any) -> Any:
        return self._evaluation.values(lambda run, row: self.loss.outputs(row, samples, run), x)

    @cached_property
    def _second(self) -> Backend:
        return self._make_second()

    def hessians(self, x: Tensor, batch: Batch, keys: Tensor) -> Tensor:
        return self._second.hessians(x, batch, keys)

    def hessian_products(self, x: Tensor, v: Tensor, batch: Batch, keys: Tensor) -> Tensor:
        return self._second.hessian_products(x, v, batch, keys)

    def step_bytes(self, nodes: int, batch: int) -> int:
        return self.activations.of_step(min(nodes * batch, max(batch, self.activations.at_once)))

    def difference(self) -> float:
        """How far the gradients of two rows are from those one by one: the worst of all parameters, relative.

        It is large if samples of different nodes mix, as by batch statistics, or if a layer that is trained
        is used other than by calling it.
        """
        _ = self.activations.at_once  # has to be found before anything is compiled, as this has to
        x0, model = self.loss.model.x0, self.loss.model
        noise = torch.sin(torch.arange(2 * len(x0), device=x0.device, dtype=torch.float64)).view(2, -1)
        x = x0 + noise.to(x0.dtype) * (0.1 * x0.square().mean().sqrt() + 0.01)
        # Two samples that differ: the second is the first with its numbers moved on by one place.
        batch = tree_map(lambda part: torch.stack([part, part.roll(1)]), self.activations.example)
        keys = torch.stack([no_key(x), no_key(x) + 1])
        _, found = self._some(x, batch, keys)
        self._check_masks(x, batch, keys)
        distances = []
        for row in range(2):
            own = tree_map(lambda part, row=row: part[row], batch)
            _, alone = row_value_and_gradient(self.loss, x[row], own, keys[row])
            pairs = zip(model.parameters(found[row]).values(), model.parameters(alone).values(), strict=True)
            floor = 1e-3 * float(alone.norm()) + 1e-30
            distances += [float((a - b).norm()) / max(float(b.norm()), floor) for a, b in pairs]
        return float(torch.tensor(distances).max())  # NaN if any is

    def _check_masks(self, x: Tensor, batch: Batch, keys: Tensor) -> None:
        """Raises if a mask of dropout does not have the samples first; the last call was of two rows."""
        if masks := self._training.masks:
            self._some(*tree_map(lambda part: part[:1], (x, batch, keys)))
            if masks != [(2 * first, *rest) for first, *rest in self._training.masks]:
                raise RuntimeError("dropout of a tensor whose first dimension is not that of the samples")
