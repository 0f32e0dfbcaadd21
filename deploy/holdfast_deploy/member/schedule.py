"""Which messages of its clients a server takes in, and when: those of one exchange after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from holdfast.contract import ServerAlgorithm
from holdfast.core.randomness import cohort
from holdfast.engines.common.channel_run import wire_like
from holdfast.privacy.aggregation.protocol import MASKED
from holdfast.problem.flat import FlatModel
from holdfast_deploy.federation import Federation
from holdfast_deploy.member.batch_norm import statistics_like
from holdfast_deploy.member.masked_messages import phases
from holdfast_deploy.member.template import averaged_messages, client_template
from holdfast_deploy.storage.messages import ExchangeKey, TensorSpec, specs


@dataclass(frozen=True)
class Due:
    """The one exchange whose messages are taken in: nobody can honestly be further, nobody need be behind."""

    key: ExchangeKey
    like: Any  # a tree like every message, on the device "meta"
    wire: Any  # and like what travels of it
    names: list[str]  # whose messages are needed

    @property
    def tensors(self) -> list[TensorSpec]:
        """Of every message, as it travels."""
        return specs(self.wire)


class Schedule:
    """The exchanges of a run with models like ``model``.

    ``secret``: (round) -> the numbers of its clients, where only the server knows them.

    A method with a state on the server exchanges once in each round, with the round's cohort, or with secure
    aggregation once in each of its phases. A method without a leader may exchange several times in a round,
    or not at all, with all nodes.
    """

    def __init__(
        self, federation: Federation, model: FlatModel, secret: Callable[[int], list[int]] | None = None
    ) -> None:
        self.federation, self.last, self.secret = federation, federation.last_message_round, secret
        self.statistics, dim = statistics_like(federation, model), model.dim
        self.leads = isinstance(federation.member_method, ServerAlgorithm)
        of_clients = self._of_clients(client_template(federation, dim)) if self.leads else []

        @lru_cache(2)
        def messages(message_round: int) -> list[tuple[Any, Any]]:
            if message_round > federation.rounds:
                return [] if self.statistics is None else [(self.statistics, self.statistics)]
            if self.leads:
                return of_clients if message_round else []
            return self._travelling(averaged_messages(federation, dim, message_round))

        self.messages = messages

    def _of_clients(self, message: Any) -> list[tuple[Any, Any]]:
        if self.federation.secure_aggregation is None:
            return self._travelling([message])
        forms = phases(message, self.federation.cohort)
        return [(message, phase) for phase in forms]

    def _travelling(self, messages: list[Any]) -> list[tuple[Any, Any]]:
        return [(like, wire_like(self.federation.wire_channel, like)) for like in messages]

    @property
    def message(self) -> int:
        """The exchange of a round in which clients of a server that leads send what they computed."""
        return 0 if self.federation.secure_aggregation is None else MASKED

    def due(self, key: ExchangeKey) -> Due:
        """The first exchange from ``key`` on; in the end, the final messages, in message round ``last``."""
        message_round, exchange = key
        while message_round < self.last:
            messages = self.messages(message_round)
            if exchange < len(messages):
                return Due((message_round, exchange), *messages[exchange], self._senders(message_round))
            message_round, exchange = message_round + 1, 0
        return Due((message_round, 0), (), (), self.federation.names)

    def after(self, done: int, published: Iterable[ExchangeKey]) -> Due:
        """What comes after so many saved rounds, and after all means that are ``published``."""
        first = (done + 1 if done else 0, 0)
        if self.leads:  # under masks, what is published as the exchange e answers the one before
            answered = [] if self.federation.secure_aggregation is None else list(published)
        else:
            answered = [(message_round, exchange + 1) for message_round, exchange in published]
        return self.due(max([first, *answered]))

    def _senders(self, message_round: int) -> list[str]:
        names, round = self.federation.names, max(message_round - 1, 0)
        if message_round > self.federation.rounds:
            return names
        if self.secret is not None:
            return [names[i] for i in self.secret(round)]
        chosen = cohort(self.federation.seed, round, len(names), self.federation.cohort)
        return [names[i] for i in chosen.tolist()]

    def asked(self, name: str, message_round: int) -> bool:
        """Whether ``name`` takes part in a round; in what is no round, all nodes do."""
        return not 1 <= message_round <= self.federation.rounds or name in self._senders(message_round)
