"""The coordinator of a running federation: it signs orders, and sends them to all members in reach."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any, Literal

from holdfast.core.errors import TRY_LATER, HoldfastError
from holdfast.core.files import private_files, write_atomic
from holdfast_deploy.consent import holds_key
from holdfast_deploy.federation import NodeConfig
from holdfast_deploy.federation_file import FederationFile, read_federation
from holdfast_deploy.keys import load_key, sign
from holdfast_deploy.membership.agreement import Decision
from holdfast_deploy.membership.links import MembershipLinks
from holdfast_deploy.membership.log import MembershipLog, read_decisions
from holdfast_deploy.membership.messages import MembershipReply, MembershipRequest
from holdfast_deploy.membership.roster import Order, Roster, check_change, led_roster
from holdfast_deploy.ops.events import Events, silence
from holdfast_deploy.wire.credentials import Credentials, load_credentials
from holdfast_deploy.wire.listener import require_loopback

Change = Literal["remove", "add", "replace"]

TIMEOUT = 5.0  # seconds in which a member has to answer


class NobodyError(HoldfastError):
    """No member takes the order now; later some may."""

    exit_code = TRY_LATER


class Coordinator:
    """The holder of the coordinator's key, who asks members under the certificate of one of them."""

    def __init__(
        self, path: Path, certs: Path | None = None, asker: str | None = None, *, insecure: bool = False
    ) -> None:
        self.path, self.file, self.folder = path, read_federation(path), certs or path.parent / "certs"
        if self.file.membership is None:
            raise HoldfastError(f"{path} has no [membership]: its members stay as they are")
        if not holds_key(self.folder, self.file):
            raise HoldfastError(
                f"{self.folder} holds no key of the coordinator of {path}: only it can change the members"
            )
        if insecure:
            require_loopback(self.file, None)
        self.asker = asker or (self.file.members[0].name if insecure else only_key(self.file, self.folder))
        self.credentials = (
            None if insecure else load_credentials(self.folder, self.asker, self.file.coordinator)
        )

    def change(
        self,
        change: Change,
        members: list[str],
        *,
        samples: int | None = None,
        folder: Path | None = None,
        output: Path | None = None,
    ) -> None:
        """Orders a change of ``members``, NAME or NAME=host:port.

        ``folder``: of a member, which knows what the present roster is; for when nobody can be reached.
        ``output``: where the signed order is written.
        """
        log, replies = self._look(folder)
        now = log.roster
        nodes = [_node(self.file, now, change, member, samples) for member in members]
        names = list(dict.fromkeys(node.name for node in nodes))
        order = Order(
            federation=self.file.id, roster=now.number, change=change, node=nodes[0], also=names[1:]
        )
        _foresee(self.file, now, order)
        output = output or self.path.parent / f"{change}-{'-'.join(names)}.json"
        self._give(order, log, replies, output)

    def roll_back(self, to: int, *, folder: Path | None = None, output: Path | None = None) -> None:
        """Orders all members to continue from their models after round ``to``, in a roster of its own.

        ``folder``, ``output``: as for ``change``.
        """
        log, replies = self._look(folder)
        kept = [its for reply in replies if (its := reply.available) is not None and its.newest is not None]
        if kept and not all(its.has(to) for its in kept):
            newest = min(its.newest for its in kept if its.newest is not None)
            named = {
                *(round for its in kept for round in its.earlier),
                *range(max(newest - 20, 0), newest + 1),
            }
            rounds = ", ".join(str(round) for round in sorted(named) if all(its.has(round) for its in kept))
            raise HoldfastError(
                f"--to {to}: choose a round whose models all have kept (limits.snapshots): {rounds or 'none'}"
            )
        order = Order(federation=self.file.id, roster=log.roster.number, change="rollback", to=to)
        self._give(order, log, replies, output or self.path.parent / f"rollback-{to}.json")

    def _look(self, folder: Path | None) -> tuple[MembershipLog, list[MembershipReply]]:
        """All rosters so far, from ``folder`` if nobody can be reached; what the members of the last say."""
        answers = self._tell(None, []).values()
        latest = max((log for log, _ in answers), key=lambda its: its.roster.number, default=None)
        if latest is None and folder is not None:
            if not (folder / "membership").is_dir():
                raise HoldfastError(f"--dir: {folder} is not the folder of a member whose members may change")
            decisions = read_decisions(folder / "membership")
            latest = MembershipLog(self.file, self.credentials, decisions=decisions)
        if latest is None:
            raise NobodyError("no member could be reached: start them, or give the folder of one with --dir")
        number = latest.roster.number
        return latest, [reply for log, reply in answers if log.roster.number == number]

    @private_files()
    def _give(self, order: Order, log: MembershipLog, replies: list[MembershipReply], output: Path) -> None:
        """Signs ``order``, writes it to ``output``, and sends it to all members that can be reached.

        It replaces all orders for this roster in ``replies``, which no member has carried out.
        """
        key, now = load_key(self.folder), log.roster
        before = [other for reply in replies if (other := _given(log, reply)) is not None]
        number = max((other.number + 1 for other in before), default=0)
        order = order.model_copy(update={"number": number})
        order = order.model_copy(update={"signature": sign("membership", order.document, key)})
        write_atomic(output, order.model_dump_json().encode() + b"\n")
        answers = self._tell(order, log.decisions)
        took = sorted(answers)
        print(f"wrote {output}: {order.summary}, in roster {now.number} of {len(now.nodes)} nodes")
        for summary in sorted({other.summary for other in before if other.document != order.document}):
            print(f"it replaces an order that was not carried out yet: {summary}")
        print(f"told {', '.join(took) or 'nobody'}; they tell the others, and change between two rounds")
        print("where it cannot be sent over the network, copy it to node-NAME/membership/order.json there")
        for _, reply in answers.values():
            other = _given(log, reply)
            if other is not None and other.document != order.document:
                raise NobodyError(
                    f"another order was given at the same time, and counts: {other.summary}. Once that is "
                    "done, run the same command again"
                )

    def _tell(
        self, order: Order | None, decisions: list[Decision]
    ) -> dict[str, tuple[MembershipLog, MembershipReply]]:
        return asyncio.run(_tell(self.file, self.asker, self.credentials, order, decisions))


def _given(log: MembershipLog, reply: MembershipReply) -> Order | None:
    """The order for the latest roster that a member knows of, if the coordinator has given it."""
    if reply.order is None or reply.order.roster != log.roster.number:
        return None
    try:
        log.check_order(reply.order)
    except HoldfastError:
        return None
    return reply.order


def _node(file: FederationFile, now: Roster, change: Change, member: str, samples: int | None) -> NodeConfig:
    """The node that the order is about, as it will be in the next roster."""
    name, _, address = member.partition("=")
    known = {node.name: node for node in [*file.node, *now.nodes]}
    if change != "add" and name not in now.names:
        raise HoldfastError(f"{name!r} does not take part now; these do: {', '.join(now.names)}")
    if change == "add" and name in now.names:
        raise HoldfastError(f"{name!r} takes part already; if it has lost its folder, use 'replace'")
    before = known.get(name)
    if before is None and not address and file.server is None and file.relay is None:
        raise HoldfastError(f"{name}: others have to reach it; give {name}=host:port")
    changes: dict[str, Any] = {"address": address} if address else {}
    if samples is not None:
        changes["samples"] = samples
    given = {"name": name} if before is None else before.model_dump()
    return NodeConfig.of(given | changes)


def _foresee(file: FederationFile, now: Roster, order: Order) -> None:
    """Complains about an order that members could never carry out."""
    assert file.membership is not None
    after = led_roster(now, now.first, (), order)
    if after is None:
        raise HoldfastError("nobody would be left who has a model: start a new federation")
    check_change(now, after, file.membership)
    file.in_roster(after)  # complains if there is no such network


def only_key(federation: FederationFile, folder: Path) -> str:
    """The member whose key is in ``folder``; the first, if there are several."""
    found = [member.name for member in federation.members if (folder / f"{member.name}.key").exists()]
    if not found:
        raise HoldfastError(f"{folder} holds no key of a member; name the folder with --certs")
    return found[0]


def latest_roster(file: FederationFile, asker: str, credentials: Credentials | None) -> Roster | None:
    """The present roster, as far as the members that can be reached know; None: none can be reached."""
    answers = asyncio.run(_tell(file, asker, credentials, None, [])).values()
    return max((log.roster for log, _ in answers), key=lambda roster: roster.number, default=None)


async def _tell(
    file: FederationFile,
    asker: str,
    credentials: Credentials | None,
    order: Order | None,
    decisions: list[Decision],
) -> dict[str, tuple[MembershipLog, MembershipReply]]:
    """Sends an order, if there is one, to all members; all rosters that each can show, and its answer.

    ``decisions``: those that are known. What a member shows is checked: it may wish to hide its removal.
    """
    federation = MembershipLog(file, credentials, decisions=decisions).federation
    members = [federation.server] if federation.server is not None else federation.node
    links = MembershipLinks(asker, credentials, Events(asker, silence))

    async def tell(name: str) -> tuple[MembershipLog, MembershipReply] | None:
        log = MembershipLog(file, credentials, decisions=decisions)
        while True:  # a member shows a few rosters at a time
            request = MembershipRequest(
                federation=file.id, roster=log.roster.number, incarnation="", order=order
            )
            reply = await links.ask(federation, name, request, TIMEOUT)
            if reply is None:
                return None
            try:
                if not log.follow(reply.decisions):
                    return log, reply
            except HoldfastError as error:
                print(f"{name} is not believed: {error}", file=sys.stderr)
                return None

    answers = await asyncio.gather(*(tell(member.name) for member in members))
    await links.close()
    answered = zip(members, answers, strict=True)
    return {member.name: answer for member, answer in answered if answer is not None}
