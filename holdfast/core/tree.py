"""States, messages and batches are tensors or (nested) tuples and dicts of tensors; what is done to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

Tree: TypeAlias = Any
"""A tensor, or a tuple, named tuple or dictionary of trees; type checkers cannot know which of them."""

T = TypeVar("T")  # a tree of one kind


def tree_map(function: Callable[..., Tree], tree: T, *others: Tree) -> T:
    """``function`` applied to every tensor of ``tree`` (and to what ``others`` have in its place).

    It may return a tensor or a tree, such as what travels of a tensor; that takes the tensor's place.
    """
    whole: Tree = tree
    if isinstance(whole, Tensor):
        whole = function(whole, *others)
    elif isinstance(whole, dict):
        whole = {key: tree_map(function, *(t[key] for t in (whole, *others))) for key in whole}
    else:
        mapped = [tree_map(function, *parts) for parts in zip(whole, *others, strict=True)]
        whole = type(tree)(*mapped) if hasattr(tree, "_fields") else tuple(mapped)
    alike: T = whole
    return alike


def is_tree(value: Any) -> bool:
    """Whether ``value`` is made of tensors, tuples and dicts alone."""
    if isinstance(value, tuple | dict):
        return all(map(is_tree, value.values() if isinstance(value, dict) else value))
    return isinstance(value, Tensor)


def leaves(tree: Tree) -> Iterator[Tensor]:
    """Every tensor of ``tree``, in order."""
    if isinstance(tree, Tensor):
        yield tree
        return
    for part in tree.values() if isinstance(tree, dict) else tree:
        yield from leaves(part)


def has_leaves(tree: Tree) -> bool:
    """Whether there is any tensor in ``tree``."""
    return next(leaves(tree), None) is not None


def named_leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of ``tree`` with a dotted name, such as ``server.c``."""
    if isinstance(tree, Tensor):
        yield prefix or "value", tree
        return
    if isinstance(tree, dict):
        named = list(tree.items())
    else:
        named = list(zip(getattr(tree, "_fields", map(str, range(len(tree)))), tree, strict=True))
    for name, part in named:
        yield from named_leaves(part, f"{prefix}.{name}" if prefix else name)


def from_named(template: T, named: dict[str, Tensor]) -> T:
    """A tree like ``template`` whose tensors are taken from ``named``, the inverse of ``named_leaves``."""
    tensors = iter([named[name].to(like.device, like.dtype) for name, like in named_leaves(template)])
    return tree_map(lambda like: next(tensors), template)


def row_size(tree: Tree) -> int:
    """Numbers in one node's row of ``tree``: the sum of the last dimensions of its tensors."""
    return sum(tensor.shape[-1] for tensor in leaves(tree))


def row_bits(tree: Tree) -> int:
    """Bits that one row of ``tree`` takes; a tensor with one dimension is a row itself."""
    shapes = [(t.element_size(), t.shape[1:] if t.ndim > 1 else t.shape) for t in leaves(tree)]
    return sum(8 * size * shape.numel() for size, shape in shapes)


def put_rows(whole: T, rows: Tensor, part: T) -> T:
    """``whole`` with its ``rows`` replaced by those of ``part``, in place: client state is kept only once."""
    return tree_map(lambda target, source: target.index_copy_(0, rows, source), whole, part)
