"""Secure aggregation in a round of a server that leads; the protocol is in ``holdfast.privacy.aggregation``.

What clients send in its four phases are the round's exchanges 0 to 3. The server's answers to the first three
are its exchanges 1 to 3; its exchange 0 is the model, as ever. A client saves its new state when all is said
but the last, so that after a crash it says the same again, and the server holds to what it has published.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.randomness import cohort
from holdfast.core.tree import leaves, tree_map
from holdfast.engines.deploy.own_noise import read_key
from holdfast.engines.deploy.storage.messages import MessageFile, digest
from holdfast.engines.deploy.wire.protocol import Counted
from holdfast.engines.deploy.wire.vouching import check_signature, signature_of
from holdfast.privacy.aggregation.client import Announcements, Client
from holdfast.privacy.aggregation.keys import KEY_BYTES, Announcement, Secrets, derived
from holdfast.privacy.aggregation.ring import decode, encode
from holdfast.privacy.aggregation.server import total
from holdfast.privacy.aggregation.shares import SHARE_BYTES, default_threshold

if TYPE_CHECKING:
    from holdfast.engines.deploy.federation import Federation
    from holdfast.engines.deploy.member.node import Node
    from holdfast.engines.deploy.member.server import Server

ANNOUNCED, DEALT, MASKED, REVEALED = range(4)
CARD_BYTES = 4096  # an announcement, its signature and the certificate, filled up with zeros
SEALED_BYTES = 2 * SHARE_BYTES + 16

_LENGTHS = struct.Struct("<HH")


def phases(message: Any, clients: int) -> list[Tensor]:
    """Like what a client sends in each phase, where its message is like ``message``; on "meta"."""
    size = sum(leaf.numel() for leaf in leaves(message))
    return [
        _bytes(CARD_BYTES),
        _bytes(clients, SEALED_BYTES),
        torch.empty(size, dtype=torch.int64, device="meta"),
        _bytes(clients, SHARE_BYTES),
    ]


def _answers(clients: int) -> list[Any]:
    """Like what the server answers to each phase but the last."""
    sealed = {"dealt": _bytes(clients), "sealed": _bytes(clients, clients, SEALED_BYTES)}
    return [_bytes(clients, CARD_BYTES), sealed, _bytes(clients)]


# --- a client ----------------------------------------------------------------------------------------------


def send_masked(node: Node, message: Any) -> tuple[MessageFile, MessageFile | None]:
    """Goes through a round's phases with ``message``: what was sent, and what is to be sent when it is saved.

    The latter is None where the server has ended the round, with this client's message, without it.
    """
    names = _cohort(node.federation, node.stage)
    context = _context(node.federation, node.stage)
    secrets = secrets_for(read_key(node.folder / "masks.key"), message, context)
    answers = _answers(len(names))

    def say(exchange: int, make: Callable[[], Tensor]) -> MessageFile:
        """Publishes what ``make`` gives, unless that was done before a crash."""
        before = node.outbox.messages.get((node.stage, exchange, ""))
        if before is not None:
            return before
        said = make()
        return node.publish(node.header(exchange, said), said)

    def hear(exchange: int) -> Any:
        like = answers[exchange - 1]
        file = node.transport.from_server(exchange, like)
        return node.insist(partial(file.read, like, torch.device("cpu")))

    node.phase = f"hiding the message of round {node.stage}"
    node.transport.to_server(say(ANNOUNCED, lambda: _card(node, secrets.announcement())))
    cards = hear(DEALT)
    announced = {name: _checked(node, name, card) for name, card in zip(names, cards, strict=True)}
    client = Client(
        node.name, secrets, {n: a for n, a in announced.items() if a}, _threshold(node.federation)
    )
    node.transport.to_server(say(DEALT, lambda: _rows(names, client.deal(), SEALED_BYTES)))
    heard = hear(MASKED)
    dealt = _named(names, heard["dealt"])
    values = torch.cat([leaf.detach().cpu().double().flatten() for leaf in leaves(message)])
    sent = say(MASKED, lambda: client.masked(encode(values, len(names)), dealt))
    node.transport.to_server(sent)
    try:
        arrived = _named(names, hear(REVEALED))
    except Counted:
        return sent, None
    mine = names.index(node.name)
    sealed = {name: bytes(heard["sealed"][i, mine].tolist()) for i, name in enumerate(names)}
    reveal = partial(client.reveal, sealed, dealt, arrived)
    return sent, say(REVEALED, lambda: _rows(names, reveal(), SHARE_BYTES))


def secrets_for(key: bytes, message: Any, context: bytes) -> Secrets:
    """A client's secrets for a round, from its ``key``.

    Another message in the same round, as after everybody was rolled back, gets others: two messages under the
    same masks would show their difference.
    """
    return Secrets(derived(key, bytes.fromhex(digest(message)), b"message"), context)


def _card(node: Node, announcement: Announcement) -> Tensor:
    """The announcement, signed with the key of the node's certificate."""
    text, signature, certificate = announcement.pack(), b"", b""
    if node.credentials is not None:
        signature = signature_of(node.credentials, _signed(node, node.name, text))
        certificate = node.credentials.certificate
    card = text + _LENGTHS.pack(len(signature), len(certificate)) + signature + certificate
    if len(card) > CARD_BYTES:
        raise HoldfastError(f"secure_aggregation: your certificate is too long, {len(certificate)} bytes")
    return _tensor(card.ljust(CARD_BYTES, b"\0"))


def _checked(node: Node, name: str, card: Tensor) -> Announcement | None:
    """What ``name`` announced; None if it is left out. Refuses what it did not sign."""
    if not bool(card.any()):
        return None
    text, rest = bytes(card.tolist())[: 3 * KEY_BYTES], bytes(card.tolist())[3 * KEY_BYTES :]
    lengths = _LENGTHS.unpack_from(rest)
    signature, rest = rest[_LENGTHS.size :][: lengths[0]], rest[_LENGTHS.size + lengths[0] :]
    if node.credentials is not None:
        try:
            check_signature(node.credentials, name, rest[: lengths[1]], signature, _signed(node, name, text))
        except ValueError as error:
            raise HoldfastError(f"secure_aggregation: the server passes on keys that are {error}") from None
    return Announcement.unpack(text)


def _signed(node: Node, name: str, announcement: bytes) -> bytes:
    return b"\0".join((_context(node.federation, node.stage), name.encode(), announcement))


# --- the server --------------------------------------------------------------------------------------------


def aggregate(server: Server) -> tuple[Any, list[str]]:
    """The mean of the clients' messages, a tree like one of them, and whose they were."""
    names, like = server.due.names, server.due.like
    answers = _answers(len(names))

    def read(exchange: int, name: str) -> Tensor:
        file = server.file((server.stage, exchange), name)
        file.verify()  # it may have been on disk for long
        said: Tensor = file.read(server.schedule.due((server.stage, exchange)).wire, torch.device("cpu"))
        return said

    def answer(exchange: int, gather: Callable[[list[str]], Any]) -> Any:
        """What is published when ``exchange`` is over; as it was, if that was before a crash."""
        file = server.outbox.messages.get((server.stage, exchange + 1, ""))
        if file is None:
            server.due = server.schedule.due((server.stage, exchange))
            server.ask(server.everybody)
            said = server.insist(lambda: gather(server.takers()))
            server.due = server.schedule.due((server.stage, exchange + 1))  # which may come from now on
            file = server.publish(server.header(exchange + 1, said), said)
        return server.insist(partial(file.read, answers[exchange], torch.device("cpu")))

    def cards(takers: list[str]) -> Tensor:
        return torch.stack([read(ANNOUNCED, n) if n in takers else _zeros(CARD_BYTES) for n in names])

    def shares(takers: list[str]) -> Any:
        missing = _zeros(len(names), SEALED_BYTES)
        sealed = torch.stack([read(DEALT, name) if name in takers else missing for name in names])
        return {"dealt": _flags(names, takers), "sealed": sealed}

    announced = _announced(names, answer(ANNOUNCED, cards))
    dealt = _named(names, answer(DEALT, shares)["dealt"])
    arrived = [n for n in names if n in _named(names, answer(MASKED, lambda takers: _flags(names, takers)))]
    server.due = server.schedule.due((server.stage, REVEALED))
    server.ask(server.everybody)

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
        threshold, context = _threshold(server.federation), _context(server.federation, server.stage)
        return total(masked, dealt, announced, revealed, threshold, context)

    mean = decode(server.insist(sum_)) / len(arrived)
    parts = iter(torch.split(mean, [leaf.numel() for leaf in leaves(like)]))
    device = server.x0.device
    return tree_map(lambda t: next(parts).view(t.shape).to(device, t.dtype), like), arrived


def _announced(names: list[str], cards: Tensor) -> Announcements:
    texts = {name: bytes(card[: 3 * KEY_BYTES].tolist()) for name, card in zip(names, cards, strict=True)}
    return {name: Announcement.unpack(text) for name, text in texts.items() if any(text)}


# --- what both know ----------------------------------------------------------------------------------------


def _cohort(federation: Federation, stage: int) -> list[str]:
    chosen = cohort(federation.seed, stage - 1, len(federation.names), federation.cohort)
    return [federation.names[i] for i in chosen.tolist()]


def _context(federation: Federation, stage: int) -> bytes:
    return hashlib.sha256(f"{federation.id} {federation.epoch} {stage}".encode()).digest()


def _threshold(federation: Federation) -> int:
    assert federation.secure_aggregation is not None
    return federation.secure_aggregation.threshold or default_threshold(federation.cohort)


def _rows(names: list[str], texts: dict[str, bytes], size: int) -> Tensor:
    """``texts`` of ``size`` bytes in the order of ``names``; zeros for who has none."""
    return torch.stack([_tensor(texts[name]) if name in texts else _zeros(size) for name in names])


def _flags(names: list[str], chosen: list[str]) -> Tensor:
    return torch.tensor([name in chosen for name in names], dtype=torch.uint8)


def _named(names: list[str], flags: Tensor) -> set[str]:
    return {name for name, flag in zip(names, flags.tolist(), strict=True) if flag}


def _tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def _bytes(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.uint8, device="meta")
