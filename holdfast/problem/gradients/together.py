"""A model that is run once over the batches of all nodes, laid end to end.

Only what differs between nodes is computed node by node: layers that are trained, and dropout. The rest of
the model, a frozen backbone, sees one large batch and does not know of nodes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional

Model = Callable[..., Any]
Task = Callable[..., Tensor]  # (model, what a node has) -> a number


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
    """``module``, which is altered in place, as a function of the parameters of all nodes.

    ``places``: qualified names of the parameters and buffers of which every node has its own.
    """

    def __init__(self, module: nn.Module, places: list[str]) -> None:
        self.module = module
        self._nodes = 0  # while the module runs
        self._losses: list[Tensor] = []  # the losses that it has computed itself, [n] each
        owned: dict[str, list[str]] = {}
        for place in places:
            path, _, name = place.rpartition(".")
            owned.setdefault(path, []).append(name)
        for path, names in owned.items():
            layer = module.get_submodule(path)
            if type(layer) is nn.Linear:
                layer.__class__ = LinearOfNodes
            else:
                _run_by_node(layer, names)
        for part in module.modules():
            # A model of the transformers library computes its loss itself, from labels, by this attribute.
            if isinstance(getattr(type(part), "loss_function", None), property):
                part.loss_function = self._loss_by_node(part.loss_function)

    def values(self, task: Task, of_nodes: Any, own: dict[str, Tensor]) -> Tensor:
        """``task(model, *part)`` for the part of every node in the trees ``of_nodes``, [n, ...], as [n].

        ``own``: what every node has at the places, [n, ...]. A task must call its model once; it is run
        twice: to see what it calls the model with, and again with what the model gives for the node.
        """
        self._nodes = len(next(iter(own.values())))
        args, kwargs = self._asked(task, of_nodes)
        try:
            outputs = functional_call(self.module, own, args, kwargs, tie_weights=False)
            split = pytree.tree_map_only(Tensor, self._split, outputs)
        finally:
            self._losses.clear()
        leaves, form = pytree.tree_flatten(split)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

        def go_on(tensors: list[Tensor], *part: Any) -> Tensor:
            given = iter(tensors)
            mine = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            return task(lambda *args, **kwargs: pytree.tree_unflatten(mine, form), *part)

        values: Tensor = vmap(go_on)(tensors, *of_nodes)
        return values

    def _asked(self, task: Task, of_nodes: Any) -> tuple[Any, Any]:
        """What the task calls its model with, of all nodes end to end."""
        calls: list[Any] = []

        def model(*args: Any, **kwargs: Any) -> Any:
            calls.append((args, kwargs))
            raise _AskedError

        def ask(*part: Any) -> list[Tensor]:
            try:
                task(model, *part)
            except _AskedError:
                leaves, form = pytree.tree_flatten(calls.pop())
                calls.append(([None if isinstance(leaf, Tensor) else leaf for leaf in leaves], form))
                return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            raise RuntimeError("the step does not call the model")

        tensors = iter(vmap(ask)(*of_nodes))
        others, form = calls.pop()
        leaves = [next(tensors).flatten(0, 1) if leaf is None else leaf for leaf in others]
        args, kwargs = pytree.tree_unflatten(leaves, form)
        return args, kwargs

    def _split(self, outputs: Tensor) -> Tensor:
        """[n B, ...] as [n, B, ...]."""
        if any(outputs is losses for losses in self._losses):
            return outputs
        return outputs.unflatten(0, (self._nodes, -1))

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
    """Ends a task at the call of its model."""


def _run_by_node(layer: nn.Module, names: list[str]) -> None:
    """Lets ``layer`` compute [n B, ...] with what every node has of its tensors ``names``, [n, ...]."""
    plain = copy.copy(layer)

    def one(own: dict[str, Tensor], x: Tensor) -> Any:
        return functional_call(plain, own, (x,))

    def forward(x: Tensor) -> Tensor:
        own = {name: getattr(layer, name) for name in names}
        outputs: Tensor = vmap(one)(own, x.unflatten(0, (len(own[names[0]]), -1)))
        return outputs.flatten(0, 1)

    layer.forward = forward
