"""A federation that is sent bad bytes, and what becomes of them and of it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_bytes import Mangler
from federation_runs import DeployedRun, deploy

from holdfast.core.errors import HoldfastError
from holdfast_deploy.federation_file import make_federation
from holdfast_deploy.member.network import NetworkThread
from holdfast_deploy.member.session import Session
from holdfast_deploy.storage.messages import Header, write_message
from holdfast_deploy.wire.client import Connection
from holdfast_deploy.wire.dial import Unreachable
from holdfast_deploy.wire.protocol import Kind
from holdfast_deploy.wire.service import Ask

GECL = {"name": "local-gecl", "lr": 0.1, "local_steps": 2}
FEDAVG = {"name": "fedavg", "lr": 0.1, "local_steps": 2}
SERVER = {"network": {"topology": "server"}}
MOST_LINES = 30  # kinds of complaints about one peer

REFUSED = {Kind.MALFORMED, Kind.DISAGREE}


def in_bulk(few: int, many: int) -> pytest.MarkDecorator:
    """A few every time, many where time does not matter."""
    return pytest.mark.parametrize("count", [few, pytest.param(many, marks=pytest.mark.slow)])


class Fuzzed:
    """A federation of two nodes that is not under way yet, and what comes of it."""

    def __init__(self, raw: dict[str, Any], folder: Path, absent: str = "") -> None:
        self.calm = deploy(raw, folder / "calm")
        self.run = DeployedRun(make_federation(raw, "test"), folder / "fuzzed")
        self.network = NetworkThread()
        names = [member.name for member in self.run.federation.members if member.name not in absent]
        self.run.members = {name: self.run.member(name, self.network) for name in names}

    def __getitem__(self, name: str) -> Session:
        return self.run.members[name]

    def message(self, sender: str) -> tuple[Header, list[bytes]]:
        """The header and the frames of a good message of the first round."""
        numbers = torch.randn(1, self["a"].x0.numel(), generator=torch.Generator().manual_seed(0))
        header = self["a"].exchange.header((1, 0), numbers).model_copy(update={"sender": sender, "round": 1})
        written = write_message(self.run.folder / "good", header, numbers)
        return written.header, list(written.chunks())

    def finish(self, running: dict[str, threading.Thread] | None = None) -> None:
        """The federation runs, and gets the model of one that nobody disturbed; the log is short."""
        complaints = [entry for entry in self.run.log if entry["level"] != "info"]
        assert len(complaints) <= MOST_LINES, [entry["reason"][:60] for entry in complaints]
        assert all(len(entry["reason"]) <= 400 for entry in complaints)
        for member in self.run.members.values():
            assert not list(member.store.inbox.iterdir())
        threads = running or {}
        for name in self.run.members.keys() - threads.keys():
            threads[name] = threading.Thread(target=self.run._run, args=[name])
            threads[name].start()
        for thread in threads.values():
            thread.join(120)
        for member in self.run.members.values():
            member.close()
        self.network.close()
        assert not self.run.errors
        for name, model in self.calm.models.items():
            assert torch.equal(self.run.models[name], model)


async def refuses_answer(link: Connection, honest: Header, frames: list[bytes]) -> bool:
    """Whether an answer is refused; one that is accepted must be the right one after all."""
    try:
        received = await link._fetch(1, 0, honest.tensors)
    except (HoldfastError, Unreachable):
        return True
    if received is None:  # "not yet" is an answer, too
        return True
    assert received.header == honest
    assert b"".join(received.chunks()) == b"".join(frames)
    received.path.unlink()
    return False


def is_good_question(text: bytes, honest: dict[str, Any], rounds: int) -> bool:
    """Whether a mangled question is still one that a neighbour may ask."""
    try:
        ask = Ask.model_validate_json(text)
    except ValueError:
        return False
    same = (ask.federation, ask.start) == (honest["federation"], honest["start"])
    return same and ask.round <= rounds + 1


def bad_questions(member: Session, mangler: Mangler, count: int) -> Iterator[bytes]:
    honest = {"federation": member.federation.id, "start": member.start, "round": 1, "exchange": 0}
    for _ in range(count):
        _, (text,) = mangler.mangle(honest, [])
        if not is_good_question(text, honest, member.federation.rounds):
            yield text


def settle_submission(hub: Session, text: bytes, honest: Header, frames: list[bytes]) -> None:
    """A submission was not refused: it is good after all, or of a round that is over, and not kept."""
    clients = hub.exchange.clients
    assert clients is not None
    if clients.arrivals:
        kept = clients.file((1, 0), "a")
        assert kept.header == honest
        assert list(kept.chunks()) == frames
        clients.drop((1, 0))
    else:
        assert json.loads(text)["round"] < hub.exchange.message_round
