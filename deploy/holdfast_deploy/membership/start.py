"""How a member begins a roster: with its own model at the border, or with that of another."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from holdfast_deploy.membership.kept_models import KeptModels
from holdfast_deploy.membership.service import RosterChanged
from holdfast_deploy.storage.messages import (
    HANDED_OVER,
    BeyondRepairError,
    DamagedError,
    MessageFile,
    specs,
)
from holdfast_deploy.storage.store import clear

if TYPE_CHECKING:
    from holdfast_deploy.member.base import Member


def keep_model(member: Member, done: int, row: Tensor) -> None:
    """Keeps the model ``row`` [d] after ``done`` rounds, in case the next roster begins there."""
    assert member.keeper is not None
    voter = member.keeper.voter
    kept = voter.kept
    if kept.folder.parent != voter.place(member.federation.roster_number):
        raise RosterChanged  # the next has begun: what this one still computes is none of its models
    header = member.header(HANDED_OVER, row).model_copy(update={"round": done})
    member.retry_while_full(lambda: kept.keep(header, row))


def starting_model(member: Member) -> Tensor:
    """The model [d] that ``member`` begins its roster with."""
    federation, keeper = member.federation, member.keeper
    if keeper is None:
        return member.x0
    if federation.roster_number == 0:
        _keep_start(member, member.x0)
        return member.x0
    roster, member.message_round = keeper.voter.roster, federation.first_round
    keeper.voter.kept.inherit(_before(member), roster.first)
    serves = federation.server is not None and federation.server.name == member.name
    if federation.server is not None:
        donor = federation.server.name
    else:
        donor = roster.donor(member.name, federation.member_network)
    row = _own_model(member) if donor == member.name else _model_of(member, donor)
    asked = roster.names if serves else roster.joined
    network = federation.member_network
    if serves or member.name in [roster.donor(name, network) for name in asked if federation.server is None]:
        member.publish(member.header(HANDED_OVER, row), row)
    _keep_start(member, row)
    return row


def _keep_start(member: Member, row: Tensor) -> None:
    """If somebody is lost while the method begins, the next roster begins with the same models."""
    if not member.federation.led:  # a server keeps its own at once
        keep_model(member, member.federation.first_round, row)


def _before(member: Member) -> KeptModels:
    """What the member has of the roster before."""
    assert member.keeper is not None
    place, limits = member.keeper.voter.place(member.federation.roster_number - 1), member.federation.limits
    return KeptModels(place, 0, lambda: True, limits)


def _own_model(member: Member) -> Tensor:
    """What it had after the last round before the border."""
    before, first = _before(member), member.federation.first_round
    try:
        found = before.find(first)
    except DamagedError as error:
        raise BeyondRepairError(str(error)) from None
    if found is None:
        raise BeyondRepairError(
            f"{before.folder / str(first)} is missing, from which {member.name} was to go on"
        )
    row: Tensor = member.retry_while_full(lambda: found.read(member.x0, member.x0.device))
    return row


def _model_of(member: Member, donor: str) -> Tensor:
    """What ``donor`` begins with."""
    like = torch.empty_like(member.x0, device="meta")
    first, tensors = member.federation.first_round, specs(like)

    async def fetch() -> Tensor:
        file = await (await member.link(donor)).fetch(first, HANDED_OVER, tensors)
        row: Tensor = file.read(like, member.x0.device)
        return row

    return member.run_on_loop(fetch)


def last_of_roster_before(member: Member) -> MessageFile | None:
    """The last state of the roster before, which tells what taking part has cost so far."""
    number, keeper = member.federation.roster_number, member.keeper
    if keeper is None or number == 0:
        return None
    path = keeper.voter.place(number - 1) / "state"
    try:
        return MessageFile(path) if path.exists() else None
    except DamagedError:  # only figures are lost
        return None


def forget_roster_before(member: Member) -> None:
    """Removes what the roster before has left: from here on, nobody needs it."""
    number, keeper = member.federation.roster_number, member.keeper
    if keeper is None or number == 0:
        return
    place = keeper.voter.place(number - 1)
    if number == 1:
        clear(place)
    else:
        shutil.rmtree(place, ignore_errors=True)
