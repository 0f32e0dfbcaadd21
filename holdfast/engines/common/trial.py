"""What a trial is made of: an objective that is zero, links that record what is sent, and checks of the rest.

A mistake is named in one line: the class and the function, the result, what was expected, what to do.
Without this it would fail deep in an engine, or pass silently. A trial has sizes of its own, so that messages
can say [m, d] for m nodes and models of d numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from holdfast.contract import Algorithm, LocalOptimizer, Method, ServerAlgorithm
from holdfast.contract.channel import Use
from holdfast.core.errors import HoldfastError
from holdfast.core.randomness import Word
from holdfast.core.tree import Tree
from holdfast.core.validation import quoted
from holdfast.engines.common.counters import Work
from holdfast.engines.common.oracle import BatchOracle
from holdfast.problem.problem import ExactProblem
from holdfast.topology import Network

# --- the objective that is zero, and links over which a node's own messages come back ---------------------


class ZeroProblem(ExactProblem):
    """f_i = 0."""

    def __init__(self, nodes: int, dim: int = 1) -> None:
        self.nodes, self.dim = nodes, dim
        self.x0 = torch.zeros(dim, dtype=torch.float64)  # any local solver's tolerance is within reach

    def full_grads(self, x: Tensor, nodes: Tensor, round: Word = 0, step: Word = 0) -> Tensor:
        return torch.zeros_like(x)

    def samples(self, nodes: Tensor) -> int:
        return 0  # so that ``Work.sample_gradients`` counts minibatches

    def values(self, x: Tensor, nodes: Tensor) -> Tensor:
        return x.new_zeros(len(nodes))

    def hessians(self, x: Tensor, nodes: Tensor) -> Tensor:
        # Invertible, also where no quadratic is added.
        return torch.eye(self.dim, dtype=x.dtype).expand(len(nodes), -1, -1)

    def hessian_products(self, x: Tensor, v: Tensor, nodes: Tensor) -> Tensor:
        return v

    def global_value_and_grad(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.new_zeros(()), torch.zeros_like(x)

    def global_value(self, x: Tensor) -> Tensor:
        return x.new_zeros(())


M = TypeVar("M")
Flip = Callable[[float], bool]  # how coins fall


@dataclass
class Seen:
    """What a method did in a round, or before the first one."""

    sent: list[Tree] = field(default_factory=list)  # exchange by exchange, rows [m, ...]
    over_links: list[Tensor] = field(default_factory=list)  # swap by swap, [m links, d]
    down: list[Tree] = field(default_factory=list)  # by a server that leads
    uses: set[Use] = field(default_factory=set)
    differs_by: set[str] = field(default_factory=set)  # of "coin" and "round": what rounds differ in


@dataclass
class RecordingPeers:
    """The links of a node, over which its own messages come back; notes what was ``seen``.

    Messages have so many ``rows``, as if there were several nodes like it.
    """

    links: int
    like: Tensor
    flip: Flip
    rows: int = 1
    seen: Seen = field(default_factory=Seen)

    @property
    def degree(self) -> Tensor:
        return torch.full((self.rows, 1), self.links).to(self.like)

    @property
    def edges(self) -> RecordingEdges:
        self.seen.uses.add("links")
        return RecordingEdges(self.rows, self.links, self.like, self.seen)

    def exchange(self, message: M, sporadic: bool = False) -> RecordingInbox[M]:
        self.seen.sent.append(message)
        return RecordingInbox(message, self.seen)

    def coin(self, probability: float) -> bool:
        self.seen.differs_by.add("coin")
        return self.flip(probability)


@dataclass(frozen=True)
class RecordingInbox(Generic[M]):
    """What a node itself has sent."""

    mixed: M
    seen: Seen

    @property
    def neighbour_sum(self) -> M:
        self.seen.uses.add("neighbour sums")
        return self.mixed


@dataclass(frozen=True)
class RecordingEdges:
    """The links of a node one by one; where there are several ``rows``, those of one after the other."""

    rows: int
    links: int
    like: Tensor
    seen: Seen

    @property
    def sign(self) -> Tensor:
        return torch.ones(self.rows * self.links, 1).to(self.like)

    degree = sign

    def spread(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.links, 0)

    def total(self, z: Tensor) -> Tensor:
        return z.view(self.rows, self.links, -1).sum(1)

    def swap(self, z: Tensor) -> Tensor:
        self.seen.over_links.append(z)
        return z


class RecordingOracle:
    """``oracle``, which notes whether it was asked for something that makes rounds differ."""

    def __init__(self, oracle: BatchOracle, seen: Seen) -> None:
        self.oracle, self.seen = oracle, seen

    def __getattr__(self, name: str) -> Any:
        self.seen.differs_by |= {name} & {"coin", "round"}
        return getattr(self.oracle, name)


def links_of(network: Network, node: int) -> int:
    """How many links ``node`` has; on a server, as many as if all nodes were its neighbours."""
    return network.nodes - 1 if network.is_server else len(network.neighbours(node))


def state_like(method: Method, network: Network, node: int, like: Tensor, flip: Flip) -> Tree:
    """A tree like the state of ``node``, for a model ``like`` [d]; nothing is computed if that is on "meta".

    Of a method led by a server, a client's. ``flip``: how coins fall before the first round.
    """
    if isinstance(method, ServerAlgorithm):
        return method.at(0).init(like[None])
    assert isinstance(method, Algorithm)
    problem = ZeroProblem(network.nodes, like.numel())
    oracle = BatchOracle(problem, torch.tensor([node]), 0, 0, Work())
    now = network.at(0)
    return method.at(0).init(like[None], oracle, RecordingPeers(links_of(now, node), like, flip))


# --- what trees of tensors should look like, and one-line errors for those that do not ------------------


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

    def optional(self, method: Method, nodes: Tree, rows: Tensor) -> None:
        """Raises unless what a method may say of the state of its nodes is None, or a row for each."""
        for function, what in ((method.dual, "the dual"), (method.personal, "the personal model")):
            if (given := function(nodes)) is not None:
                where = f"{type(method).__name__}.{function.__name__}"
                self.alike(where, what, given, rows, "expected None or")

    def pair(self, where: str, given: Any, expected: str) -> tuple[Any, Any]:
        """The two things that were ``given``."""
        if not isinstance(given, tuple) or len(given) != 2:
            raise HoldfastError(f"{where}: it returned {self.form(given)}, expected two things: {expected}")
        return given

    def form(self, value: Any) -> str:
        """``value``, human-readable: ``a float32 tensor [m, d]``, ``Node(x, c)``."""
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


OF_SERVER = "a tensor [d], a single number as [1]"


def check_optimizers(expected: Expected, holder: object) -> None:
    """Those among the parameters of ``holder``, and those among theirs."""
    for part in vars(holder).values():
        if isinstance(part, LocalOptimizer):
            check_optimizers(expected, part)
            _try_optimizer(expected, part)


def _try_optimizer(expected: Expected, optimizer: LocalOptimizer) -> None:
    name, x = type(optimizer).__name__, torch.zeros(ROWS, expected.dim, dtype=torch.float64)
    memory = optimizer.init(x)
    expected.rows(f"{name}.init", "the memory", memory)
    given = optimizer.update(torch.zeros_like(x), memory, x)
    direction, later = expected.pair(
        f"{name}.update", given, "the direction of the step and the memory after it"
    )
    expected.alike(f"{name}.update", "the direction", direction, x, "expected, like x,")
    expected.alike(f"{name}.update", "the memory", later, memory, "init gave")
