"""What is published while somebody asks for it is handed out, not refused as gone, and lost only once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from federation_runs import describe

from holdfast_deploy.federation_file import make_federation
from holdfast_deploy.ops.events import Events, silence
from holdfast_deploy.storage.links import Dependencies
from holdfast_deploy.storage.messages import DamagedError, Header, MessageFile, specs
from holdfast_deploy.storage.outbox import Outbox
from holdfast_deploy.storage.store import Store
from holdfast_deploy.wire.client import Connection
from holdfast_deploy.wire.server import Server
from holdfast_deploy.wire.service import Service

GOSSIP = {"name": "gossip", "lr": 0.1}


def test_a_member_that_goes_on_while_it_is_asked_hands_out_what_it_had_published(tmp_path: Path) -> None:
    federation = make_federation(describe(GOSSIP, nodes=2, rounds=9), "test")
    numbers, events = torch.ones(1, 3), Events("b", silence)
    members = [member.name for member in federation.members]
    (tmp_path / "inbox-of-a").mkdir()

    async def ask() -> MessageFile:
        store = Store(tmp_path / "b", {"federation file": federation.id, "name": "b"}, events)
        outbox = Outbox(store, events, asyncio.get_running_loop())
        theirs = Dependencies("b", store.incarnation, members)
        message_round = 1

        def publish_and_go_on() -> int:
            """What the computing thread does at the worst instant: when its round is looked at."""
            nonlocal message_round
            header = Header(
                federation=federation.id,
                sender="b",
                round=message_round,
                exchange=0,
                tensors=specs(numbers),
                depends_on=theirs.known,
            )
            outbox.publish(header, numbers)
            message_round = min(message_round + 1, federation.rounds)
            return message_round

        service = Service(
            federation,
            "b",
            "start",
            store,
            outbox,
            events,
            lambda who, round: True,
            dict,
            publish_and_go_on,
            theirs,
            lambda error: None,
        )
        server = Server(lambda: service, None, events)
        await server.listener.open(federation.member("b").address)
        ours = Dependencies("a", "0" * 16, members)
        inbox = tmp_path / "inbox-of-a"
        link = Connection(federation, "a", "b", "start", inbox, None, Events("a", silence), {}, ours)
        try:
            return await link.fetch(2, 0, specs(numbers))
        finally:
            await link.close()
            await server.close()
            service.close()
            store.close()

    message = asyncio.run(ask())
    assert message.header.round == 2
    assert torch.equal(message.read(numbers, numbers.device), numbers)


class Meeting(Events):
    """The second who complains about anything is let in while the first is at it."""

    second: Callable[[], None] | None = None

    def complain(self, event: str, **fields: object) -> None:
        if (second := self.second) is not None:
            self.second = None
            other = threading.Thread(target=second)
            other.start()
            other.join(0.2)  # it waits, or is done
        super().complain(event, **fields)


def test_a_message_that_two_threads_find_damaged_is_lost_once_and_computed_again(tmp_path: Path) -> None:
    """One serves it, one reads it again; whoever is second must not remove what was published since."""
    numbers, events = torch.ones(1, 3), Meeting("b", silence)

    async def lose() -> None:
        store = Store(tmp_path / "b", {"federation file": "test", "name": "b"}, events)
        outbox = Outbox(store, events, asyncio.get_running_loop())
        header = Header(federation="test", sender="b", round=1, exchange=0, tensors=specs(numbers))
        message, error = outbox.publish(header, numbers), DamagedError("1-0 is damaged")
        found: list[bool] = []
        events.second = lambda: found.append(outbox.lose(message, error))
        found.append(outbox.lose(message, error))
        while len(found) < 2:
            await asyncio.sleep(0.01)
        assert sorted(found) == [False, True]
        again = outbox.publish(header, numbers)
        assert not outbox.lose(message, error)
        assert again.path.exists()
        assert outbox.messages[1, 0, ""] is again

    asyncio.run(asyncio.wait_for(lose(), 60))
    assert events.complaints["a published message is damaged"] == 1
