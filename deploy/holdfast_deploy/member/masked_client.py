"""Secure aggregation at a client; the protocol is in ``holdfast.privacy.aggregation``.

What clients send in its five phases are the round's exchanges 0 to 4. The server's answers to the first four
are its exchanges 1 to 4; its exchange 0 is the model, as ever. A client saves its new state when all is said
but the last, so that after a crash it says the same again, and the server holds to what it has published. If
it does not, and answers otherwise than before the crash, the client says nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.tree import leaves
from holdfast.privacy.aggregation.arithmetic import SHARE_BYTES, encode
from holdfast.privacy.aggregation.keys import Secrets, derived
from holdfast.privacy.aggregation.protocol import ANNOUNCED, CONFIRMED, DEALT, MASKED, REVEALED, Client
from holdfast_deploy.federation import Federation
from holdfast_deploy.member.masked_messages import (
    SEALED_BYTES,
    Card,
    answers_like,
    check_card,
    cohort_of,
    is_confirmed,
    least_clients,
    make_card,
    make_confirmation,
    named,
    phases,
    round_digest,
    rows_of,
    threshold_of,
)
from holdfast_deploy.member.state import Exchange
from holdfast_deploy.noise import read_key
from holdfast_deploy.storage.messages import DamagedError, Header, MessageFile, digest, specs
from holdfast_deploy.wire.credentials import Credentials
from holdfast_deploy.wire.protocol import Counted

HOST = torch.device("cpu")


@dataclass(frozen=True)
class MaskedClient:
    """One client of secure aggregation."""

    federation: Federation
    server: str
    name: str
    folder: Path
    credentials: Credentials | None
    incarnation: str


def send_masked(
    me: MaskedClient, message: Any, model: Header, transport: Exchange
) -> tuple[MessageFile, MessageFile | None]:
    """Goes through a round's phases with ``message``: what was sent, and what is to be sent when it is saved.

    The latter is None where the server has ended the round, with this client's message, without it.
    ``model``: what the round began with.
    """
    federation, own, message_round = me.federation, me.credentials, model.round
    names, round = cohort_of(federation, message_round), round_digest(federation, model)
    values = torch.cat([leaf.detach().cpu().double().flatten() for leaf in leaves(message)])
    kept = _kept(me, message_round, encode(values, len(names)), transport)
    key = read_key(me.folder / "masks.key")
    secrets = secrets_for(key, me.incarnation, kept.header.content, round)
    like, answers = phases(message, len(names)), answers_like(len(names))

    def say(
        exchange: int, make: Callable[[], Tensor], still: Callable[[Tensor], bool] | None = None
    ) -> MessageFile:
        """Publishes what ``make`` gives, once. What was said before a crash must hold for the answers now.

        ``still`` tells whether it does; None: if ``make`` gives the same again.
        """
        before = transport.published((message_round, exchange))
        if before is None:
            return transport.publish((message_round, exchange), make())
        if still is None:
            same = digest(make()) == before.header.content
        else:
            same = still(transport.retry_while_full(partial(before.read, like[exchange], HOST)))
        if not same:
            raise HoldfastError(
                "secure aggregation: the server answers otherwise than before this client was stopped in the "
                "round, which could show its message; nothing more is sent. Roll everybody back to the round "
                "before, if you still trust the server"
            )
        return before

    def hear(exchange: int) -> Any:
        expected = answers[exchange - 1]
        file = transport.fetch((message_round, exchange), [me.server], specs(expected))[me.server]
        return transport.retry_while_full(partial(file.read, expected, HOST))

    transport.phase = f"hiding the message of round {message_round}"
    card = partial(make_card, own, me.name, secrets.announcement(), round)
    # Signatures may differ each time: whether this one holds shows when the server passes the card on.
    transport.submit(say(ANNOUNCED, card, still=lambda _: True))
    checked = {n: check_card(own, n, said, round) for n, said in zip(names, hear(DEALT), strict=True)}
    cards = {name: card for name, card in checked.items() if card is not None}
    announced = {name: card.announcement for name, card in cards.items()}
    client = Client(me.name, secrets, announced, threshold_of(federation), least_clients(federation))
    transport.submit(say(DEALT, lambda: rows_of(names, client.deal(), SEALED_BYTES)))
    heard = hear(MASKED)
    dealt = named(names, heard["dealt"])
    plain = partial(kept.read, torch.empty(len(values), dtype=torch.int64), HOST)
    sent = say(MASKED, lambda: client.masked(transport.retry_while_full(plain), dealt))
    transport.submit(sent)
    try:
        arrived = named(names, hear(CONFIRMED))
        told = client.confirm(dealt, arrived)
        confirm = partial(make_confirmation, own, me.name, told)
        transport.submit(say(CONFIRMED, confirm, still=partial(_signed, me, cards, told)))
        signed = dict(zip(names, hear(REVEALED), strict=True))
    except Counted:
        return sent, None
    confirmed = {name for name in arrived if is_confirmed(own, name, cards[name], signed[name], told)}
    mine = names.index(me.name)
    sealed = {name: bytes(heard["sealed"][i, mine].tolist()) for i, name in enumerate(names)}
    reveal = partial(client.reveal, sealed, dealt, arrived, confirmed)
    return sent, say(REVEALED, lambda: rows_of(names, reveal(), SHARE_BYTES))


def _signed(me: MaskedClient, cards: dict[str, Card], told: bytes, confirmation: Tensor) -> bool:
    """Whether ``confirmation`` is this client's own on ``told``; since its card, it may have a new key."""
    own, card = me.credentials, cards[me.name]
    certificates = {card.certificate} | (set() if own is None else {own.certificate})
    known = [card._replace(certificate=certificate) for certificate in certificates]
    return any(is_confirmed(own, me.name, one, confirmation, told) for one in known)


def _kept(me: MaskedClient, message_round: int, values: Tensor, transport: Exchange) -> MessageFile:
    """The message as it was first computed in this round, int64 [d], in a file that nobody else may fetch.

    The client's secrets follow from it. Where the same round, computed again after a crash, gives other
    digits, as on some devices, the announced keys would not fit any more.
    """
    try:
        kept = MessageFile(me.folder / "unmasked")
        kept.verify()
        begun = (kept.header.round, kept.header.depends_on[me.name])
    except (DamagedError, FileNotFoundError):
        begun = (0, "")
    if begun != (message_round, me.incarnation):
        kept = transport.keep("unmasked", (message_round, MASKED), values)
    return kept


def secrets_for(key: bytes, incarnation: str, content: str, round: bytes) -> Secrets:
    """A client's secrets in the ``round`` of that digest, from its ``key``.

    Another message, with the digest ``content``, gets others, and so does the same message after the client
    was rolled back.
    """
    return Secrets(derived(key, bytes.fromhex(content), f"message {incarnation}".encode()), round)
