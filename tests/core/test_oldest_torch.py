"""What torch 2.6, the oldest that is supported, could not import."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import holdfast

SOURCE = Path(holdfast.__file__).parent


def operations() -> Iterator[tuple[str, ast.FunctionDef, set[str | None]]]:
    """Every operation that torch is told of, and the arguments with which it is."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for maker in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                if isinstance(maker, ast.Call) and ast.unparse(maker.func).endswith("library.custom_op"):
                    yield path.name, node, {keyword.arg for keyword in maker.keywords}


def test_operations_on_lists_have_a_schema() -> None:
    """torch 2.6 knows ``Sequence[int]``, but not ``list[int]``."""
    found = list(operations())
    assert len(found) >= 8
    for where, function, told in found:
        types = [*(argument.annotation for argument in function.args.args), function.returns]
        lists = [kind for kind in types if kind is not None and "list[" in ast.unparse(kind)]
        assert not lists or "schema" in told, f"{where}: {function.name} needs a schema"
