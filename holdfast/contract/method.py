"""The two kinds of method, without a leader and led by a server that holds state, and what they declare."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Literal, Self, TypeAlias, TypeVar

from torch import Tensor

from holdfast.contract.channel import Compensated
from holdfast.contract.node import Oracle, Peers
from holdfast.contract.parameters import Columns, Hyperparameters, Last, NamedPart
from holdfast.core.errors import HoldfastError
from holdfast.core.registry import NotInherited, Registry
from holdfast.core.tree import Tree

State: TypeAlias = Tree  # a NamedTuple of tensors [..., d], of the algorithm's own making


# --- what a method needs and promises ---------------------------------------------------------------------


NOT_KNOWN = "it is not known where the method ends if they differ"


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a method needs, sends and promises.

    A class declares its own: ``declared = Capabilities(assumes_convex=True)``. What depends on
    hyperparameters is completed by ``Method.capabilities``. A subclass that declares nothing has the record
    of its base class without ``unequal_steps``, ``late_clients`` and ``columnwise``: what it overrides may
    break these promises.
    """

    # --- where it works -------------------------------------------------------------------------------
    topology: Literal["any", "graph", "server"] = "any"  # "server": its exchange has to average all nodes
    constant_graph: bool = False  # True: may diverge if links or weights change between rounds
    least_eigenvalue: float = -1.0  # may diverge if the mixing matrix has one below this; -1: none is
    least_dim: int = 1  # fewest numbers of a model; from there, states and messages grow linearly
    least_cohort: int = 1  # fewest clients that a round needs to do what the method promises
    poisson_cohorts: bool = False  # True: each client takes part by itself; cohorts have a mean size only
    assumes_convex: bool = False  # True: what the method promises holds for convex f_i only
    needs_exact_sums: bool = True  # True: what it promises needs exchanges that keep sums over nodes

    # --- how it computes ------------------------------------------------------------------------------
    uses_solver: bool = False  # True: solves local problems, some of which may end unsolved
    uses_curvature: bool = False  # True: ``for_problem`` gives hyperparameters from mu and L
    integrates_twice: float = 0.0
    """The share θ of (1 - θ) I + θ W if what that changes in models is added up as well; 0: it is not.

    Without curvature, model and dual of such a method are a double integrator, and a message that is late by
    compression is negative damping: channels with error feedback have to know of it.
    """

    # --- what it sends --------------------------------------------------------------------------------
    answers: bool = False  # True: before clients finish a round, the server sends them its ``answer``
    compensates: Compensated = False  # makes up itself for what compressors leave out of messages
    sends_gradients: bool = False  # True: a message holds a gradient of the node's own data, as it is
    sends_zeros: bool = False  # True: entries of a message that are zero have to arrive as zeros
    clippable: bool = False  # True: messages are changes [..., d] that no client's memory has to match

    # --- what it promises, and a subclass has to promise again ----------------------------------------
    unequal_steps: Literal[True] | str = NOT_KNOWN  # ``local_steps`` may differ among nodes: True, or why not
    late_clients: bool = False  # True: a server may leave out clients in any pattern; the same limit
    columnwise: bool = False  # True: no number depends on how many columns d a row has

    def __post_init__(self) -> None:
        if self.unequal_steps is not True and not isinstance(self.unequal_steps, str):
            raise HoldfastError(
                f"Capabilities.unequal_steps: expected True, or a text that says why not, got "
                f"{self.unequal_steps!r}; leave it out if it is not known"
            )

    def of_subclass(self) -> Capabilities:
        """What a subclass declares that declares nothing."""
        return replace(self, unequal_steps=NOT_KNOWN, late_clients=False, columnwise=False)

    def with_equal_steps(self, why: str) -> Capabilities:
        """The same, but for ``why`` all nodes have to take as many local steps, if it is not empty."""
        return replace(self, unequal_steps=why) if why and self.unequal_steps is True else self


# --- methods that are written as before 0.2.0 -------------------------------------------------------------


BEFORE = {  # attributes and properties of methods before 0.2.0, and what they are in ``Capabilities``
    "assumes_convex": "assumes_convex=True",
    "uses_solver": "uses_solver=True",
    "keeps_sums": "needs_exact_sums=False",
    "uses_curvature": "uses_curvature=True",
    "compensates": "compensates=True",
    "unequal_steps": "unequal_steps=True",
    "why_equal_steps": 'unequal_steps="why not"',
    "allows_late": "late_clients=True",
    "sends_gradients": "sends_gradients=True",
    "sends_zeros": "sends_zeros=True",
    "least_dim": "least_dim=2",
    "columnwise": "columnwise=True",
    "needs_server": 'topology="server"',
    "needs_graph": 'topology="graph"',
    "needs_constant_graph": "constant_graph=True",
    "least_eigenvalue": "least_eigenvalue=-0.5",
    "integrates_twice": "integrates_twice=0.5",
    "answers": "answers=True",
    "clippable": "clippable=True",
    "least_cohort": "least_cohort=2",
    "poisson_cohorts": "poisson_cohorts=True",
}


def refuse_before(cls: type) -> None:
    """Refuses a class of a method that is written as before 0.2.0, and says what to write."""
    for name, value in vars(cls).items():
        annotation = str(vars(cls).get("__annotations__", {}).get(name, "ClassVar"))
        if name not in BEFORE or "ClassVar" not in annotation:  # a hyperparameter may have any name
            continue
        if isinstance(value, property):
            raise HoldfastError(
                f"{cls.__name__}.{name}: what a method needs and promises is one record; write a property "
                f"`capabilities` that returns replace(self.declared, {BEFORE[name].split('=')[0]}=...)"
            )
        raise HoldfastError(
            f"{cls.__name__}.{name}: what a method needs and promises is one record; write declared = "
            f"Capabilities({BEFORE[name]})"
        )
    if "allows_cohorts" in vars(cls):
        raise HoldfastError(f"{cls.__name__}.allows_cohorts: all methods led by a server do; leave it out")
    if "settle" in vars(cls):
        raise HoldfastError(f"{cls.__name__}.settle: this function is called `finish` now; rename it")


# --- the two kinds of method ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method(NotInherited, Hyperparameters):
    """What all methods have in common: hyperparameters, and a record of what they need and promise."""

    _promises = ("declared",)
    declared: ClassVar[Capabilities] = Capabilities()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        refuse_before(cls)

    @classmethod
    def _undeclared(cls, inherited: Capabilities) -> Capabilities:
        return inherited.of_subclass()

    def __post_init__(self) -> None:
        if isinstance(vars(self).get("local_steps"), list | tuple | dict):
            why = self.capabilities.unequal_steps
            if why is not True:
                raise HoldfastError(f"{type(self).__name__}.local_steps: one number for all nodes, as {why}")
        super().__post_init__()

    @property
    def capabilities(self) -> Capabilities:
        """``declared``, completed by what depends on the hyperparameters."""
        return self.declared

    @property
    def may_be_padded(self) -> bool:
        """Whether zeros may follow the columns of a row: this and all of its parts declare ``columnwise``."""
        return self.capabilities.columnwise and super().may_be_padded

    @classmethod
    def for_problem(cls, mu: float, L: float | None = None, **given: Any) -> Self:
        """The method with what theory says for ``mu``-strongly convex, ``L``-smooth f_i (None: nonsmooth).

        ``given``: hyperparameters that the user has chosen. A class that has this declares
        ``uses_curvature``.
        """
        raise NotImplementedError(f"{cls.__name__} does not use the curvature")

    @property
    def names_parts(self) -> bool:
        """Whether parts of the model are given by name, so that ``for_model`` has to find them."""
        return any(isinstance(value, NamedPart) for value in vars(self).values())

    def for_model(self, sizes: Mapping[str, int]) -> Self:
        """The method with its parts by name found; ``sizes``: how many numbers each parameter has."""
        named = {key: value for key, value in vars(self).items() if isinstance(value, NamedPart)}
        found: dict[str, Any] = {key: value.among(sizes) for key, value in named.items()}
        return replace(self, **found) if found else self

    def for_any_model(self) -> Self:
        """The method with parts of one number each: a stand-in for counting what is sent, without a model."""
        parts = [key for key, value in vars(self).items() if isinstance(value, NamedPart | Last | Columns)]
        smallest: dict[str, Any] = dict.fromkeys(parts, Last(1))
        return replace(self, **smallest) if parts else self

    def dual(self, s: State) -> Tensor | None:
        """The nodes' estimates of grad f_i(x*), [..., d], if the method keeps any, for the metric dual_error.

        ``s`` is the state of the nodes; of a server method, that of its clients.
        """
        return None

    def personal(self, s: State) -> Tensor | None:
        """The nodes' personal models, [..., d], if the method trains any; ``s`` as for ``dual``."""
        return None


@dataclass(frozen=True)
class Algorithm(Method, ABC):
    """A method without a leader: every node does the same and talks to its neighbours."""

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


@dataclass(frozen=True)
class ServerAlgorithm(Method, ABC, Generic[S]):
    """A method led by a server that holds state; clients may be sampled.

    A round: the clients of the cohort receive ``broadcast(server)``, run ``client`` and send its message; the
    server takes in the mean of the messages; the clients end the round with ``finish``. ``[d]`` on the
    server, ``[..., d]`` on the clients.
    """

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
        """What the cohort is sent once the server has taken in its messages, if ``answers`` is declared."""
        return ()

    def finish(self, s: State, sent: Any, answer: Any, oracle: Oracle) -> State:
        """A client's state at the end of the round; ``sent`` is its message as it arrived at the server."""
        return s

    @abstractmethod
    def model(self, server: S) -> Tensor:
        """The server's model, ``[d]``."""


ALGORITHMS: Registry[Method] = Registry("algorithm")
