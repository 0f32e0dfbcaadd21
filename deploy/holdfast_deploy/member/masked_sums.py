"""Secure aggregation at the server; the protocol is in ``holdfast.privacy.aggregation``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from holdfast.core.tree import leaves, tree_map
from holdfast.privacy.aggregation.arithmetic import decode
from holdfast.privacy.aggregation.keys import KEY_BYTES
from holdfast.privacy.aggregation.protocol import (
    ANNOUNCED,
    CONFIRMED,
    DEALT,
    MASKED,
    REVEALED,
    Announcements,
    total,
)
from holdfast_deploy.federation import Federation
from holdfast_deploy.member.clients import Clients
from holdfast_deploy.member.masked_messages import (
    CARD_BYTES,
    CONFIRMATION_BYTES,
    SEALED_BYTES,
    announcement_of,
    answers_like,
    flags_of,
    named,
    phases,
    round_digest,
    threshold_of,
    zeros,
)
from holdfast_deploy.member.state import Exchange
from holdfast_deploy.member.sums import summed
from holdfast_deploy.storage.messages import Header, MessageFile

HOST = torch.device("cpu")


def masked_mean(
    federation: Federation,
    clients: Clients,
    model: Header,
    transport: Exchange,
    device: torch.device,
    *,
    wide: bool,
) -> tuple[Any, list[str]]:
    """The mean of the clients' messages, a tree like one of them, and whose they were.

    ``model``: what the round began with. ``wide``: see ``summed``.
    """
    message_round, names, message = model.round, clients.due.names, clients.due.like
    wires, answers = phases(message, federation.cohort), answers_like(len(names))

    def read(exchange: int, file: MessageFile) -> Tensor:
        file.verify()  # it may have been on disk for long
        said: Tensor = file.read(wires[exchange], HOST)
        return said

    def answer(exchange: int, gather: Callable[[Mapping[str, MessageFile]], Any]) -> Any:
        """What is published when ``exchange`` is over; as it was, if that was before a crash."""
        file = transport.published((message_round, exchange + 1))
        if file is None:
            came = transport.collect((message_round, exchange))
            said = transport.retry_while_full(lambda: gather(came))
            clients.expect((message_round, exchange + 1))  # which may come from now on
            file = transport.publish((message_round, exchange + 1), said)
        return transport.retry_while_full(partial(file.read, answers[exchange], HOST))

    def stacked(exchange: int, came: Mapping[str, MessageFile], *missing: int) -> Tensor:
        rows = [read(exchange, came[name]) if name in came else zeros(*missing) for name in names]
        return torch.stack(rows)

    def shares(came: Mapping[str, MessageFile]) -> Any:
        return {"dealt": flags_of(names, came), "sealed": stacked(DEALT, came, len(names), SEALED_BYTES)}

    announced = _announced(names, answer(ANNOUNCED, lambda came: stacked(ANNOUNCED, came, CARD_BYTES)))
    dealt = named(names, answer(DEALT, shares)["dealt"])
    arrived = [n for n in names if n in named(names, answer(MASKED, lambda came: flags_of(names, came)))]
    answer(CONFIRMED, lambda came: stacked(CONFIRMED, came, CONFIRMATION_BYTES))
    revealing = transport.collect((message_round, REVEALED))

    def sum_() -> Tensor:
        revealed = {
            name: {
                other: bytes(share.tolist())
                for other, share in zip(names, read(REVEALED, revealing[name]), strict=True)
            }
            for name in arrived
            if name in revealing
        }
        sent = {name: clients.file((message_round, MASKED), name) for name in arrived}
        masked = {name: read(MASKED, file) for name, file in sent.items()}
        threshold, context = threshold_of(federation), round_digest(federation, model)
        return total(masked, dealt, announced, revealed, threshold, context)

    mean = decode(transport.retry_while_full(sum_)) / len(arrived)
    parts = iter(torch.split(mean, [leaf.numel() for leaf in leaves(message)]))
    return tree_map(lambda t: next(parts).view(t.shape).to(device, summed(t, wide)), message), arrived


def _announced(names: list[str], cards: Tensor) -> Announcements:
    texts = {name: bytes(card[: 3 * KEY_BYTES].tolist()) for name, card in zip(names, cards, strict=True)}
    return {name: announcement_of(name, text) for name, text in texts.items() if any(text)}
