"""What clients and server of secure aggregation send one another, and what binds it to a round.

Clients sign with the keys of their certificates. A card has an announcement, its signature and the
certificate. A confirmation is a signature alone: the certificate is on the card. Members without
certificates, on loopback only, sign nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.randomness import cohort
from holdfast.core.tree import leaves
from holdfast.privacy.aggregation.arithmetic import SHARE_BYTES, default_threshold
from holdfast.privacy.aggregation.keys import KEY_BYTES, Announcement, digest_of
from holdfast_deploy.federation import Federation
from holdfast_deploy.storage.messages import Header
from holdfast_deploy.wire.credentials import Credentials
from holdfast_deploy.wire.signatures import check_signature, signature_of

CARD_BYTES = 4096  # filled up with zeros
SEALED_BYTES = 2 * SHARE_BYTES + 16
CONFIRMATION_BYTES = 80  # its length, a signature of at most 72 bytes, zeros

_LENGTHS = struct.Struct("<HH")


class Card(NamedTuple):
    """What a client announced, and the certificate (PEM) whose key signed it."""

    announcement: Announcement
    certificate: bytes


def make_card(credentials: Credentials | None, name: str, announcement: Announcement, round: bytes) -> Tensor:
    """The announcement of ``name`` for the ``round`` of that digest, signed: uint8 [CARD_BYTES]."""
    text, signature, certificate = announcement.pack(), b"", b""
    if credentials is not None:
        signature = signature_of(credentials, _announced(round, name, text))
        certificate = credentials.certificate
    card = text + _LENGTHS.pack(len(signature), len(certificate)) + signature + certificate
    if len(card) > CARD_BYTES:
        raise HoldfastError(f"secure_aggregation: your certificate is too long, {len(certificate)} bytes")
    return as_tensor(card.ljust(CARD_BYTES, b"\0"))


def check_card(credentials: Credentials | None, name: str, card: Tensor, round: bytes) -> Card | None:
    """What ``name`` announced; None if it is left out. Refuses what it did not sign for this ``round``."""
    if not bool(card.any()):
        return None
    text, rest = bytes(card.tolist())[: 3 * KEY_BYTES], bytes(card.tolist())[3 * KEY_BYTES :]
    lengths = _LENGTHS.unpack_from(rest)
    signature, rest = rest[_LENGTHS.size :][: lengths[0]], rest[_LENGTHS.size + lengths[0] :]
    certificate = rest[: lengths[1]]
    if credentials is not None:
        try:
            check_signature(credentials, name, certificate, signature, _announced(round, name, text))
        except ValueError as error:
            raise HoldfastError(
                f"secure_aggregation: the server passes on keys that are {error}, this round and the model "
                "that it begins with"
            ) from None
    return Card(announcement_of(name, text), certificate)


def announcement_of(name: str, text: bytes) -> Announcement:
    """What ``name`` announced; says whose it is if there is something wrong with it."""
    try:
        return Announcement.unpack(text)
    except HoldfastError as error:
        raise HoldfastError(f"secure_aggregation: {name} announced {error}; continue without it") from None


def make_confirmation(credentials: Credentials | None, name: str, text: bytes) -> Tensor:
    """The signature of ``name`` on what it was told: uint8 [CONFIRMATION_BYTES]."""
    signature = b"" if credentials is None else signature_of(credentials, _confirmed(name, text))
    return as_tensor(bytes([len(signature) + 1, *signature]).ljust(CONFIRMATION_BYTES, b"\0"))


def is_confirmed(
    credentials: Credentials | None, name: str, card: Card, confirmation: Tensor, text: bytes
) -> bool:
    """Whether ``confirmation`` is that of ``name``, whose ``card`` this is, on ``text``."""
    length, *signature = confirmation.tolist()
    if length == 0 or credentials is None:
        return bool(length)
    try:
        signed = bytes(signature[: length - 1])
        check_signature(credentials, name, card.certificate, signed, _confirmed(name, text))
    except ValueError:
        return False
    return True


def as_tensor(text: bytes) -> Tensor:
    """uint8, one for each byte."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _announced(round: bytes, name: str, announcement: bytes) -> bytes:
    return digest_of(b"holdfast secure aggregation: keys", round, name.encode(), announcement)


def _confirmed(name: str, text: bytes) -> bytes:
    return digest_of(b"holdfast secure aggregation: arrived", name.encode(), text)


# --- forms, and what binds them to a round ------------------------------------------------------------


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


def answers_like(clients: int) -> list[Any]:
    """Like what the server answers to each phase but the last."""
    sealed = {"dealt": _bytes(clients), "sealed": _bytes(clients, clients, SEALED_BYTES)}
    return [_bytes(clients, CARD_BYTES), sealed, _bytes(clients), _bytes(clients, CONFIRMATION_BYTES)]


def cohort_of(federation: Federation, message_round: int) -> list[str]:
    chosen = cohort(federation.seed, message_round - 1, len(federation.names), federation.cohort)
    return [federation.names[i] for i in chosen.tolist()]


def round_digest(federation: Federation, model: Header) -> bytes:
    """A digest that names the round, the server's incarnation, and the ``model`` that the server sends.

    All that clients of a round derive or sign is bound to it. So a server that sends them different models,
    to have a sum in which one stands out, gets nothing that cancels.
    """
    served = (model.sender, model.depends_on.get(model.sender, ""), model.content)
    parts = (federation.id, str(federation.roster_number), str(model.round), *served)
    return digest_of(*(part.encode() for part in parts))


def threshold_of(federation: Federation) -> int:
    assert federation.secure_aggregation is not None
    return federation.secure_aggregation.threshold or default_threshold(federation.cohort)


def least_clients(federation: Federation) -> int:
    """How many clients an honest server continues with: all of the cohort, unless there is a quorum."""
    rule = federation.round
    return federation.cohort if rule is None or rule.quorum is None else rule.quorum


def rows_of(names: list[str], texts: dict[str, bytes], size: int) -> Tensor:
    """``texts`` of ``size`` bytes in the order of ``names``; zeros for those without any."""
    return torch.stack([as_tensor(texts[name]) if name in texts else zeros(size) for name in names])


def flags_of(names: list[str], chosen: Collection[str]) -> Tensor:
    return torch.tensor([name in chosen for name in names], dtype=torch.uint8)


def named(names: list[str], flags: Tensor) -> set[str]:
    return {name for name, flag in zip(names, flags.tolist(), strict=True) if flag}


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def _bytes(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.uint8, device="meta")
