"""What the nodes minimise together: f(x) = (1/n) sum_i f_i(x), with one f_i per node.

A ``Problem`` answers for any subset of nodes at once, with one row ``[d]`` of parameters per node. Which
minibatch a node sees depends only on (seed, node, round, step), never on which other nodes are asked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor
from torch.func import grad, hessian

from holdfast.core.errors import HoldfastError
from holdfast.core.randomness import Word
from holdfast.core.tree import Tree
from holdfast.core.validation import NonNegative, check

# --- what the nodes minimise together: f(x) = (1/n) sum_i f_i(x), with one f_i per node -----------------


PADDED_TO = 4  # numbers: a GPU loads four at once where an address is a multiple of 16 bytes


class Bounds(NamedTuple):
    """Every Hessian of f_i lies between mu I and ``most`` I + ``curvature`` times node i's Gram matrix."""

    most: float  # of the regulariser's curvature
    curvature: float  # the loss's bound on second derivatives
    gram: Callable[[], Problem]  # whose Hessians are the Gram matrices, in float64
    reached: bool  # whether the Hessians are equal to the upper bound, as for squared errors


class Convexity(NamedTuple):
    """What is known of an objective; by default, that it is convex and has a minimum."""

    obstacle: str | None = None  # what keeps the objective from being convex
    mu: float | None = None  # of strong convexity; None: only Hessians tell
    attained: bool = True  # whether f, if convex, has a minimum; others may approach it at infinity
    bounds: Bounds | None = None


class ModelTester(Protocol):
    """Measures models on samples."""

    def test(self, rows: Tensor, samples: Tree) -> tuple[Tensor, Tensor]:
        """Accuracy and mean loss, each [m], of every model in ``rows`` [m, d] on a tree of ``samples``.

        Rows without statistics, see ``complete``, count as models that all nodes share.
        """

    def complete(
        self, rows: Tensor, nodes: Tensor | None = None, total: Callable[[Tensor], Tensor] = torch.clone
    ) -> Tensor:
        """``rows`` [m, d], followed by what evaluation needs: the running statistics of BatchNorm, if any.

        ``nodes`` [m]: whose models these are, all of them here; None: one model [1, d] that all share.
        ``total`` sums a tensor over all processes. Without statistics, the result is ``rows``.
        """

    def outputs(self, rows: Tensor, samples: Tree) -> Iterator[tuple[Any, Tensor]]:
        """Outputs [m, B, ...] of every model in ``rows`` and the targets [B, ...], some samples at a time."""

    def correct(self, outputs: Any, targets: Any) -> Tensor:
        """1.0 for each sample that is classified correctly, else 0.0: [B]."""


class Problem(Protocol):
    """The nodes' local objectives."""

    nodes: int
    dim: int
    x0: Tensor  # [d]: the model that all nodes start from; its dtype and device are the objective's
    l1: float  # the weight of ||x||_1 in every f_i; its share in gradients is l1 sign(x), with sign(0) = 0
    smooth: bool  # whether every f_i is differentiable apart from that

    @property
    def here(self) -> Tensor:
        """[m]: the nodes that this process can compute; mostly all."""

    @property
    def stochastic(self) -> bool:
        """Whether gradients are of minibatches, with a new one in every step."""

    @property
    def private(self) -> bool:
        """Whether gradients are clipped and noised, so that nothing else of the data may be read."""

    @property
    def stacked(self) -> bool:
        """Whether the gradients of all nodes are computed at once, by the same operations."""

    @property
    def traceable(self) -> bool:
        """Whether a gradient does the same in every call, as far as its parts declare."""

    @property
    def fuses(self) -> bool:
        """Whether rows are so large beside activations that updates are worth compiling with gradients."""

    @property
    def description(self) -> str:
        """How gradients are computed, in words."""

    def get_ready(self) -> None:
        """Allocates all that gradients keep, so that computing one allocates nothing that stays."""

    def minibatch_values_and_grads(
        self, points: Sequence[Tensor], nodes: Tensor, round: Word, step: Word
    ) -> list[tuple[Tensor, Tensor]]:
        """At each of ``points``, on one minibatch per node: the loss, [m], and the gradient of f_i, [m, d].

        i in ``nodes`` [m]. The loss is f_i without its regulariser; the gradient contains the regulariser's.
        """

    def full_grads(self, x: Tensor, nodes: Tensor, round: Word = 0, step: Word = 0) -> Tensor:
        """Gradients [m, d] of f_i at ``x`` [m, d] over all of each node's data.

        ``round`` and ``step`` distinguish calls: the noise of private gradients differs between them.
        """

    def values(self, x: Tensor, nodes: Tensor) -> Tensor:
        """f_i, [m], at ``x`` [m, d] over all of each node's data."""

    def hessians(self, x: Tensor, nodes: Tensor) -> Tensor:
        """Hessians [m, d, d] of f_i at ``x`` [m, d] over all of each node's data, for exact solves."""

    def hessian_products(self, x: Tensor, v: Tensor, nodes: Tensor) -> Tensor:
        """Those Hessians times ``v`` [m, d], without forming them."""

    def samples_per_minibatch(self, nodes: Tensor) -> int:
        """Samples that one call of ``minibatch_values_and_grads`` at one point reads, over all ``nodes``."""

    def samples(self, nodes: Tensor) -> int:
        """Samples that ``nodes`` hold together."""

    def global_value_and_grad(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """f(x) and its gradient [d] at one common point ``x`` [d]."""

    def global_value(self, x: Tensor) -> Tensor:
        """f(x) at one common point ``x`` [d]."""

    @property
    def tester(self) -> ModelTester:
        """How models are measured on samples."""

    @property
    def in_float64(self) -> Problem:
        """The same objective in float64, for reference values."""

    @property
    def convexity(self) -> Convexity:
        """What is known about it."""

    def identity(self) -> tuple[list[object], list[Tensor]] | None:
        """All that f depends on, as words and tensors for a hash; None where that is not known."""


class WithoutSamples:
    """Functions have no samples, so nothing can be measured on any."""

    def test(self, rows: Tensor, samples: Tree) -> tuple[Tensor, Tensor]:
        raise HoldfastError("functions have no samples, so they cannot be tested on any")

    def complete(
        self, rows: Tensor, nodes: Tensor | None = None, total: Callable[[Tensor], Tensor] = torch.clone
    ) -> Tensor:
        return rows

    def outputs(self, rows: Tensor, samples: Tree) -> Iterator[tuple[Any, Tensor]]:
        raise HoldfastError("functions have no samples, so they have no outputs for any")

    def correct(self, outputs: Any, targets: Any) -> Tensor:
        raise HoldfastError("functions have no samples, so none is classified")


class ExactProblem(ABC):
    """What problems with exact gradients have in common: there are no samples, and no minibatches."""

    nodes: int
    dim: int
    x0: Tensor
    convexity = Convexity()
    l1 = 0.0
    smooth = True
    private = False
    stochastic = False
    stacked = False
    traceable = False
    fuses = False
    description = "all nodes stacked"
    tester = WithoutSamples()

    @property
    def here(self) -> Tensor:
        return torch.arange(self.nodes, device=self.x0.device)

    @property
    def in_float64(self) -> Self:
        if self.x0.dtype != torch.float64:
            raise HoldfastError(
                f"the reference optimum needs float64, and the functions work in {self.x0.dtype}"
            )
        return self

    def get_ready(self) -> None:
        return

    @abstractmethod
    def full_grads(self, x: Tensor, nodes: Tensor, round: Word = 0, step: Word = 0) -> Tensor:
        """Gradients [m, d] of f_i at ``x`` [m, d]."""

    @abstractmethod
    def values(self, x: Tensor, nodes: Tensor) -> Tensor:
        """f_i, [m], at ``x`` [m, d]."""

    def minibatch_values_and_grads(
        self, points: Sequence[Tensor], nodes: Tensor, round: Word, step: Word
    ) -> list[tuple[Tensor, Tensor]]:
        return [(self.values(x, nodes), self.full_grads(x, nodes)) for x in points]

    def samples_per_minibatch(self, nodes: Tensor) -> int:
        return len(nodes)

    def samples(self, nodes: Tensor) -> int:
        return len(nodes)

    def identity(self) -> None:
        return None


class FunctionProblem(ExactProblem):
    """One differentiable function of a 1-D tensor per node, with exact gradients, plus l1 ||x||_1."""

    def __init__(self, functions: Sequence[Callable[[Tensor], Tensor]], x0: Tensor, l1: float = 0.0) -> None:
        if not functions:
            raise HoldfastError("functions: expected one differentiable function per node, got none")
        self.l1 = check("l1", NonNegative, l1)
        self.functions = [_plus_l1(function, l1) for function in functions] if l1 else list(functions)
        self.nodes = len(functions)
        self.x0 = x0
        self.dim = x0.numel()
        for index, function in enumerate(functions):
            value = function(x0)
            if not isinstance(value, Tensor) or value.numel() != 1 or value.dim() != 0:
                shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise HoldfastError(f"function {index}: expected a scalar (0-dim) tensor at x0, got {shape}")

    def full_grads(self, x: Tensor, nodes: Tensor, round: Word = 0, step: Word = 0) -> Tensor:
        return self._values_and_grads(x, nodes)[1]

    def minibatch_values_and_grads(
        self, points: Sequence[Tensor], nodes: Tensor, round: Word, step: Word
    ) -> list[tuple[Tensor, Tensor]]:
        return [self._values_and_grads(x, nodes) for x in points]

    def _values_and_grads(self, x: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
        # Rows do not interact, so the gradient of the sum holds every node's own gradient in its row.
        x = x.detach().requires_grad_()
        values = torch.stack([function(row) for function, row in self._of(nodes, x)])
        return values.detach(), torch.autograd.grad(values.sum(), x, materialize_grads=True)[0]

    def values(self, x: Tensor, nodes: Tensor) -> Tensor:
        return torch.stack([function(row).detach() for function, row in self._of(nodes, x)])

    def hessians(self, x: Tensor, nodes: Tensor) -> Tensor:
        return torch.stack([hessian(function)(row) for function, row in self._of(nodes, x)])

    def hessian_products(self, x: Tensor, v: Tensor, nodes: Tensor) -> Tensor:
        return torch.stack([_hessian_product(*at) for at in self._of(nodes, x, v)])

    def _of(self, nodes: Tensor, *rows: Tensor) -> Iterator[Any]:
        """The function of every node with its rows."""
        return zip([self.functions[node] for node in nodes.tolist()], *rows, strict=True)

    def global_value_and_grad(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        value = self._mean(x)
        return value.detach(), torch.autograd.grad(value, x, materialize_grads=True)[0]

    def global_value(self, x: Tensor) -> Tensor:
        return self._mean(x).detach()

    def _mean(self, x: Tensor) -> Tensor:
        return torch.stack([function(x) for function in self.functions]).mean()


def _plus_l1(function: Callable[[Tensor], Tensor], l1: float) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x) + l1 * x.abs().sum()


def _hessian_product(function: Callable[[Tensor], Tensor], x: Tensor, v: Tensor) -> Tensor:
    product: Tensor = grad(lambda at: grad(function)(at) @ v)(x)
    return product


# --- how many cores a gradient step is worth ------------------------------------------------------------
#
# Kernels of small models are done before a second thread has started, and then wait for it: on a machine with
# other work, a step on two cores took up to eight times as long as on one (docs/benchmarks.md).


# Multiply-adds of a step for each thread: with fewer, another one gains nothing on an idle machine.
WORTH_A_THREAD = 2**25


def step_threads(problem: Problem) -> int:
    """The threads for a step of all nodes here: those that torch has, or fewer if it is small.

    Where nodes are computed one by one, they are spread over all cores, and each has one.
    """
    most = torch.get_num_threads()
    if problem.x0.is_cuda or not problem.stacked:
        return most
    multiply_adds = problem.samples_per_minibatch(problem.here) * problem.dim
    return max(1, min(most, multiply_adds // WORTH_A_THREAD))


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Lets torch use ``count`` threads inside the block."""
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
