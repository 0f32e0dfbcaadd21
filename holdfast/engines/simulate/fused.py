"""A round as a few compiled programs: every gradient together with the arithmetic that follows it.

Step by step, an update such as ``x - lr * (gradient - dual)`` passes over all rows three times. Here a round
is traced once into the list of its operations, cut before each gradient and each exchange, and each piece is
compiled, so that the update is fused with the end of the gradient. Compiling a gradient takes most of the
time until the first round, half a minute for a transformer. So the steps of a local phase share one program:
what the last step does beyond the others is a piece of its own.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.core.randomness import Word
from holdfast.core.tree import leaves, tree_map
from holdfast.engines.common.links import PRODUCTS
from holdfast.engines.common.oracle import MinibatchGradient
from holdfast.engines.simulate.replay import NotReplayableError
from holdfast.problem.problem import Problem

# --- functions of tensors, traced into their operations and compiled ------------------------------------
#
# ``torch.compile`` reads a function's Python code. Under torch's function transforms that is slow: the first
# call of a two-layer transformer took 72 to 116 s on an H200. Here the function is run once on tensors
# without numbers, and the operations that it comes down to are noted and handed to torch's compiler. Whatever
# the code does in Python, such as counting dropouts, has been done by then.


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

    That would read the program again, and once more where two of its inputs are the same tensor.
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


# --- A round as a few compiled programs -----------------------------------------------------------------


Form = tuple[tuple[str, str], ...]  # operations of a run, with numbers in place of names
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
_WRITE = torch.ops.aten.copy_.default


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
        runs = list(_alike(_cut([node for node in nodes if node.op == "call_function"], problem.dim)))
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
        forms = [_form(run) for run in runs]
        needed: dict[Form, set[int]] = {form: set() for form in forms}  # results, of any run of this form
        for index, run in enumerate(runs):
            used = (i for i, node in enumerate(run) if any(place.get(user) != index for user in node.users))
            needed[forms[index]].update(used)
        programs = _PROGRAMS.setdefault(problem, {})
        pieces = []
        for run, form in zip(runs, forms, strict=True):
            inputs, outputs = _inputs(run), [run[i] for i in sorted(needed[form])]
            key = form, tuple(sorted(needed[form]))
            if key not in programs:
                program = _as_function(run, inputs, outputs, problem)
                programs[key] = compiler(program) if _is_worth_compiling(run, problem.dim) else program
            names = [read.node.name for read in inputs], [node.name for node in outputs]
            pieces.append(Piece(programs[key], *names, []))
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


class _WithoutValues(TorchDispatchMode):
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


class Read(NamedTuple):
    """What a run reads of others.

    What a gradient reads is an input of its own, even if the rest reads it, too. Then the first local step,
    which may take its gradient elsewhere than where it starts, is like the others.
    """

    node: fx.Node
    by_gradient: bool


def _reads(run: list[fx.Node]) -> dict[fx.Node, dict[fx.Node, Read]]:
    """For every operation of ``run``, what it reads of others."""
    inside = set(run)
    written = {node.args[0] for node in run if node.target is _WRITE}  # one input, or its copies would differ
    return {
        node: {
            n: Read(n, node.target is _GRADIENT and n not in written)
            for n in node.all_input_nodes
            if n not in inside
        }
        for node in run
    }


def _inputs(run: list[fx.Node]) -> list[Read]:
    """What ``run`` reads of others, in the order in which it does."""
    return list(dict.fromkeys(read for reads in _reads(run).values() for read in reads.values()))


def _is_worth_compiling(run: list[fx.Node], dim: int) -> bool:
    """Whether ``run`` has a gradient or an exchange, or passes over the rows more than once."""
    passes = sum(any(_has_rows(part, dim) for part in (node, *node.all_input_nodes)) for node in run)
    return passes > 1 or any(node.target is _GRADIENT or _moves_rows(node, dim) for node in run)


def _has_rows(node: fx.Node, dim: int) -> bool:
    """Whether the result of ``node`` is rows of ``dim`` numbers or a few more."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.ndim > 1 and value.shape[-1] >= dim


def _moves_rows(node: fx.Node, dim: int) -> bool:
    """Whether ``node`` gathers or mixes rows of ``dim`` numbers or a few more, as an exchange does."""
    return node.target in PRODUCTS or (node.target is _GATHER and node.meta["val"].shape[-1:] >= (dim,))


def _cut(nodes: list[fx.Node], dim: int) -> Iterator[list[fx.Node]]:
    """The operations in runs, a new one before each gradient and before the exchange that follows it.

    Compiled with the last step, an exchange would compute that step again for every neighbour.
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


def _alike(runs: Iterable[list[fx.Node]]) -> Iterator[list[fx.Node]]:
    """``runs`` such that one that begins like an earlier one with a gradient is cut where that one ends."""
    known: list[Form] = []
    for run in runs:
        form = _form(run)
        lengths = [len(other) for other in known if other == form[: len(other)]]
        cut = max(lengths, default=len(run))
        if not lengths and any(node.target is _GRADIENT for node in run):
            known.append(form)
        yield run[:cut]
        if run[cut:]:
            yield run[cut:]


def _form(run: list[fx.Node]) -> Form:
    """The operations of ``run``; equal for runs that differ only in names."""
    reads = _reads(run)
    number = {read: f"given {i}" for i, read in enumerate(_inputs(run))}
    inside = {node: f"result {i}" for i, node in enumerate(run)}

    def told(node: fx.Node) -> tuple[str, str]:
        args = fx.map_arg((node.args, node.kwargs), lambda n: inside.get(n) or number[reads[node][n]])
        return str(node.target), str(args)

    return tuple(map(told, run))


def _as_function(run: list[fx.Node], inputs: list[Read], outputs: list[fx.Node], problem: Problem) -> Program:
    # What is compiled is never forgotten by torch; held weakly, the problem and its data are let go.
    owner = weakref.ref(problem)

    def gradient(x: Tensor, nodes: Tensor, round: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        alive = owner()
        assert alive is not None
        return alive.minibatch_values_and_grads([x], nodes, round, step)[0]

    graph = fx.Graph()
    given = {read: graph.placeholder(f"given_{index}") for index, read in enumerate(inputs)}
    copies: dict[fx.Node, fx.Node] = {}
    for node, reads in _reads(run).items():
        known = copies | {n: given[read] for n, read in reads.items()}
        copies[node] = graph.node_copy(node, known.__getitem__)
        if node.target is _GRADIENT:
            copies[node].target = gradient
    graph.output([copies[node] for node in outputs])
    return fx.GraphModule({}, graph)
