"""Whether a member whose machine lost power knows all that others have from it, by its own reading."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from crash_points import Remains, Survives, remains, write_remains
from disk_events import Event, Left

from holdfast_deploy.cli.hosting import member_credentials
from holdfast_deploy.federation_file import read_federation
from holdfast_deploy.member.network import NetworkThread
from holdfast_deploy.member.node import Node, open_node
from holdfast_deploy.member.server import Server, open_server
from holdfast_deploy.member.session import Session
from holdfast_deploy.ops.audit import Head, check_heads, read_audit
from holdfast_deploy.ops.events import Events
from holdfast_deploy.site import initial_model, open_site, own_data
from holdfast_deploy.storage.messages import Header, MessageFile
from holdfast_deploy.storage.store import message_name
from holdfast_deploy.wire.protocol import AUDIT_KEY, LINKS, MESSAGES, RELEASED, SYNC, Answer, Ask

HARMLESS = {"certificate expires soon", "a round is computed again"}


class Seen:
    """What others have seen of a member."""

    def __init__(self, left: Iterable[Left]) -> None:
        self.heads: dict[Head, None] = {}  # of its audit log
        self.offered: dict[tuple[int, int], Header] = {}  # messages that could be fetched
        self.sent: dict[tuple[int, int], Header] = {}  # messages, by round and exchange
        self.taken: dict[tuple[int, int, str], Header] = {}  # those of clients that heard that it has them
        self.incarnations: set[str] = set()
        self.saved = 0  # rounds that it said it had finished
        for one in left:
            self._add(one)

    def _add(self, left: Left) -> None:
        if (head := Head.parse(left.beside.get(AUDIT_KEY, ""))) is not None:
            self.heads[head] = None
        message = re.fullmatch(rf"(GET|PUT) {MESSAGES}/(\d+)/(\d+)", left.method)
        if left.method == SYNC and left.answer:
            answer = Answer.model_validate_json(left.frame)
            if answer.header is not None:
                self.offered[answer.header.round, answer.header.exchange] = answer.header
        if message and message[1] == "GET" and left.answer:
            self._add_sent(self.offered[int(message[2]), int(message[3])])
        if message and message[1] == "PUT" and not left.answer:
            self._add_sent(Header.model_validate_json(left.frame))
        if message and message[1] == "PUT" and left.answer:
            header = Header.model_validate_json(left.question)
            if Answer.model_validate_json(left.frame).active is not False:
                self.taken[header.round, header.exchange, header.sender] = header
        if left.method in (SYNC, LINKS, RELEASED) and not left.answer:
            ask = Ask.model_validate_json(left.frame)
            self.saved = max(self.saved, ask.round - 1)

    def _add_sent(self, header: Header) -> None:
        self.sent[header.round, header.exchange] = header
        self.incarnations.add(header.depends_on[header.sender])


class Survivor:
    """The member called ``name`` of the federation in ``path``, started again from what a power cut left."""

    def __init__(self, path: Path, name: str, own: str, target: Path) -> None:
        self.path, self.name, self.own, self.target = path, name, own, target
        self.federation, self.network = read_federation(path, None), NetworkThread()
        self.credentials = member_credentials(self.federation, name, path.parent / "certs", None)
        if name in self.federation.names:
            data = own_data(path.parent / f"{name}.npz", name)
            self.site = open_site(self.federation, name, data, "cpu")
        self.model = initial_model(self.federation)

    def close(self) -> None:
        self.network.close()

    def start(self, folder: Path, log: list[dict[str, Any]]) -> Session:
        hosting: dict[str, Any] = {
            "credentials": self.credentials,
            "events": Events(self.name, log.append),
            "network": self.network,
        }
        if self.name not in self.federation.names:
            return open_server(self.federation, folder, self.model, **hosting)
        node = open_node(self.federation, self.name, folder, self.site, **hosting)
        node.restore()
        return node

    def check(self, left: Remains, seen: Seen) -> None:
        """It starts in what is left, and knows what others have ``seen``."""
        shutil.rmtree(self.target, ignore_errors=True)
        write_remains(left, self.target)
        log: list[dict[str, Any]] = []
        with self.start(self.target / self.own, log) as member:
            self._check(member, seen)
        bad = [entry for entry in log if entry["level"] != "info" and entry["event"] not in HARMLESS]
        assert not bad, bad

    def _check(self, member: Session, seen: Seen) -> None:
        entries = list(read_audit(member.folder))
        check_heads(member.folder, entries, [("others", head) for head in seen.heads])
        told = {(e["event"], e.get("round"), e.get("exchange"), e.get("digest")) for e in entries}
        assert member.done >= min(seen.saved, self.federation.rounds), (member.done, seen.saved)
        assert seen.incarnations <= {member.store.incarnation}
        for (round, exchange), header in seen.sent.items():
            assert ("sent", round, exchange, header.checksum) in told, f"no line about round {round}"
            kept = [m for k, m in member.outbox.messages.items() if k[:2] == (round, exchange)]
            there = header in [message.header for message in kept]
            assert there or member.done >= round + (self.federation.round is None), f"round {round} is lost"
            if self.federation.secure_aggregation is not None and member.done < round:
                self._check_answers(member, round, exchange)
        if member.program.releases is not None:
            assert member.program.releases.count >= len(
                seen.sent.keys() & set(_first_messages(self.federation.rounds))
            )
        for (round, exchange, name), header in seen.taken.items():
            assert ("received", round, exchange, header.checksum) in told, (
                f"no line about round {round} of {name}"
            )
            assert isinstance(member.program, Server)
            there = member.program.clients.arrivals.get((round, exchange), {}).get(name)
            past = member.done >= round or member.program.clients.due.key > (round, exchange)
            assert past or (there is not None and there.content == header.content), (
                f"{name}'s message is lost"
            )

    def _check_answers(self, member: Session, round: int, exchange: int) -> None:
        """With secure aggregation, what a client says rests on the server's answers before."""
        if isinstance(member.program, Node) and self.federation.server is not None:
            for answer in range(1, exchange + 1):
                MessageFile(
                    member.store.inbox / message_name(round, answer, self.federation.server.name)
                ).verify()


def _first_messages(rounds: int) -> list[tuple[int, int]]:
    return [(round, 0) for round in range(1, rounds + 1)]


def failures(
    survivor: Survivor, events: Sequence[Event], survives: Callable[[int], Survives]
) -> tuple[int, list[str]]:
    """After how many power cuts, one after each event, that made a difference; and what is wrong then."""
    tried, found, before = 0, [], None
    for count in range(1, len(events) + 1):
        left = remains(events[:count], survives(count))
        seen = [event.what for event in events[:count] if isinstance(event.what, Left)]
        if before == (left, len(seen)):
            continue
        before, tried = (left, len(seen)), tried + 1
        try:
            survivor.check(left, Seen(seen))
        except Exception as error:
            last = str(events[count - 1].what)[:120]
            found.append(f"after {count} events, {last}: {type(error).__name__}: {error}")
    return tried, found
