"""The two kinds of method: without a leader, and led by a server that holds state."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, Self, TypeVar

from torch import Tensor

from holdfast.contract.channel import Compensated
from holdfast.contract.node import Oracle, Peers
from holdfast.contract.parameters import Columns, Hyperparameters, Last, NamedPart
from holdfast.core.errors import HoldfastError
from holdfast.core.registry import Registry

State = Any  # a NamedTuple of tensors [..., d], of the algorithm's own making


@dataclasses.dataclass(frozen=True)
class Method(Hyperparameters):
    """What all methods declare of themselves."""

    assumes_convex: ClassVar[bool] = False  # True: what the method promises holds for convex f_i only
    uses_solver: ClassVar[bool] = False  # True: solves local problems, some of which may end unsolved
    keeps_sums: ClassVar[bool] = True  # True: what it promises needs exchanges that keep sums over nodes
    uses_curvature: ClassVar[bool] = False  # True: ``for_problem`` gives hyperparameters from mu and L
    compensates: ClassVar[Compensated] = False  # makes up itself for what compressors leave out of messages
    # Not inherited: a subclass that overrides anything has to declare them anew.
    unequal_steps: ClassVar[bool] = False  # True: ``local_steps`` may differ from node to node
    allows_late: ClassVar[bool] = False  # True: a server may leave out clients in any pattern; same limit

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in ("unequal_steps", "allows_late"):
            setattr(cls, name, vars(cls).get(name, False))

    def __post_init__(self) -> None:
        if isinstance(vars(self).get("local_steps"), list | tuple | dict) and (why := self.why_equal_steps):
            raise HoldfastError(f"{type(self).__name__}.local_steps: one number for all nodes, as {why}")
        super().__post_init__()

    @property
    def why_equal_steps(self) -> str:
        """Why nodes cannot take different numbers of local steps; empty: they can."""
        return "" if self.unequal_steps else "it is not known where the method ends if they differ"

    @classmethod
    def for_problem(cls, mu: float, L: float | None = None, **given: Any) -> Self:
        """The method with what theory says for ``mu``-strongly convex, ``L``-smooth f_i (None: nonsmooth).

        ``given``: hyperparameters that the user has chosen. A class that has this sets ``uses_curvature``.
        """
        raise NotImplementedError(f"{cls.__name__} does not use the curvature")

    @property
    def sends_gradients(self) -> bool:
        """Whether a message holds a gradient of the node's own data, as it is."""
        return False

    @property
    def sends_zeros(self) -> bool:
        """Whether entries of a message that are zero have to arrive as zeros."""
        return False

    @property
    def names_parts(self) -> bool:
        """Whether parts of the model are given by name, so that ``for_model`` has to find them."""
        return any(isinstance(value, NamedPart) for value in vars(self).values())

    def for_model(self, sizes: Mapping[str, int]) -> Self:
        """The method with its parts by name found; ``sizes``: how many numbers each parameter has."""
        named = {key: value for key, value in vars(self).items() if isinstance(value, NamedPart)}
        found: dict[str, Any] = {key: value.among(sizes) for key, value in named.items()}
        return dataclasses.replace(self, **found) if found else self

    def for_any_model(self) -> Self:
        """The method with parts of one number each: a stand-in for counting what is sent, without a model."""
        parts = [key for key, value in vars(self).items() if isinstance(value, NamedPart | Last | Columns)]
        smallest: dict[str, Any] = dict.fromkeys(parts, Last(1))
        return dataclasses.replace(self, **smallest) if parts else self

    @property
    def least_dim(self) -> int:
        """The fewest numbers that a model can have; from there, states and messages grow linearly."""
        return 1

    def dual(self, s: State) -> Tensor | None:
        """The nodes' estimates of grad f_i(x*), [..., d], if the method keeps any, for the metric dual_error.

        ``s`` is the state of the nodes; of a server method, that of its clients.
        """
        return None

    def personal(self, s: State) -> Tensor | None:
        """The nodes' personal models, [..., d], if the method trains any; ``s`` as for ``dual``."""
        return None


@dataclasses.dataclass(frozen=True)
class Algorithm(Method, ABC):
    """A method without a leader: every node does the same and talks to its neighbours."""

    needs_server: ClassVar[bool] = False  # True: correct only if the exchange averages everybody
    needs_graph: ClassVar[bool] = False  # True: works along links, so a server will not do
    needs_constant_graph: ClassVar[bool] = (
        False  # True: may diverge if links or weights change between rounds
    )

    @property
    def least_eigenvalue(self) -> float:
        """The method may diverge if the mixing matrix has an eigenvalue below this; -1: none is."""
        return -1.0

    @property
    def integrates_twice(self) -> float:
        """The share θ of (1 - θ) I + θ W if what that changes in models is added up as well; 0: it is not.

        Without curvature, model and dual of such a method are a double integrator, and a message that is
        late by compression is negative damping: channels with error feedback have to know of it.
        """
        return 0.0

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
    server takes in the mean of the messages; the clients end the round with ``finish``. ``[d]`` on the
    server, ``[..., d]`` on the clients.
    """

    allows_cohorts: ClassVar[bool] = True
    answers: ClassVar[bool] = False  # True: before it settles, the cohort is sent ``answer``

    @property
    def clippable(self) -> bool:
        """Whether messages are changes [..., d] that no client's memory has to match: they may be clipped."""
        return False

    @property
    def least_cohort(self) -> int:
        """The fewest clients that a round needs to do what the method promises."""
        return 1

    @property
    def poisson_cohorts(self) -> bool:
        """Whether each client takes part by itself, so that cohorts have their size only on average."""
        return False

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

    def answer(self, server: S) -> Any:
        """What the cohort is sent once the server has taken in its messages, if the method ``answers``."""
        return ()

    def finish(self, s: State, sent: Any, answer: Any, oracle: Oracle) -> State:
        """A client's state at the end of the round; ``sent`` is its message as it arrived at the server."""
        return s

    @abstractmethod
    def model(self, server: S) -> Tensor:
        """The server's model, ``[d]``."""


ALGORITHMS: Registry[Method] = Registry("algorithm")
