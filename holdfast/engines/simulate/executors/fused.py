"""A round as a few compiled programs: every gradient together with the arithmetic that follows it.

Step by step, an update such as ``x - lr * (gradient - dual)`` passes over all rows three times. Here a round
is traced once into the list of its operations, cut before each gradient and each exchange, and each piece is
compiled, so that the update is fused with the end of the gradient. The pieces of a local phase are alike, so
two or three are compiled, however many steps there are.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.core.randomness import Word
from holdfast.core.tree import leaves, tree_map
from holdfast.engines.common.oracle import MinibatchGradient
from holdfast.engines.common.products import PRODUCTS
from holdfast.engines.simulate.executors.inputs import NotReplayableError
from holdfast.engines.simulate.executors.tracing import Program, compiled
from holdfast.problem.problem import Problem

Advance = Callable[[Any, MinibatchGradient], Any]  # from a state to the state after the round

# What was compiled for rounds on a problem: other step sizes and seeds need nothing new.
_PROGRAMS: weakref.WeakKeyDictionary[Problem, dict[Hashable, Program]] = weakref.WeakKeyDictionary()


@torch.library.custom_op("holdfast::minibatch_gradient", mutates_args=())
def _gradient(x: Tensor, nodes: Tensor, round: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Stands for losses and gradients while a round is traced; what it returns is never used."""
    return x.new_empty(len(x)), torch.empty_like(x)


@_gradient.register_fake
def _(x: Tensor, nodes: Tensor, round: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(len(x)), torch.empty_like(x)


_GRADIENT = torch.ops.holdfast.minibatch_gradient.default
_GATHER = torch.ops.aten.index.Tensor


class Piece(NamedTuple):
    """Operations that run as one program."""

    program: Program
    inputs: list[str]
    outputs: list[str]
    done_with: list[str]  # values that no later piece needs


class FusedRound:
    """``advance``, a function from state to state, traced on ``state`` and compiled."""

    def __init__(
        self,
        advance: Advance,
        state: Any,
        problem: Problem,
        compiler: Callable[[Program], Program] = compiled,
    ) -> None:
        self.template = tree_map(lambda tensor: tensor.new_empty(0), state)  # only its form is kept
        traced = _trace(advance, state)
        nodes = list(traced.graph.nodes)
        self.arguments = [node.name for node in nodes if node.op == "placeholder"]
        self.constants = {n.name: getattr(traced, str(n.target)) for n in nodes if n.op == "get_attr"}
        runs = list(_cut([node for node in nodes if node.op == "call_function"], problem.dim))
        self.results = [node.name for node in nodes[-1].args[0]]
        self.pieces = self._pieces(runs, problem, compiler)

    def __call__(self, state: Any) -> Any:
        values = dict(zip(self.arguments, leaves(state), strict=True)) | self.constants
        for piece in self.pieces:
            results = piece.program(*[values[name] for name in piece.inputs])
            values.update(zip(piece.outputs, results, strict=True))
            for name in piece.done_with:
                del values[name]
        after = iter([values[name] for name in self.results])
        return tree_map(lambda _: next(after), self.template)

    def _pieces(
        self, runs: list[list[fx.Node]], problem: Problem, compiler: Callable[[Program], Program]
    ) -> list[Piece]:
        place = {node: index for index, run in enumerate(runs) for node in run}
        programs = _PROGRAMS.setdefault(problem, {})
        pieces = []
        for index, run in enumerate(runs):
            inputs = _inputs(run)
            outputs = [node for node in run if any(place.get(user) != index for user in node.users)]
            key = _structural_hash(run, inputs, outputs)
            if key not in programs:
                # The others are a product or a few operations: not worth the time to compile them.
                worth_it = any(node.target is _GRADIENT or _moves_rows(node, problem.dim) for node in run)
                program = _as_function(run, inputs, outputs, problem)
                programs[key] = compiler(program) if worth_it else program
            pieces.append(Piece(programs[key], [n.name for n in inputs], [n.name for n in outputs], []))
        self._release(pieces)
        return pieces

    def _release(self, pieces: list[Piece]) -> None:
        """Notes after which piece each value may go: rows are large."""
        last: dict[str, Piece] = {}
        for piece in pieces:
            last |= dict.fromkeys([*piece.inputs, *piece.outputs], piece)
        for name, piece in last.items():
            if name not in self.results and name not in self.constants:
                piece.done_with.append(name)


class _WithoutValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses to read a number on the host: what was decided by it would be decided for all rounds."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a data-dependent decision")
        return func(*args, **(kwargs or {}))


def _trace(advance: Advance, state: Any) -> fx.GraphModule:
    """The operations of ``advance``, with a mark for every gradient.

    Tracing takes no memory, as its tensors hold no numbers. What is made once and kept must be there already.
    """

    def mark(x: Tensor, nodes: Tensor, round: Word, step: Word) -> tuple[Tensor, Tensor]:
        # As tensors from outside, the numbers are inputs of a piece; so the pieces of all steps are alike.
        with disable_proxy_modes_tracing(), unset_fake_temporarily():  # these do hold numbers
            words = [torch.as_tensor(word, device=x.device) for word in (round, step)]
        marked: tuple[Tensor, Tensor] = _gradient(x, nodes, *words)
        return marked

    def flat(*tensors: Tensor) -> list[Tensor]:
        given = iter(tensors)
        with _WithoutValues():  # type: ignore[no-untyped-call]
            return list(leaves(advance(tree_map(lambda _: next(given), state), mark)))

    try:
        return make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)(*leaves(state))
    except AssertionError as error:  # torch's tracer asserts what it cannot follow
        raise NotReplayableError(f"the tracer refuses: {error}") from error


def _inputs(run: list[fx.Node]) -> list[fx.Node]:
    """What ``run`` reads of others, in the order in which it does."""
    inside = set(run)
    return list(dict.fromkeys(n for node in run for n in node.all_input_nodes if n not in inside))


def _moves_rows(node: fx.Node, dim: int) -> bool:
    """Whether ``node`` gathers or mixes rows of ``dim`` numbers or a few more, as an exchange does."""
    return node.target in PRODUCTS or (node.target is _GATHER and node.meta["val"].shape[-1:] >= (dim,))


def _cut(nodes: list[fx.Node], dim: int) -> Iterator[list[fx.Node]]:
    """The operations in runs, a new one before each gradient and before the exchange that follows it.

    Compiled with the last step, an exchange would compute that step anew for every neighbour.
    """
    run: list[fx.Node] = []
    for node in nodes:
        steps = any(other.target is _GRADIENT for other in run)
        before_a_step = node.target is _GRADIENT and not all(map(_of_gradient, run))
        if before_a_step or (steps and _moves_rows(node, dim)):
            yield run
            run = []
        run.append(node)
    if run:
        yield run


def _of_gradient(node: fx.Node) -> bool:
    """Whether ``node`` is a gradient, or one of the two results of one."""
    return node.target is _GRADIENT or (node.target is operator.getitem and _of_gradient(node.args[0]))  # type: ignore[arg-type]


def _structural_hash(run: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node]) -> Hashable:
    """Equal for runs of operations that differ only in names."""
    number = {node: index for index, node in enumerate([*inputs, *run])}
    steps = tuple(
        (str(node.target), str(fx.map_arg((node.args, node.kwargs), lambda given: f"%{number[given]}")))
        for node in run
    )
    return steps, tuple(number[node] for node in outputs)


def _as_function(
    run: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node], problem: Problem
) -> Program:
    # What is compiled is never forgotten by torch; held weakly, the problem and its data are let go.
    owner = weakref.ref(problem)

    def gradient(x: Tensor, nodes: Tensor, round: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        alive = owner()
        assert alive is not None
        return alive.minibatch_values_and_grads([x], nodes, round, step)[0]

    graph = fx.Graph()
    copies = {node: graph.placeholder(f"given_{index}") for index, node in enumerate(inputs)}
    for node in run:
        copies[node] = graph.node_copy(node, lambda given: copies[given])
        if node.target is _GRADIENT:
            copies[node].target = gradient
    graph.output([copies[node] for node in outputs])
    return fx.GraphModule({}, graph)
