"""What one node's messages are made of: how many gradients of its data have gone into each of them.

Found as in a dry run, on an objective that is zero. Here gradients are made up, and told apart: torch notes
what each message was computed from, and with which weights. These matter: with a weight decay of 1 over the
step size, each local step forgets the ones before, and a model after a hundred steps shows the last gradient.
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
from holdfast.engines.common.trial import (
    RecordingEdges,
    RecordingInbox,
    RecordingPeers,
    ZeroProblem,
    links_of,
)
from holdfast.topology import Network

M = TypeVar("M")

ROUNDS = 6  # that are looked at, after a start
STRETCHES = 10  # of so many rounds: at the beginning of a run, and as many spread over it, if rounds differ
MANY = 10  # gradients; more are not counted
ALONE = 0.99  # cosine squared of what is computed from messages and one gradient: others weigh a tenth of it
TINY = 1e-9  # singular values, over the largest: of messages that say the same
MOST_READ = 200  # vectors in messages
COINS = (True, False, False, True)  # over and over: either side follows on either side, and begins


def fewest_gradients(method: Method, network: Network, steps: int | None, rounds: int = ROUNDS) -> int:
    """Of how many gradients the messages of a node are made at least; ``MANY`` stands for more, too.

    ``steps``: the local steps that it takes in a round; None: the method takes none. Counted are gradients
    that no earlier message contains, as receivers may know those. Where chance decides how many steps a round
    has, it may be a single one. ``rounds``: of the run; with schedules, no two of them need be alike.
    """
    if steps is not None:
        changed: dict[str, Any] = {"local_steps": steps}
        method = replace(method, **changed)
    method = repeating_at_most(method, MANY)
    starts = [(first, begin) for first in _stretches(method, rounds) for begin in (0, 1)]
    return min(_fewest_from(first, begin, method, network) for first, begin in starts)


def _fewest_from(first: int, begin: int, method: Method, network: Network) -> int:
    """The same of a few rounds from ``first`` on, with coins from ``begin`` on."""
    coins = cycle(COINS[begin:] + COINS[:begin])
    with torch.enable_grad():
        seen = _Seen(ToldApart(network.nodes, method.capabilities.least_dim))
        if isinstance(method, ServerAlgorithm):
            _client_rounds(method, seen, first, coins)
        else:
            assert isinstance(method, Algorithm)
            _rounds(method, network, seen, first, coins)
        return 1 if seen.single else min(seen.fewest, MANY)


def _stretches(method: Method, rounds: int) -> Iterator[int]:
    """First rounds of stretches to look at: schedules are steepest where they begin or end."""
    early = [i * ROUNDS for i in range(STRETCHES)]
    spread = [i * max(rounds - ROUNDS, 0) // STRETCHES for i in range(STRETCHES + 1)]
    known: list[Method] = []
    for first in sorted({r for r in [*early, *spread] if r < rounds}):
        if (now := method.at(first)) not in known:
            known.append(now)
            yield first


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
        self._values = torch.Generator().manual_seed(0)

    def full_grads(self, x: Tensor, nodes: Tensor, round: Word = 0, step: Word = 0) -> Tensor:
        # Adam has no slope at zero, so these are of either sign and of like size.
        made = torch.rand(x.shape, generator=self._values, dtype=x.dtype) - 0.5
        made = made + made.sign()
        self.given.append(made.requires_grad_())
        return made.clone()  # which may be changed in place

    def weights(self, number: Tensor, column: int) -> Tensor:
        """With which weight each gradient's ``column`` goes into ``number``."""
        slopes = torch.autograd.grad(
            number, self.given, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return torch.stack([slope.flatten()[column] for slope in slopes])

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
    read: list[Tensor] = field(default_factory=list)  # all vectors in messages

    @property
    def fewest(self) -> int:
        """Gradients in a message. What was not sent yet is in the next one."""
        return len(self.problem.given) if self.least is None else self.least

    @property
    def single(self) -> bool:
        """Whether a gradient can be computed from all messages, but for small shares of others.

        It can if it lies close to what the rows of weights span. Other members' messages are known, at worst.
        """
        for column in range(self.problem.dim):
            rows = [vector[column] for vector in self.read if len(vector) > column]
            rows = [row for row in rows if row.requires_grad]
            if not rows or not self.problem.given:
                continue
            weights = torch.stack([self.problem.weights(row, column) for row in rows])
            if not weights.isfinite().all():
                return True  # nobody can tell
            lengths = weights.norm(dim=1, keepdim=True)
            _, sizes, directions = torch.linalg.svd(weights / lengths.clamp(min=1e-300), full_matrices=False)
            spanned = directions[sizes > TINY * max(float(sizes[0]), TINY)]
            if bool((spanned.square().sum(0) > ALONE).any()):
                return True
        return False

    def note(self, message: Any) -> None:
        vectors = [row for tensor in leaves(message) for row in _rows(tensor)]
        self.read.extend(vectors[: MOST_READ - len(self.read)])
        new = [self.problem.sources(tensor) - self.told for tensor in leaves(message)]
        counts = [len(some) for some in new if some]
        self.least = min([*counts, *([] if self.least is None else [self.least])], default=None)
        self.told.update(*new)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.ndim else tensor.reshape(1, 1)


def _rounds(method: Algorithm, network: Network, seen: _Seen, first: int, coins: Iterator[bool]) -> None:
    now, x0 = method.at(first), seen.problem.x0
    state = now.init(x0[None].clone(), _oracle(seen, 0, coins), _peers(network, 0, coins, seen))
    for r in range(first, first + ROUNDS):
        oracle, peers = _oracle(seen, r, coins), _peers(network, r, coins, seen)
        state = method.at(r).round(state, oracle, peers)


def _client_rounds(method: ServerAlgorithm[Any], seen: _Seen, first: int, coins: Iterator[bool]) -> None:
    x0 = seen.problem.x0
    state, server = method.at(first).init(x0[None].clone()), method.at(first).init_server(x0.clone())
    for r in range(first, first + ROUNDS):
        now, oracle = method.at(r), _oracle(seen, r, coins)
        state, message = now.client(state, now.broadcast(server), oracle)
        seen.note(message)
        server = now.server(server, tree_map(lambda rows: rows.mean(0), message), 1.0)
        state = now.finish(state, message, now.answer(server) if now.capabilities.answers else (), oracle)


def _oracle(seen: _Seen, round: int, coins: Iterator[bool]) -> ProbedOracle:
    return ProbedOracle(BatchOracle(seen.problem, torch.tensor([0]), 0, round, Work()), coins)


def _peers(network: Network, round: int, coins: Iterator[bool], seen: _Seen) -> ProbedPeers:
    links, x0 = links_of(network.at(round), 0), seen.problem.x0
    return ProbedPeers(RecordingPeers(links, x0, lambda probability: next(coins)), seen)


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

    echo: RecordingPeers
    seen: _Seen

    @property
    def degree(self) -> Tensor:
        return self.echo.degree

    @property
    def edges(self) -> ProbedEdges:
        return ProbedEdges(self.echo.edges, self.seen)

    def exchange(self, message: M, sporadic: bool = False) -> RecordingInbox[M]:
        self.seen.note(message)
        return self.echo.exchange(message, sporadic)

    def coin(self, probability: float) -> bool:
        return self.echo.coin(probability)


@dataclass(frozen=True)
class ProbedEdges:
    """``echo``, of which every message is noted."""

    echo: RecordingEdges
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
