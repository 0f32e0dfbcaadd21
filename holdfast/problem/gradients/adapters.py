"""The backend ``adapters``: one call of the model for all rows, where only a small part of it is trained.

The batches of all nodes lie end to end, and the frozen part of the model sees them as one. No function
transform is needed for it: rows do not interact, so the gradient of the sum of all losses holds every row's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import copy, deepcopy
from functools import cached_property
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional

from holdfast.core.tree import tree_map
from holdfast.models import CountedDropout
from holdfast.problem.gradients.backend import Activations, Backend, in_parts, no_key, row_value_and_gradient
from holdfast.problem.gradients.support import NarrowLinear
from holdfast.problem.row_loss import RowLoss
from holdfast.problem.source import Batch

# --- A model that is run once over the batches of all nodes, laid end to end ----------------------------
#
# Only what differs between nodes is computed node by node: layers that are trained, and dropout. The rest of
# the model, a frozen backbone, sees one large batch and does not know of nodes.


Task = Callable[..., Tensor]  # (run, what a node has) -> a number


class LinearOfNodes(nn.Linear):
    """A linear layer in which every node has its own weight [n, out, in] or bias [n, out], or both.

    Inputs are [n B, ..., in]. A weight or bias that all nodes share has its usual shape.
    """

    traceable = True

    def _get_name(self) -> str:
        return "Linear"  # what the user calls it, for messages

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if weight.ndim == 2:
            outputs = functional.linear(x, weight)
        else:
            of_nodes = x.reshape(len(weight), -1, x.shape[-1])
            outputs = torch.bmm(of_nodes, weight.mT).view(*x.shape[:-1], weight.shape[1])
        if bias is None or bias.ndim == 1:
            return outputs if bias is None else outputs + bias
        return (outputs.reshape(len(bias), -1, outputs.shape[-1]) + bias.unsqueeze(1)).view_as(outputs)


class Together:
    """A copy of ``module`` that computes for all nodes at once; its parameters are the same tensors.

    ``places``: qualified names of the parameters and buffers of which every node has its own.
    """

    def __init__(self, module: nn.Module, places: list[str]) -> None:
        self.module = deepcopy(module, {id(t): t for t in (*module.parameters(), *module.buffers())})
        self._nodes = 0  # while the module runs
        self._losses: list[Tensor] = []  # the losses that it has computed itself, [n] each
        self._drawing: CountedDropout | None = None  # masks of torch's dropout
        owned: dict[str, list[str]] = {}
        for place in places:
            path, _, name = place.rpartition(".")
            owned.setdefault(path, []).append(name)
        for path, names in owned.items():
            layer = self.module.get_submodule(path)
            if type(layer) in (nn.Linear, NarrowLinear):
                layer.__class__ = LinearOfNodes
            else:
                self._run_by_node(layer, names)
        part: Any
        for part in self.module.modules():
            # A model of the transformers library computes its loss itself, from labels, by this attribute.
            if isinstance(getattr(type(part), "loss_function", None), property):
                part.loss_function = self._loss_by_node(part.loss_function)

    @property
    def masks(self) -> list[tuple[int, ...]]:
        """Shapes of the masks of dropout that all nodes had together in the last call."""
        return self._drawing.shapes if self._drawing else []

    def values(self, task: Task, *of_nodes: Any, keys: Tensor | None = None) -> Tensor:
        """``task(run, *part)``, a number, for the part of every node in the trees ``of_nodes`` [n, ...]; [n].

        A task returns a number and must call ``run(own, args, kwargs)`` once, which stands for the module
        with the node's own tensors at the places. Each task runs twice: first to find the module's arguments,
        then with the module's outputs for its node. With ``keys`` [n, 4] = (seed, node, round, step), torch's
        dropout in the module draws from these; without them it draws as in torch.
        """
        own, args, kwargs = self._asked(task, of_nodes)
        self._nodes = len(next(iter(own.values())))
        args, kwargs = _mapped(lambda given: given.flatten(0, 1), (args, kwargs))
        self._drawing = None if keys is None else CountedDropout(keys)
        try:
            with self._drawing or nullcontext():
                outputs = functional_call(self.module, own, args, kwargs, tie_weights=False)
            split = _mapped(self._split, outputs)
        finally:
            self._losses.clear()
        tensors, others, form = _parted(split)

        def go_on(tensors: list[Tensor], *part: Any) -> Tensor:
            answers = [_joined(tensors, others, form)]

            def run(*_: Any) -> Any:
                if not answers:
                    raise RuntimeError("the step calls the model more than once")
                return answers.pop()

            return task(run, *part)

        values: Tensor = vmap(go_on)(tensors, *of_nodes)
        return values

    def _asked(self, task: Task, of_nodes: tuple[Any, ...]) -> Any:
        """The arguments with which the tasks call ``run``, tensors as [n, ...]."""
        calls: list[Any] = []

        def run(*call: Any) -> Any:
            calls.append(call)
            raise _AskedError

        def ask(*part: Any) -> list[Tensor]:
            try:
                task(run, *part)
            except _AskedError:
                tensors, *rest = _parted(calls.pop())
                calls.append(rest)
                return tensors
            raise RuntimeError("the step does not call the model")

        return _joined(vmap(ask)(*of_nodes), *calls.pop())

    def _split(self, outputs: Tensor) -> Tensor:
        """[n B, ...] as [n, B, ...]."""
        if any(outputs is losses for losses in self._losses):
            return outputs
        return outputs.reshape(self._nodes, -1, *outputs.shape[1:])

    def _run_by_node(self, layer: nn.Module, names: list[str]) -> None:
        """Lets ``layer`` compute [n B, ...] with what every node has of its tensors ``names``, [n, ...]."""
        plain = copy(layer)

        def one(own: dict[str, Tensor], x: Tensor, *key: Tensor) -> Any:
            with self._drawing.of_node(*key) if self._drawing else nullcontext():
                return functional_call(plain, own, (x,))

        def forward(x: Tensor) -> Tensor:
            own = {name: getattr(layer, name) for name in names}
            keys = [self._drawing.key] if self._drawing else []
            outputs: Tensor = vmap(one)(own, self._split(x), *keys)
            return outputs.flatten(0, 1)

        layer.forward = forward

    def _loss_by_node(self, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """``loss(logits, labels, ...)`` of every node, [n], where one would be computed for all samples."""

        def by_node(logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            losses: Tensor = vmap(lambda logits, labels: loss(logits, labels, *args, **kwargs))(
                self._split(logits), self._split(labels)
            )
            self._losses.append(losses)
            return losses

        return by_node


class _AskedError(Exception):
    """Ends a task at its call of the module."""


def _parted(tree: Any) -> tuple[list[Tensor], list[Any], pytree.TreeSpec]:
    """The tensors of ``tree``; its other leaves as (leaf,), with None for a tensor; and its form."""
    leaves, form = pytree.tree_flatten(tree)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return tensors, [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves], form


def _joined(tensors: Sequence[Tensor], others: list[Any], form: pytree.TreeSpec) -> Any:
    """The tree that ``_parted`` has taken apart, with other tensors."""
    given = iter(tensors)
    return pytree.tree_unflatten([next(given) if leaf is None else leaf[0] for leaf in others], form)


def _mapped(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    tensors, others, form = _parted(tree)
    return _joined([function(tensor) for tensor in tensors], others, form)


# --- the backend ``adapters`` ---------------------------------------------------------------------------


# The largest share of the parameters that may be trained if the rest is to count as a backbone.
SMALL_PART = 0.25
# Rows are small beside the activations, which the backward pass of a frozen layer frees one by one.
SHARE_FOR_ACTIVATIONS = 0.5
BACKWARD_OVER_FORWARD = 1.5
# How far gradients may be from those of single rows: rounding stays below it, mixed samples do not.
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
        self.description = "all nodes end to end over one frozen model" + (f", {why}" if why else "")
        self._training, self._evaluation = (Together(*part) for part in loss.model.parts)
        self._make_second = second

    def values_and_gradients(self, x: Tensor, batch: Batch, keys: Tensor) -> tuple[Tensor, Tensor]:
        return in_parts(self._some, self.activations.at_once, x, batch, keys)

    def _some(self, x: Tensor, batch: Batch, keys: Tensor) -> tuple[Tensor, Tensor]:
        def value(run: Any, row: Tensor, batch: Batch, key: Tensor) -> Tensor:
            return self.loss.differentiable(self.loss.model.parameters(row), batch, key, run)

        # By autograd itself, not a function transform: it frees activations during the backward pass,
        # which takes half the memory.
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
        """The relative error of the gradients of two rows against those one by one: the worst parameter's.

        It is large if samples of different nodes mix, as by batch statistics, or if a layer that is trained
        is used other than by calling it.
        """
        _ = self.activations.at_once  # found here, since it must be known before anything is compiled
        x0, model = self.loss.model.x0, self.loss.model
        noise = torch.sin(torch.arange(2 * len(x0), device=x0.device, dtype=torch.float64)).view(2, -1)
        x = x0 + noise.to(x0.dtype) * (0.1 * x0.square().mean().sqrt() + 0.01)
        # Two samples that differ: the second has the numbers of the first, shifted by one place.
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
