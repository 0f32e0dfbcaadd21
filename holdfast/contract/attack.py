"""Attacks: what nodes of a simulation send in place of their messages, to see what it does to others."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.registry import Registry
from holdfast.core.validation import Whole, check_fields, quoted

Attackers = Annotated[list[Whole], Field(min_length=1)]


@dataclass(frozen=True)
class Attack(ABC):
    """What the attackers ``nodes`` do. They compute as everybody does, and only lie about it.

    So a node that attacks keeps a state like the others'; what it sends, or learns from, is another thing.
    """

    poisons: ClassVar[bool] = False  # True: attackers learn from other ``labels`` than they have

    nodes: Attackers  # the attackers, by their numbers

    def __post_init__(self) -> None:
        check_fields(type(self).__name__, self)
        if len(set(self.nodes)) < len(self.nodes):
            raise HoldfastError(f"{type(self).__name__}.nodes: each once, got {quoted(self.nodes)}")

    def forge(self, messages: Tensor, liars: Tensor, nodes: int) -> Tensor:
        """[m, d]: what is sent of ``messages`` [m, d] in one exchange by senders of a network of ``nodes``.

        ``liars`` [m, 1] bool: which of them attack. They know what all others send.
        """
        return messages

    def labels(self, labels: Tensor, classes: int) -> Tensor:
        """The class labels [N] that an attacker learns from, in place of ``labels``."""
        return labels


ATTACKS: Registry[Attack] = Registry("attack")
