"""Which messages of its clients a server takes in, and when: those of one exchange after the other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from holdfast.contract import ServerAlgorithm
from holdfast.core.randomness import cohort
from holdfast.engines.deploy.federation import Federation
from holdfast.engines.deploy.member.template import averaged_messages, client_template

Key = tuple[int, int]  # stage, exchange


@dataclass(frozen=True)
class Due:
    """The one exchange whose messages are taken in: nobody can honestly be further, nobody need be behind."""

    key: Key
    like: Any  # a tree like every message, on the device "meta"
    names: list[str]  # whose messages are needed


class Schedule(Protocol):
    """The exchanges of a run."""

    def due(self, key: Key) -> Due:
        """The first exchange from ``key`` on; in the end, everybody's farewell."""

    def after(self, done: int, published: Iterable[Key]) -> Due:
        """What comes after so many saved rounds, and after all that is ``published``."""


def last_stage(federation: Federation) -> int:
    """The stage in which clients take leave."""
    return federation.rounds + 1


def schedule_of(federation: Federation, dim: int) -> Schedule:
    """The exchanges of a run with models of dimension ``dim``."""
    leads = isinstance(federation.method, ServerAlgorithm)
    return Leading(federation, dim) if leads else Averaging(federation, dim)


class Leading:
    """A method with a state on the server: one exchange in each round, with the round's cohort."""

    def __init__(self, federation: Federation, dim: int) -> None:
        self.federation, self.like = federation, client_template(federation, dim)

    def due(self, key: Key) -> Due:
        federation, names = self.federation, self.federation.names
        if key[0] == last_stage(federation):
            return Due(key, (), names)
        chosen = cohort(federation.seed, key[0] - 1, len(names), federation.cohort).tolist()
        return Due(key, self.like, [names[i] for i in chosen])

    def after(self, done: int, published: Iterable[Key]) -> Due:
        return self.due((done + 1, 0))


class Averaging:
    """A method without a leader: it may exchange several times in a round, or not at all, with everybody."""

    def __init__(self, federation: Federation, dim: int) -> None:
        self.federation = federation
        self.messages = lru_cache(2)(lambda stage: averaged_messages(federation, dim, stage))

    def due(self, key: Key) -> Due:
        stage, exchange = key
        while stage < last_stage(self.federation):
            messages = self.messages(stage)
            if exchange < len(messages):
                return Due((stage, exchange), messages[exchange], self.federation.names)
            stage, exchange = stage + 1, 0
        return Due((stage, 0), (), self.federation.names)

    def after(self, done: int, published: Iterable[Key]) -> Due:
        first = (done + 1 if done else 0, 0)
        return self.due(max([first, *((stage, exchange + 1) for stage, exchange in published)]))
