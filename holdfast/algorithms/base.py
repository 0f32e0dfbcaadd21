"""The whole contract between an algorithm and the engine that runs it.

An algorithm is a frozen dataclass of hyperparameters with a few pure functions on tensors ``[..., d]``: the
simulator calls them with all nodes stacked ``[n, d]``, a cluster rank with its block of rows, a deployed node
with its own row. What a node can do is spelled out by two objects it is handed: its ``Oracle`` (its own
objective) and its ``Peers`` (its links). Communication is a call in the middle of ``round``, so that a round
reads like the paper's and may exchange once, twice or not at all.

There are two kinds. An ``Algorithm`` has no leader: nodes exchange with their neighbours, or, when the
network is a server, with the average of everybody. A ``ServerAlgorithm`` keeps state on the server and may
run with a sampled cohort of clients.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from torch import Tensor

from holdfast.algorithms.schedules import NamedSchedule
from holdfast.registry import Registry
from holdfast.solvers.base import Solver
from holdfast.validation import check, check_fields, hints

State = Any  # a NamedTuple of tensors [..., d], of the algorithm's own making
M = TypeVar("M")  # a message: a tensor [..., d] or a NamedTuple of them
R = TypeVar("R", covariant=True)  # the same, received


class Oracle(Protocol):
    """A node's view of its own objective f_i. Points and gradients are ``[..., d]``, one row per node."""

    @property
    def round(self) -> int:
        """The current round, counted from 0."""

    def grad(self, x: Tensor, where: Tensor | None = None) -> Tensor:
        """Gradient of f_i at ``x`` on the round's next minibatch (exact if the objective has no batches).

        With ``where`` [..., 1], only the marked rows are computed; the others are zero and cost nothing.
        """

    def grads(self, *points: Tensor) -> tuple[Tensor, ...]:
        """Gradients at several points on the same minibatch, for variance reduction."""

    def full_grad(self, x: Tensor, where: Tensor | None = None) -> Tensor:
        """Gradient of f_i at ``x`` over all of the node's data; ``where`` as for ``grad``."""

    def argmin(
        self,
        linear: Tensor,
        centre: Tensor,
        weight: float | Tensor,
        start: Tensor,
        solver: Solver = ...,
        gradient_norm: float | None = None,
    ) -> Tensor:
        """argmin_u f_i(u) + <linear, u> + (weight/2) ||u - centre||^2 from ``start``; by default exactly.

        With ``gradient_norm`` the solver stops at that norm of the gradient instead of by its own rule.
        """

    @property
    def able(self) -> Tensor:
        """Whether the node is able to compute in this round, [..., 1]; always, unless nodes are sporadic."""

    @property
    def chance(self) -> Tensor:
        """The probability of being ``able``, [..., 1] float64."""


class Inbox(Protocol[R]):
    """What a node received in one exchange."""

    @property
    def mixed(self) -> R:
        """sum_j W_ij m_j over the node's neighbours and itself; for a server the mean of everybody."""

    @property
    def neighbour_sum(self) -> R:
        """sum_j m_j over the node's neighbours, without itself."""


class Edges(Protocol):
    """A node's links one by one: tensors ``[e, d]`` with one row for each link of each node."""

    @property
    def sign(self) -> Tensor:
        """+1 at the end with the larger node number, -1 at the other, [e, 1]."""

    @property
    def degree(self) -> Tensor:
        """The larger number of neighbours of the two ends, alike at both, [e, 1]."""

    def spread(self, x: Tensor) -> Tensor:
        """The node's row [..., d] at each of its links, [e, d]."""

    def total(self, z: Tensor) -> Tensor:
        """The sum over the node's links, [..., d]."""

    def swap(self, z: Tensor) -> Tensor:
        """Sends each row over its own link and returns what came from the other end, [e, d]."""


class Peers(Protocol):
    """A node's links. Every vector handed to ``exchange`` travels over each of them and is counted."""

    @property
    def degree(self) -> Tensor:
        """Number of neighbours, ``[..., 1]``."""

    @property
    def edges(self) -> Edges:
        """The node's links one by one, for methods that send every neighbour something else."""

    def exchange(self, message: M, sporadic: bool = False) -> Inbox[M]:
        """Sends ``message`` to every neighbour and waits for theirs; ``sporadic``: over available links."""

    def coin(self, probability: float) -> bool:
        """A coin that falls alike for everybody: true with ``probability``."""


@dataclasses.dataclass(frozen=True)
class Method:
    """Hyperparameters, checked when they are given; each may be a schedule if its type is ``Rate``."""

    assumes_convex: ClassVar[bool] = False  # True: what the method promises holds for convex f_i only

    def __post_init__(self) -> None:
        check_fields(type(self).__name__, self)
        for name, value in vars(self).items():
            if isinstance(value, NamedSchedule):
                for round in value.extremes:  # now, and not in the middle of a run
                    where = f"{type(self).__name__}.{name}: {value!r} at round {round}"
                    check(where, hints(type(self))[name], value(round))

    def at(self, round: int) -> Self:
        """This method with every schedule among its hyperparameters evaluated at ``round``."""
        scheduled = {name: value for name, value in vars(self).items() if callable(value)}
        if not scheduled:
            return self
        now = object.__new__(type(self))
        now.__dict__.update(vars(self))
        for name, schedule in scheduled.items():
            where = f"{type(self).__name__}.{name} at round {round}"
            now.__dict__[name] = check(where, hints(type(self))[name], schedule(round))
        return now

    def dual(self, s: State) -> Tensor | None:
        """The nodes' estimates of grad f_i(x*), [..., d], if the method keeps any, for the metric dual_error.

        ``s`` is the state of the nodes; of a server method, that of its clients.
        """
        return None


@dataclasses.dataclass(frozen=True)
class Algorithm(Method, ABC):
    """A method without a leader: every node does the same and talks to its neighbours."""

    needs_server: ClassVar[bool] = False  # True: correct only if the exchange averages everybody
    needs_graph: ClassVar[bool] = False  # True: works along links, so a server will not do

    @abstractmethod
    def init(self, x0: Tensor, oracle: Oracle, peers: Peers) -> State:
        """The state of every node before the first round, all starting from the same model ``x0``."""

    @abstractmethod
    def round(self, s: State, oracle: Oracle, peers: Peers) -> State:
        """Local work, exchange and combination: one communication round."""

    @abstractmethod
    def model(self, s: State) -> Tensor:
        """Each node's model, ``[..., d]``, after the exchange."""


S = TypeVar("S")  # the server's state


@dataclasses.dataclass(frozen=True)
class ServerAlgorithm(Method, ABC, Generic[S]):
    """A method led by a server that holds state; clients may be sampled.

    A round: the clients of the cohort receive ``broadcast(server)``, run ``client`` and send its message; the
    server takes in the mean of the messages. ``[d]`` on the server, ``[..., d]`` on the clients.
    """

    allows_cohorts: ClassVar[bool] = True

    @abstractmethod
    def init(self, x0: Tensor) -> State:
        """What clients remember between rounds (an empty tuple if nothing), given ``x0`` once per client."""

    @abstractmethod
    def init_server(self, x0: Tensor) -> S:
        """The server's state before the first round."""

    @abstractmethod
    def broadcast(self, server: S) -> Any:
        """What every client of the cohort is sent."""

    @abstractmethod
    def client(self, s: State, received: Any, oracle: Oracle) -> tuple[State, Any]:
        """A client's local work: its new state and its message to the server."""

    @abstractmethod
    def server(self, server: S, mean: Any, share: float) -> S:
        """Takes in the cohort's mean message; ``share`` = cohort size / number of clients."""

    @abstractmethod
    def model(self, server: S) -> Tensor:
        """The server's model, ``[d]``."""


ALGORITHMS: Registry[Method] = Registry("algorithm")
