"""Aggregations: how a node, or a server, puts together the messages that it received."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import BeforeValidator, Field, InstanceOf
from torch import Tensor

from holdfast.contract.channel import EVERY_USE, Use
from holdfast.core.errors import HoldfastError
from holdfast.core.registry import NotInherited, Registry
from holdfast.core.validation import Whole, check_fields, quoted

# --- aggregations: how a node, or a server, puts together the messages that it received -----------------


@dataclass(frozen=True)
class Aggregation(NotInherited, ABC):
    """A rule that makes one vector of several. A message of several vectors is taken vector by vector."""

    _promises = ("serves", "columnwise", "plain")
    serves: ClassVar[frozenset[Use]] = frozenset()  # what it is made for; anything else is refused
    columnwise: ClassVar[bool] = False  # True: no number depends on how many columns d a row has
    plain: ClassVar[bool] = False  # True: the mean with the network's weights, a matrix product

    def __post_init__(self) -> None:
        check_fields(type(self).__name__, self)

    @property
    def least(self) -> int:
        """The fewest messages that it can work with, a node's own included."""
        return 1

    @abstractmethod
    def combine(self, messages: Tensor, weights: Tensor, present: Tensor) -> Tensor:
        """[m, d]: what each of m receivers makes of its ``messages`` [m, k, d].

        ``present`` [m, k]: which of them are there; the others hold anything. ``weights`` [m, k]: those of
        the network, 0 where nothing is. A node's own message is the first; a server has none of its own.
        """


AGGREGATIONS: Registry[Aggregation] = Registry("aggregation")

if TYPE_CHECKING:
    ChosenAggregation = Aggregation
else:
    ChosenAggregation = Annotated[InstanceOf[Aggregation], BeforeValidator(AGGREGATIONS.chosen)]


@AGGREGATIONS.register("mean")
@dataclass(frozen=True)
class Mean(Aggregation):
    """The mean with the network's weights, as methods are published; one false message moves it anywhere."""

    serves = EVERY_USE
    columnwise = True
    plain = True

    def combine(self, messages: Tensor, weights: Tensor, present: Tensor) -> Tensor:
        return (weights.unsqueeze(-1) * messages.where(present.unsqueeze(-1), 0.0)).sum(1)


MEAN = Mean()


# --- attacks: what some nodes of a simulation send in place of their messages ---------------------------


Attackers = Annotated[list[Whole], Field(min_length=1)]


@dataclass(frozen=True)
class Attack(ABC):
    """What the attackers ``nodes`` do. They compute as all nodes do, and send something else.

    So a node that attacks keeps a state like the others'; what it sends, or learns from, is another thing.
    """

    poisons: ClassVar[bool] = False  # True: attackers learn from other ``labels`` than they have

    nodes: Attackers  # the attackers, by their numbers

    def __post_init__(self) -> None:
        check_fields(type(self).__name__, self)
        if len(set(self.nodes)) < len(self.nodes):
            raise HoldfastError(f"{type(self).__name__}.nodes: each once, got {quoted(self.nodes)}")

    def forge(self, messages: Tensor, attackers: Tensor, nodes: int) -> Tensor:
        """[m, d]: what is sent of ``messages`` [m, d] in one exchange by senders of a network of ``nodes``.

        ``attackers`` [m, 1] bool: which of them attack. They know what all others send.
        """
        return messages

    def labels(self, labels: Tensor, classes: int) -> Tensor:
        """The class labels [N] that an attacker learns from, in place of ``labels``."""
        return labels


ATTACKS: Registry[Attack] = Registry("attack")
