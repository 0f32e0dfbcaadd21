"""A model that is run once over the batches of all nodes, laid end to end.

Only what differs between nodes is computed node by node: layers that are trained, and dropout. The rest of
the model, a frozen backbone, sees one large batch and does not know of nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import copy, deepcopy
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional

from holdfast.models import CountedDropout
from holdfast.problem.gradients.layers import NarrowLinear

Task = Callable[..., Tensor]  # (run, what a node has) -> a number


class LinearOfNodes(nn.Linear):
    """A linear layer with a weight [n, out, in] or a bias [n, out] of every node, or both.

    Inputs are [n B, ..., in]. Where a weight or bias is common to all nodes, it is as usual.
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

        A task must call ``run(own, args, kwargs)`` once, which stands for the module with the node's own
        tensors at the places. Each task is run twice: to see what it calls the module with, and again with
        what the module gives for its node. ``keys`` [n, 4] = (seed, node, round, step): by these, torch's
        dropout in the module draws; without them as torch does.
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
        """What the tasks call ``run`` with, tensors as [n, ...]."""
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
