"""What trees of tensors should look like, and one-line errors for those that do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.validation import quoted

ROWS = 2
IN_ROWS = "a tensor [m, d] with one row per node, a number per node as [m, 1]"


@dataclass(frozen=True)
class Expected:
    """Checks what a function gave for ``ROWS`` nodes and models of ``dim`` numbers, [m, d] in messages.

    ``where`` names the function and ``what`` the thing that it gave.
    """

    dim: int

    def rows(self, where: str, what: str, tree: Any, of_links: int = ROWS) -> None:
        """Raises unless the first dimension of all tensors counts nodes, or all their links."""
        self.tensors(where, what, tree, IN_ROWS, lambda t: t.ndim > 1 and len(t) in (ROWS, of_links))

    def message(self, where: str, message: Any) -> None:
        """Raises unless all tensors are [m, ...] with rows that are vectors."""
        self.tensors(where, "the message", message, IN_ROWS, lambda t: t.ndim == 2 and len(t) == ROWS)

    def tensors(
        self, where: str, what: str, tree: Any, expected: str, fits: Callable[[Tensor], bool]
    ) -> None:
        """Raises unless ``tree`` holds nothing but tensors that fit."""
        for name, part in parts(tree):
            if not isinstance(part, Tensor) or not fits(part):
                remedy = "reshape it" if isinstance(part, Tensor) else "put tensors into a NamedTuple"
                if part is None:
                    remedy = "return a tensor, or leave it out"
                raise HoldfastError(
                    f"{where}: {_named(what, name)} is {self.form(part)}, expected {expected}; {remedy}"
                )

    def alike(self, where: str, what: str, given: Any, like: Any, source: str) -> None:
        """Raises unless ``given`` has the structure, shapes and number types of ``like``."""
        if _structure(given) != _structure(like):
            raise HoldfastError(
                f"{where}: {what} is {self.form(given)}, {source} {self.form(like)}; return the same parts"
            )
        for (name, own), (_, other) in zip(parts(given), parts(like), strict=True):
            if (own.shape, own.dtype) != (other.shape, other.dtype):
                remedy = "keep the shape" if own.shape != other.shape else "keep the number type, with .to(x)"
                was, should = self.form(own), self.form(other)
                raise HoldfastError(f"{where}: {_named(what, name)} is {was}, {source} {should}; {remedy}")

    def pair(self, where: str, given: Any, expected: str) -> tuple[Any, Any]:
        """The two things that were ``given``."""
        if not isinstance(given, tuple) or len(given) != 2:
            raise HoldfastError(f"{where}: it returned {self.form(given)}, expected two things: {expected}")
        return given

    def form(self, value: Any) -> str:
        """``value`` for people: ``a float32 tensor [m, d]``, ``Node(x, c)``."""
        if isinstance(value, Tensor):
            sizes = ["d" if size == self.dim else str(size) for size in value.shape]
            if value.ndim and value.shape[0] == ROWS:
                sizes[0] = "m"
            kind = str(value.dtype).removeprefix("torch.")
            return f"{'an' if kind[0] == 'i' else 'a'} {kind} tensor [{', '.join(sizes)}]"
        if isinstance(value, tuple | dict):
            return f"{type(value).__name__}({', '.join(_names(value))})"
        return quoted(value)


def parts(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All that is in ``tree``, tensors or not, with dotted names."""
    if isinstance(tree, tuple | dict):
        for name, part in zip(_names(tree), tree.values() if isinstance(tree, dict) else tree, strict=True):
            yield from parts(part, f"{prefix}.{name}" if prefix else name)
    else:
        yield prefix, tree


def _names(tree: Any) -> list[str]:
    if isinstance(tree, dict):
        return [str(key) for key in tree]
    return list(getattr(tree, "_fields", map(str, range(len(tree)))))


def _structure(tree: Any) -> Any:
    if isinstance(tree, tuple | dict):
        inner = tree.values() if isinstance(tree, dict) else tree
        return type(tree), _names(tree), [_structure(part) for part in inner]
    return Tensor if isinstance(tree, Tensor) else type(tree)


def _named(what: str, name: str) -> str:
    return f"{what}'s {name!r}" if name else what
