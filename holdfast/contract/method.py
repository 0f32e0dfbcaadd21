"""The two kinds of method: without a leader, and led by a server that holds state."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, Self, TypeVar

from torch import Tensor

from holdfast.contract.capabilities import Capabilities, refuse_before
from holdfast.contract.node import Oracle, Peers
from holdfast.contract.parameters import Columns, Hyperparameters, Last, NamedPart
from holdfast.core.errors import HoldfastError
from holdfast.core.registry import NotInherited, Registry

State = Any  # a NamedTuple of tensors [..., d], of the algorithm's own making


@dataclasses.dataclass(frozen=True)
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
        return dataclasses.replace(self, **found) if found else self

    def for_any_model(self) -> Self:
        """The method with parts of one number each: a stand-in for counting what is sent, without a model."""
        parts = [key for key, value in vars(self).items() if isinstance(value, NamedPart | Last | Columns)]
        smallest: dict[str, Any] = dict.fromkeys(parts, Last(1))
        return dataclasses.replace(self, **smallest) if parts else self

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
