"""The two kinds of method: without a leader, and led by a server that holds state."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, Self, TypeVar

from torch import Tensor

from holdfast.contract.local import LocalOptimizer
from holdfast.contract.oracle import Oracle
from holdfast.contract.peers import Peers
from holdfast.contract.schedules import NamedSchedule
from holdfast.core.registry import Registry
from holdfast.core.validation import check, check_fields, hints

State = Any  # a NamedTuple of tensors [..., d], of the algorithm's own making


@dataclasses.dataclass(frozen=True)
class Method:
    """Hyperparameters, checked when they are given; each may be a schedule if its type is ``Rate``."""

    assumes_convex: ClassVar[bool] = False  # True: what the method promises holds for convex f_i only
    uses_solver: ClassVar[bool] = False  # True: solves local problems, some of which may end unsolved
    uses_curvature: ClassVar[bool] = False  # True: ``for_problem`` gives hyperparameters from mu and L
    columnwise: ClassVar[bool] = False  # True: no number depends on how many columns d a row has

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Not inherited: a subclass that overrides a round has to declare it anew.
        cls.columnwise = vars(cls).get("columnwise", False)

    def __post_init__(self) -> None:
        check_fields(type(self).__name__, self)
        for name, value in vars(self).items():
            if isinstance(value, NamedSchedule):
                for round in value.extremes:  # now, and not in the middle of a run
                    where = f"{type(self).__name__}.{name}: {value!r} at round {round}"
                    check(where, hints(type(self))[name], value(round))

    @property
    def may_be_padded(self) -> bool:
        """Whether zeros may follow the columns of a row: the method and its optimiser, if any, declare it."""
        parts = [part for part in vars(self).values() if isinstance(part, LocalOptimizer)]
        return self.columnwise and all(part.columnwise for part in parts)

    @classmethod
    def for_problem(cls, mu: float, L: float | None = None, **given: Any) -> Self:
        """The method with what theory says for ``mu``-strongly convex, ``L``-smooth f_i (None: nonsmooth).

        ``given``: hyperparameters that the user has chosen. A class that has this sets ``uses_curvature``.
        """
        raise NotImplementedError(f"{cls.__name__} does not use the curvature")

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
