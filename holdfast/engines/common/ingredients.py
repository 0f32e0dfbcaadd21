"""What one node's messages are made of: how many gradients of its data have gone into each of them.

Found as in a dry run, on an objective whose gradients are zero. Here they are also told apart: torch notes
what each message was computed from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any, TypeVar

import torch
from torch import Tensor

from holdfast.contract import Algorithm, LocalSteps, Method, ServerAlgorithm, Steps
from holdfast.contract.solver import Solver
from holdfast.core.randomness import Word
from holdfast.core.tree import leaves, tree_map
from holdfast.engines.common.counters import Work
from holdfast.engines.common.oracle import EXACT, BatchOracle
from holdfast.engines.common.survey import EchoEdges, EchoInbox, EchoPeers
from holdfast.engines.common.zero import ZeroProblem
from holdfast.topology import Network

M = TypeVar("M")

ROUNDS = 6  # that are looked at, after the start
MANY = 10  # gradients; more are not counted
COINS = (True, False, False, True)  # over and over: either side follows on either side


def fewest_gradients(method: Method, network: Network, steps: int | None) -> int:
    """Of how many gradients the messages of a node are made at least; ``MANY`` stands for more, too.

    ``steps``: the local steps that it takes in a round; None: the method takes none. Counted are gradients
    that no earlier message contains, as receivers may know those. Where chance decides how many steps a round
    has, it may be a single one.
    """
    if steps is not None:
        changed: dict[str, Any] = {"local_steps": steps}
        method = replace(method, **changed)
    method = repeating_at_most(method, MANY)
    with torch.enable_grad():
        seen = _Seen(ToldApart(network.nodes, method.least_dim))
        if isinstance(method, ServerAlgorithm):
            _client_rounds(method, seen)
        else:
            assert isinstance(method, Algorithm)
            _rounds(method, network, seen)
    return min(seen.fewest, MANY)


def repeating_at_most(part: M, most: int) -> M:
    """The method, or a part of it such as a solver, with at most ``most`` steps of every kind in a round."""
    changed: dict[str, Any] = {}
    for key, value in vars(part).items():
        if key.endswith("steps") and isinstance(value, int):
            changed[key] = min(value, most)
        elif key.endswith("steps") and isinstance(value, tuple):
            changed[key] = tuple(min(steps, most) for steps in value)
        elif isinstance(value, Solver):
            changed[key] = repeating_at_most(value, most)
    return replace(part, **changed) if changed else part  # type: ignore[type-var]


class ToldApart(ZeroProblem):
    """f_i = 0, and every gradient is a tensor of its own that can be found in what is computed from it."""

    def __init__(self, nodes: int, dim: int) -> None:
        super().__init__(nodes, dim)
        self.given: list[Tensor] = []

    def full_grads(self, x: Tensor, nodes: Tensor, round: Word = 0, step: Word = 0) -> Tensor:
        self.given.append(torch.zeros_like(x, requires_grad=True))
        return self.given[-1].clone()  # which may be changed in place

    def sources(self, tensor: Tensor) -> set[int]:
        """The gradients, by their number, that ``tensor`` was computed from."""
        number = {id(gradient): i for i, gradient in enumerate(self.given)}
        found, known, ahead = set(), set(), [tensor.grad_fn]
        while ahead:
            step = ahead.pop()
            if step is None or step in known:
                continue
            known.add(step)
            if (gradient := number.get(id(getattr(step, "variable", None)))) is not None:
                found.add(gradient)
            ahead += [before for before, _ in step.next_functions]
        return found


@dataclass
class _Seen:
    """What receivers have seen."""

    problem: ToldApart
    told: set[int] = field(default_factory=set)
    least: int | None = None  # None: there was no message with a gradient in it

    @property
    def fewest(self) -> int:
        """Gradients in a message. What was not sent yet is in the next one."""
        return len(self.problem.given) if self.least is None else self.least

    def note(self, message: Any) -> None:
        new = [self.problem.sources(tensor) - self.told for tensor in leaves(message)]
        counts = [len(some) for some in new if some]
        self.least = min([*counts, *([] if self.least is None else [self.least])], default=None)
        self.told.update(*new)


def _rounds(method: Algorithm, network: Network, seen: _Seen) -> None:
    coins, x0 = cycle(COINS), seen.problem.x0
    now = method.at(0)
    state = now.init(x0[None].clone(), _oracle(seen, 0, coins), _peers(network, 0, coins, seen))
    for r in range(ROUNDS):
        oracle, peers = _oracle(seen, r, coins), _peers(network, r, coins, seen)
        state = method.at(r).round(state, oracle, peers)


def _client_rounds(method: ServerAlgorithm[Any], seen: _Seen) -> None:
    coins, x0 = cycle(COINS), seen.problem.x0
    state, server = method.at(0).init(x0[None].clone()), method.at(0).init_server(x0.clone())
    for r in range(ROUNDS):
        now, oracle = method.at(r), _oracle(seen, r, coins)
        state, message = now.client(state, now.broadcast(server), oracle)
        seen.note(message)
        server = now.server(server, tree_map(lambda rows: rows.mean(0), message), 1.0)
        state = now.settle(state, message, now.answer(server) if now.answers else (), oracle)


def _oracle(seen: _Seen, round: int, coins: Iterator[bool]) -> ProbedOracle:
    return ProbedOracle(BatchOracle(seen.problem, torch.tensor([0]), 0, round, Work()), coins)


def _peers(network: Network, round: int, coins: Iterator[bool], seen: _Seen) -> ProbedPeers:
    echo = EchoPeers(network.at(round), 0, seen.problem.x0, lambda probability: next(coins))
    return ProbedPeers(echo, seen)


@dataclass(frozen=True)
class ProbedOracle:
    """``oracle``, whose coins fall as told, which draws nothing else and can always compute."""

    oracle: BatchOracle
    coins: Iterator[bool]

    @property
    def round(self) -> int:
        return self.oracle.round

    def grad(self, x: Tensor, where: Tensor | None = None) -> Tensor:
        return self.oracle.grad(x, where)

    def grads(self, *points: Tensor) -> tuple[Tensor, ...]:
        return self.oracle.grads(*points)

    def full_grad(self, x: Tensor, where: Tensor | None = None) -> Tensor:
        return self.oracle.full_grad(x, where)

    def argmin(
        self,
        linear: Tensor,
        centre: Tensor,
        weight: float | Tensor,
        start: Tensor,
        solver: Solver = EXACT,
        gradient_norm: float | None = None,
    ) -> Tensor:
        if solver.adaptive or gradient_norm is not None:  # nobody can promise more than a single step
            return start - self.oracle.full_grad(start)
        return self.oracle.argmin(linear, centre, weight, start, solver)

    def coin(self, probability: float) -> bool:
        return next(self.coins)

    def parts(self, x: Tensor, copies: int) -> Tensor:
        return torch.ones_like(x)

    def steps(self, given: LocalSteps) -> Steps:
        return self.oracle.steps(given)

    @property
    def able(self) -> Tensor:
        return torch.ones(1, 1, dtype=torch.bool)

    @property
    def chance(self) -> Tensor:
        return self.oracle.chance


@dataclass(frozen=True)
class ProbedPeers:
    """``echo``, of which every message is noted."""

    echo: EchoPeers
    seen: _Seen

    @property
    def degree(self) -> Tensor:
        return self.echo.degree

    @property
    def edges(self) -> ProbedEdges:
        return ProbedEdges(self.echo.edges, self.seen)

    def exchange(self, message: M, sporadic: bool = False) -> EchoInbox[M]:
        self.seen.note(message)
        return self.echo.exchange(message, sporadic)

    def coin(self, probability: float) -> bool:
        return self.echo.coin(probability)


@dataclass(frozen=True)
class ProbedEdges:
    """``echo``, of which every message is noted."""

    echo: EchoEdges
    seen: _Seen

    @property
    def sign(self) -> Tensor:
        return self.echo.sign

    @property
    def degree(self) -> Tensor:
        return self.echo.degree

    def spread(self, x: Tensor) -> Tensor:
        return self.echo.spread(x)

    def total(self, z: Tensor) -> Tensor:
        return self.echo.total(z)

    def swap(self, z: Tensor) -> Tensor:
        self.seen.note(z)
        return self.echo.swap(z)
