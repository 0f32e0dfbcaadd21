"""Secure aggregation in a round of a server that leads; the protocol is in ``holdfast.privacy.aggregation``.

What clients send in its five phases are the round's exchanges 0 to 4. The server's answers to the first four
are its exchanges 1 to 4; its exchange 0 is the model, as ever. A client saves its new state when all is said
but the last, so that after a crash it says the same again, and the server holds to what it has published. If
it does not, and answers otherwise than before the crash, the client says nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.randomness import cohort
from holdfast.core.tree import leaves, tree_map
from holdfast.privacy.aggregation.arithmetic import SHARE_BYTES, decode, default_threshold, encode
from holdfast.privacy.aggregation.keys import KEY_BYTES, Secrets, derived, digest_of
from holdfast.privacy.aggregation.protocol import (
    ANNOUNCED,
    CONFIRMED,
    DEALT,
    MASKED,
    REVEALED,
    Announcements,
    Client,
    total,
)
from holdfast_deploy.member.adding import summed
from holdfast_deploy.member.cards import (
    CARD_BYTES,
    CONFIRMATION_BYTES,
    Card,
    announcement_of,
    as_tensor,
    check_card,
    is_confirmed,
    make_card,
    make_confirmation,
)
from holdfast_deploy.noise import read_key
from holdfast_deploy.storage.messages import (
    DamagedError,
    Header,
    MessageFile,
    digest,
    write_message,
)
from holdfast_deploy.wire.protocol import Counted

if TYPE_CHECKING:
    from holdfast_deploy.federation import Federation
    from holdfast_deploy.member.node import Node
    from holdfast_deploy.member.server import Server

SEALED_BYTES = 2 * SHARE_BYTES + 16


def phases(message: Any, clients: int) -> list[Tensor]:
    """Like what a client sends in each phase, where its message is like ``message``; on "meta"."""
    size = sum(leaf.numel() for leaf in leaves(message))
    return [
        _bytes(CARD_BYTES),
        _bytes(clients, SEALED_BYTES),
        torch.empty(size, dtype=torch.int64, device="meta"),
        _bytes(CONFIRMATION_BYTES),
        _bytes(clients, SHARE_BYTES),
    ]


def _answers(clients: int) -> list[Any]:
    """Like what the server answers to each phase but the last."""
    sealed = {"dealt": _bytes(clients), "sealed": _bytes(clients, clients, SEALED_BYTES)}
    return [_bytes(clients, CARD_BYTES), sealed, _bytes(clients), _bytes(clients, CONFIRMATION_BYTES)]


# --- a client ----------------------------------------------------------------------------------------------


def send_masked(node: Node, message: Any, model: Header) -> tuple[MessageFile, MessageFile | None]:
    """Goes through a round's phases with ``message``: what was sent, and what is to be sent when it is saved.

    The latter is None where the server has ended the round, with this client's message, without it.
    ``model``: what the round began with.
    """
    names, own = _cohort(node.federation, node.message_round), node.credentials
    round = _round(node.federation, model)
    values = torch.cat([leaf.detach().cpu().double().flatten() for leaf in leaves(message)])
    kept = _kept(node, encode(values, len(names)))
    key = read_key(node.folder / "masks.key")
    secrets = secrets_for(key, node.store.incarnation, kept.header.content, round)
    like, answers = phases(message, len(names)), _answers(len(names))

    def say(
        exchange: int, make: Callable[[], Tensor], still: Callable[[Tensor], bool] | None = None
    ) -> MessageFile:
        """Publishes what ``make`` gives, once. What was said before a crash must hold for the answers now.

        ``still`` tells whether it does; None: if ``make`` gives the same again.
        """
        before = node.outbox.messages.get((node.message_round, exchange, ""))
        if before is None:
            said = make()
            return node.publish(node.header(exchange, said), said)
        if still is None:
            same = digest(make()) == before.header.content
        else:
            same = still(node.retry_while_full(partial(before.read, like[exchange], torch.device("cpu"))))
        if not same:
            raise HoldfastError(
                "secure aggregation: the server answers otherwise than before this client was stopped in the "
                "round, which could show its message; nothing more is sent. Roll everybody back to the round "
                "before, if you still trust the server"
            )
        return before

    def hear(exchange: int) -> Any:
        expected = answers[exchange - 1]
        file = node.transport.from_server(exchange, expected)
        return node.retry_while_full(partial(file.read, expected, torch.device("cpu")))

    node.phase = f"hiding the message of round {node.message_round}"
    card = partial(make_card, own, node.name, secrets.announcement(), round)
    # Signatures may differ each time: whether this one holds shows when the server passes the card on.
    node.transport.to_server(say(ANNOUNCED, card, still=lambda _: True))
    checked = {n: check_card(own, n, said, round) for n, said in zip(names, hear(DEALT), strict=True)}
    cards = {name: card for name, card in checked.items() if card is not None}
    announced = {name: card.announcement for name, card in cards.items()}
    client = Client(node.name, secrets, announced, _threshold(node.federation), _least(node.federation))
    node.transport.to_server(say(DEALT, lambda: _rows(names, client.deal(), SEALED_BYTES)))
    heard = hear(MASKED)
    dealt = _named(names, heard["dealt"])
    plain = partial(kept.read, torch.empty(len(values), dtype=torch.int64), torch.device("cpu"))
    sent = say(MASKED, lambda: client.masked(node.retry_while_full(plain), dealt))
    node.transport.to_server(sent)
    try:
        arrived = _named(names, hear(CONFIRMED))
        told = client.confirm(dealt, arrived)
        confirm = partial(make_confirmation, own, node.name, told)
        node.transport.to_server(say(CONFIRMED, confirm, still=partial(_signed, node, cards, told)))
        signed = dict(zip(names, hear(REVEALED), strict=True))
    except Counted:
        return sent, None
    confirmed = {name for name in arrived if is_confirmed(own, name, cards[name], signed[name], told)}
    mine = names.index(node.name)
    sealed = {name: bytes(heard["sealed"][i, mine].tolist()) for i, name in enumerate(names)}
    reveal = partial(client.reveal, sealed, dealt, arrived, confirmed)
    return sent, say(REVEALED, lambda: _rows(names, reveal(), SHARE_BYTES))


def _signed(node: Node, cards: dict[str, Card], told: bytes, confirmation: Tensor) -> bool:
    """Whether ``confirmation`` is this client's own on ``told``; since its card, it may have a new key."""
    own, card = node.credentials, cards[node.name]
    certificates = {card.certificate} | (set() if own is None else {own.certificate})
    known = [card._replace(certificate=certificate) for certificate in certificates]
    return any(is_confirmed(own, node.name, one, confirmation, told) for one in known)


def _kept(node: Node, values: Tensor) -> MessageFile:
    """The message as it was first computed in this round, int64 [d], in a file that nobody else may fetch.

    The client's secrets follow from it. Where the same round, computed again after a crash, gives other
    digits, as on some devices, the announced keys would not fit any more.
    """
    path = node.folder / "unmasked"
    try:
        kept = MessageFile(path)
        kept.verify()
        begun = (kept.header.round, kept.header.depends_on[node.name])
    except (DamagedError, FileNotFoundError):
        begun = (0, "")
    if begun != (node.message_round, node.store.incarnation):
        kept = node.retry_while_full(lambda: write_message(path, node.header(MASKED, values), values))
    return kept


def secrets_for(key: bytes, incarnation: str, content: str, round: bytes) -> Secrets:
    """A client's secrets in the ``round`` of that digest, from its ``key``.

    Another message, with the digest ``content``, gets others, and so does the same message after the client
    was rolled back.
    """
    return Secrets(derived(key, bytes.fromhex(content), f"message {incarnation}".encode()), round)


# --- the server --------------------------------------------------------------------------------------------


def aggregate(server: Server, model: Header) -> tuple[Any, list[str]]:
    """The mean of the clients' messages, a tree like one of them, and whose they were.

    ``model``: what the round began with.
    """
    names, like = server.due.names, server.due.like
    answers = _answers(len(names))

    def read(exchange: int, name: str) -> Tensor:
        file = server.file((server.message_round, exchange), name)
        file.verify()  # it may have been on disk for long
        like = server.schedule.due((server.message_round, exchange)).wire
        said: Tensor = file.read(like, torch.device("cpu"))
        return said

    def answer(exchange: int, gather: Callable[[list[str]], Any]) -> Any:
        """What is published when ``exchange`` is over; as it was, if that was before a crash."""
        file = server.outbox.messages.get((server.message_round, exchange + 1, ""))
        if file is None:
            server.due = server.schedule.due((server.message_round, exchange))
            server.run_on_loop(server.everybody)
            said = server.retry_while_full(lambda: gather(server.takers()))
            # From now on, what follows may come.
            server.due = server.schedule.due((server.message_round, exchange + 1))
            file = server.publish(server.header(exchange + 1, said), said)
        return server.retry_while_full(partial(file.read, answers[exchange], torch.device("cpu")))

    def cards(takers: list[str]) -> Tensor:
        return torch.stack([read(ANNOUNCED, n) if n in takers else _zeros(CARD_BYTES) for n in names])

    def shares(takers: list[str]) -> Any:
        missing = _zeros(len(names), SEALED_BYTES)
        sealed = torch.stack([read(DEALT, name) if name in takers else missing for name in names])
        return {"dealt": _flags(names, takers), "sealed": sealed}

    def signatures(_: list[str]) -> Tensor:
        missing, said = _zeros(CONFIRMATION_BYTES), server.arrivals[server.due.key]
        return torch.stack([read(CONFIRMED, name) if name in said else missing for name in names])

    announced = _announced(names, answer(ANNOUNCED, cards))
    dealt = _named(names, answer(DEALT, shares)["dealt"])
    arrived = [n for n in names if n in _named(names, answer(MASKED, lambda takers: _flags(names, takers)))]
    answer(CONFIRMED, signatures)
    server.due = server.schedule.due((server.message_round, REVEALED))
    server.run_on_loop(server.everybody)

    def sum_() -> Tensor:
        said = server.arrivals[server.due.key]
        revealed = {
            name: {
                other: bytes(share.tolist()) for other, share in zip(names, read(REVEALED, name), strict=True)
            }
            for name in arrived
            if name in said
        }
        masked = {name: read(MASKED, name) for name in arrived}
        threshold, context = _threshold(server.federation), _round(server.federation, model)
        return total(masked, dealt, announced, revealed, threshold, context)

    mean = decode(server.retry_while_full(sum_)) / len(arrived)
    parts = iter(torch.split(mean, [leaf.numel() for leaf in leaves(like)]))
    device = server.x0.device
    return tree_map(lambda t: next(parts).view(t.shape).to(device, summed(server, t)), like), arrived


def _announced(names: list[str], cards: Tensor) -> Announcements:
    texts = {name: bytes(card[: 3 * KEY_BYTES].tolist()) for name, card in zip(names, cards, strict=True)}
    return {name: announcement_of(name, text) for name, text in texts.items() if any(text)}


# --- what both know ----------------------------------------------------------------------------------------


def _cohort(federation: Federation, message_round: int) -> list[str]:
    chosen = cohort(federation.seed, message_round - 1, len(federation.names), federation.cohort)
    return [federation.names[i] for i in chosen.tolist()]


def _round(federation: Federation, model: Header) -> bytes:
    """A digest that names the round, the server's incarnation, and the ``model`` that the server sends.

    All that clients of a round derive or sign is bound to it. So a server that sends them different models,
    to have a sum in which one stands out, gets nothing that cancels.
    """
    served = (model.sender, model.depends_on.get(model.sender, ""), model.content)
    parts = (federation.id, str(federation.roster_number), str(model.round), *served)
    return digest_of(*(part.encode() for part in parts))


def _threshold(federation: Federation) -> int:
    assert federation.secure_aggregation is not None
    return federation.secure_aggregation.threshold or default_threshold(federation.cohort)


def _least(federation: Federation) -> int:
    """How many clients an honest server goes on with: all of the cohort, unless there is a quorum."""
    rule = federation.round
    return federation.cohort if rule is None or rule.quorum is None else rule.quorum


def _rows(names: list[str], texts: dict[str, bytes], size: int) -> Tensor:
    """``texts`` of ``size`` bytes in the order of ``names``; zeros for who has none."""
    return torch.stack([as_tensor(texts[name]) if name in texts else _zeros(size) for name in names])


def _flags(names: list[str], chosen: list[str]) -> Tensor:
    return torch.tensor([name in chosen for name in names], dtype=torch.uint8)


def _named(names: list[str], flags: Tensor) -> set[str]:
    return {name for name, flag in zip(names, flags.tolist(), strict=True) if flag}


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def _bytes(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.uint8, device="meta")
