"""How a member begins a roster: with its own model at the border, or with that of another."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from holdfast_deploy.federation import Federation
from holdfast_deploy.membership.kept_models import KeptModels, all_pinned
from holdfast_deploy.membership.roster import RosterChanged, roster_folder
from holdfast_deploy.membership.view import MembershipView
from holdfast_deploy.storage.messages import (
    HANDED_OVER,
    BeyondRepairError,
    DamagedError,
    ExchangeKey,
    Header,
    MessageFile,
    TensorSpec,
    specs,
)
from holdfast_deploy.storage.store import clear

T = TypeVar("T")


class ModelExchange(Protocol):
    """How a member hands models over, takes them, and waits for room on its disk."""

    def header(self, key: ExchangeKey, wire: Any) -> Header:
        """Of a message."""

    def publish(self, key: ExchangeKey, tree: Any) -> MessageFile:
        """Lets others fetch a message."""

    def receive(
        self, key: ExchangeKey, peers: Sequence[str], tensors: list[TensorSpec]
    ) -> dict[str, MessageFile]:
        """The messages of ``peers``."""

    def retry_while_full(self, action: Callable[[], T]) -> T:
        """The result of ``action``; while there is no room for its files, it is tried again."""


def keep_model(
    view: MembershipView, federation: Federation, exchange: ModelExchange, done: int, row: Tensor
) -> None:
    """Keeps the model ``row`` [d] after ``done`` rounds, in case the next roster begins there."""
    kept = view.kept
    if kept.folder.parent != roster_folder(view.folder, federation.roster_number):
        raise RosterChanged  # the next has begun: what this one still computes is none of its models
    header = exchange.header((done, HANDED_OVER), row)
    exchange.retry_while_full(partial(kept.keep, header, row))


def starting_model(
    view: MembershipView, federation: Federation, exchange: ModelExchange, x0: Tensor
) -> Tensor:
    """The model [d] that a member begins the roster of ``federation`` with; x0 [d] in the first one."""
    row = x0
    if federation.roster_number:
        row = _model_at_border(view, federation, exchange, x0)
    if not federation.led:  # in case a member is lost while the method begins; a server keeps its own at once
        keep_model(view, federation, exchange, federation.first_round, row)
    return row


def _model_at_border(
    view: MembershipView, federation: Federation, exchange: ModelExchange, x0: Tensor
) -> Tensor:
    roster, network, server = view.log.roster, federation.member_network, federation.server
    before = _models_before(view, federation)
    view.kept.inherit(before, roster.first)
    donors = {name: roster.donor(name, network) for name in roster.names} if server is None else {}
    donor = donors[view.name] if server is None else server.name
    if donor == view.name:
        found = _own_model(before, view.name, roster.first)
        row: Tensor = exchange.retry_while_full(partial(found.read, x0, x0.device))
    else:
        like = torch.empty_like(x0, device="meta")
        file = exchange.receive((federation.first_round, HANDED_OVER), [donor], specs(like))[donor]
        row = exchange.retry_while_full(partial(file.read, like, x0.device))
    if view.serves or view.name in [donors[name] for name in roster.joined if donors]:
        exchange.publish((federation.first_round, HANDED_OVER), row)
    return row


def _models_before(view: MembershipView, federation: Federation) -> KeptModels:
    """What the member has of the roster before."""
    folder = roster_folder(view.folder, federation.roster_number - 1)
    return KeptModels(folder, 0, all_pinned, federation.limits)


def _own_model(before: KeptModels, name: str, first: int) -> MessageFile:
    """What it had after the last round before the border."""
    try:
        found = before.find(first)
    except DamagedError as error:
        raise BeyondRepairError(str(error)) from None
    if found is None:
        raise BeyondRepairError(f"{before.folder / str(first)} is missing, from which {name} was to go on")
    return found


def state_before(view: MembershipView | None, federation: Federation) -> MessageFile | None:
    """The last state of the roster before, which says what it has cost so far; None: there is none."""
    if view is None or federation.roster_number == 0:
        return None
    path = roster_folder(view.folder, federation.roster_number - 1) / "state"
    try:
        return MessageFile(path) if path.exists() else None
    except DamagedError:  # only figures are lost
        return None


def forget_roster_before(view: MembershipView | None, federation: Federation) -> None:
    """Removes what the roster before has left: from here on, no member needs it."""
    if view is None or federation.roster_number == 0:
        return
    folder = roster_folder(view.folder, federation.roster_number - 1)
    if federation.roster_number == 1:
        clear(folder)
    else:
        shutil.rmtree(folder, ignore_errors=True)
