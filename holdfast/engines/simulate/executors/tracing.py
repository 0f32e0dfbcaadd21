"""Functions of tensors, traced into their operations and compiled.

``torch.compile`` reads a function's Python code. Under torch's function transforms that is slow: the first
call of a two-layer transformer took 72 to 116 s on an H200. Here the function is run once on tensors without
numbers, and the operations that it comes down to are noted and handed to torch's compiler. Whatever the code
does in Python, such as counting dropouts, has been done by then.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

Program = Callable[..., Sequence[Tensor]]


def compiled(program: Program) -> Program:
    """``program`` as compiled operations, once for each form of its inputs, all of them tensors.

    What it reads beside its inputs must be the same in every call.
    """
    made: dict[Hashable, Program] = {}

    def run(*inputs: Tensor) -> Sequence[Tensor]:
        form = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in inputs)
        if form not in made:
            made[form] = _compile(program, inputs)
        return made[form](*inputs)

    return run


def _compile(program: Program, inputs: Sequence[Tensor]) -> Program:
    graph = traced(program, inputs)
    constants = _as_inputs(graph)
    ready = _compiled(graph, [*inputs, *constants])

    def run(*inputs: Tensor) -> Sequence[Tensor]:
        with torch.no_grad():
            results: Sequence[Tensor] = ready(*inputs, *constants)
        return results

    return run


@torch.no_grad()
def _compiled(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
    """``graph`` by the compiler behind ``torch.compile``.

    That would read the program anew, and once more where two of its inputs are the same tensor.
    """
    from torch._inductor import compile  # seconds to import
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # slow to import

    # With a ``ShapeEnv``, the compiler looks on the disk for what it has compiled before.
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    return compile(graph, [mode.from_tensor(tensor, static_shapes=True) for tensor in inputs])


@torch.no_grad()
def traced(program: Program, inputs: Sequence[Tensor]) -> fx.GraphModule:
    """The operations of ``program`` for inputs of this form."""
    graph = make_fx(program, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    for node in graph.graph.nodes:
        node.type = None  # the program's own annotations, with which what is compiled is not kept on disk
    graph.recompile()
    return graph


def _as_inputs(traced: fx.GraphModule) -> list[Tensor]:
    """Makes inputs of the tensors that ``traced`` holds, such as samples, so that no program owns any."""
    graph = traced.graph
    constants: list[Tensor] = []
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        tensor = getattr(traced, str(node.target))
        with graph.inserting_after(last):
            last = graph.placeholder(f"constant_{len(constants)}")
        last.meta = dict(node.meta)
        node.replace_all_uses_with(last)
        graph.erase_node(node)
        constants.append(tensor)
    traced.recompile()
    return constants
