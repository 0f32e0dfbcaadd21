"""Attention masks that turn out to be causal, found among traced operations.

While a gradient is traced, no numbers are known. A library that would otherwise see that its mask is the
usual lower triangle then builds the mask in full, and attention is computed for all pairs of tokens. A mask
that depends on no input can be computed here. Where it is that triangle, the kernel is told so, and leaves
out half of the pairs.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

MASKS = ("attn_mask", "attn_bias")  # what the attention kernels of torch call it


def tell_causal_masks(traced: fx.GraphModule) -> None:
    """Has attention in ``traced`` use ``is_causal`` in place of a mask that is known to be causal."""
    fixed = _fixed(traced.graph)
    values: dict[fx.Node, Any] = {}
    causal: dict[fx.Node, bool] = {}
    for node in traced.graph.nodes:
        name, mask = _mask(node)
        if mask not in fixed:
            continue
        if mask not in causal:
            causal[mask] = _is_causal(_value(mask, values))
        if causal[mask]:
            _set(node, name, None)
            _set(node, "is_causal", True)
    if any(causal.values()):
        traced.graph.eliminate_dead_code()
        traced.recompile()


def _fixed(graph: fx.Graph) -> set[fx.Node]:
    """What is the same in every run: made of no inputs, no stored tensors and no random numbers."""
    fixed: set[fx.Node] = set()
    for node in graph.nodes:
        op = node.target
        known = all(given in fixed for given in node.all_input_nodes)
        if isinstance(op, OpOverload) and op._schema.is_mutable:
            if any(given in fixed for given in node.all_input_nodes):
                return set()  # overwritten later: not worth following
        elif known and (op is operator.getitem or _is_repeatable(op)):
            fixed.add(node)
    return fixed


def _is_repeatable(op: Any) -> bool:
    return isinstance(op, OpOverload) and torch.Tag.nondeterministic_seeded not in op.tags


def _value(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    if node not in values:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda given: _value(given, values))
        assert callable(node.target)
        values[node] = node.target(*args, **kwargs)
    return values[node]


def _is_causal(mask: Tensor) -> bool:
    """Whether ``mask`` [..., T, T], which allows pairs or is added to their scores, is the lower triangle."""
    allowed = mask if mask.dtype == torch.bool else mask == 0
    forbidden = ~mask if mask.dtype == torch.bool else mask.isneginf()
    triangle = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
    square = mask.shape[-2] == mask.shape[-1]
    return square and bool(((allowed == triangle) & (forbidden == ~triangle)).all())


def _mask(node: fx.Node) -> tuple[str, Any]:
    """The mask of an attention kernel that could do without, and what it is called there."""
    names = _names(node)
    for name in MASKS:
        if name in names and "is_causal" in names:
            place = names.index(name)
            return name, node.args[place] if place < len(node.args) else node.kwargs.get(name)
    return "", None


def _set(node: fx.Node, name: str, value: Any) -> None:
    place = _names(node).index(name)
    if place < len(node.args):
        node.update_arg(place, value)
    else:
        node.update_kwarg(name, value)


def _names(node: fx.Node) -> list[str]:
    op = node.target
    return [argument.name for argument in op._schema.arguments] if isinstance(op, OpOverload) else []
