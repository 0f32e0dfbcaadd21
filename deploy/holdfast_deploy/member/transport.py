"""How a node's messages travel: published here, fetched there, or brought to a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from holdfast.contract import Channel
from holdfast.core.tree import leaves, tree_map
from holdfast_deploy.storage.links import ImplausibleMessageError
from holdfast_deploy.storage.messages import DamagedError, MessageFile, specs
from holdfast_deploy.storage.store import remove
from holdfast_deploy.wire.links import Connection

if TYPE_CHECKING:
    from holdfast_deploy.member.node import Node

T = TypeVar("T")


class Transport:
    """How the messages of one node travel in the round under way; every call waits for all that is due."""

    def __init__(self, node: Node) -> None:
        self.node = node

    def broadcast(
        self, exchange: int, message: Any, neighbours: list[int]
    ) -> tuple[MessageFile, dict[int, MessageFile]]:
        """Sends ``message`` to all ``neighbours``; as it was sent, and theirs."""
        published = self.node.publish(self.node.header(exchange, message), message)
        received = self._gather(exchange, dict.fromkeys(neighbours, published))
        return self._intact(published), received

    def scatter(self, exchange: int, messages: Mapping[int, Any]) -> dict[int, MessageFile]:
        """Sends every neighbour something else."""
        names = self.node.federation.names
        published = {
            j: self.node.publish(self.node.header(exchange, row), row, names[j])
            for j, row in messages.items()
        }
        return self._gather(exchange, published)

    def _gather(self, exchange: int, published: Mapping[int, MessageFile]) -> dict[int, MessageFile]:
        node, message_round = self.node, self.node.message_round

        async def fetch(j: int) -> MessageFile:
            link = await node.link(node.federation.names[j])
            return await link.fetch(message_round, exchange, published[j].header.tensors)

        received = dict(
            zip(published, node.run_on_loop(lambda: gather([fetch(j) for j in published])), strict=True)
        )
        self._passed(published, received)
        return received

    def _passed(self, published: Mapping[int, MessageFile], received: Mapping[int, MessageFile]) -> None:
        """Notes what went over the links to those from whom something came."""
        for j, file in received.items():
            self._plausible(self.node.federation.names[j], file)
            sent, came = [published[j].header.content], [file.header.content]
            name = self.node.federation.names[j]
            self.node.link_digests.add(name, self.node.message_round, sent=sent, received=came)

    def _plausible(self, sender: str, file: MessageFile) -> None:
        """Refuses a message that is absurdly large; it is fetched again when the node is started again."""
        try:
            self.node.norms.received(sender, file)
        except ImplausibleMessageError:
            remove(file.path)
            raise

    def passed_server(self, sent: Iterable[MessageFile] = (), received: Iterable[MessageFile] = ()) -> None:
        """Notes what went to the server, and came from it."""
        assert self.node.federation.server is not None
        out, back = ([file.header.content for file in files] for files in (sent, received))
        server = self.node.federation.server.name
        self.node.link_digests.add(server, self.node.message_round, sent=out, received=back)

    def sporadic(
        self, exchange: int, message: Any, neighbours: list[int]
    ) -> tuple[MessageFile, dict[int, MessageFile]]:
        """``broadcast``, but without those neighbours with whom it did not work out, at either end."""
        node, message_round = self.node, self.node.message_round
        published = node.publish(node.header(exchange, message), message)
        tensors = published.header.tensors

        async def fetch(j: int) -> MessageFile | None:
            """The end with the lower number decides, once and for all, whether the link took part."""
            name = node.federation.names[j]
            link = await node.link(name)
            if node.node > j:
                active = await link.agreed(message_round, exchange)
                return await link.fetch(message_round, exchange, tensors) if active else None
            decision = node.store.decision(message_round, exchange, name)
            if decision is not None:
                return await link.fetch(message_round, exchange, tensors) if decision else None
            received = None
            try:
                limit = node.federation.limits.exchange
                received = await asyncio.wait_for(link.fetch(message_round, exchange, tensors), limit)
            except TimeoutError:
                node.events.log("inactive link", "warning", peer=name, round=message_round)
            active = received is not None
            await node.decide(message_round, exchange, name, active)
            node.outbox.wake()
            return received

        files = node.run_on_loop(lambda: gather([fetch(j) for j in neighbours]))
        received = {j: file for j, file in zip(neighbours, files, strict=True) if file is not None}
        self._passed(dict.fromkeys(neighbours, published), received)
        return self._intact(published), received

    def through_server(self, exchange: int, message: Any, answer: Any) -> MessageFile:
        """Sends ``message`` to the server; what it sends back, a tree like ``answer``."""
        published = self.node.publish(self.node.header(exchange, message), message)
        self.to_server(published)
        file = self.from_server(exchange, answer)
        self.passed_server(sent=[published], received=[file])
        return file

    def from_server(self, exchange: int, wire: Any) -> MessageFile:
        """The server's message of the round under way, which travels as a tree like ``wire``."""
        message_round, tensors = self.node.message_round, specs(wire)

        async def fetch() -> MessageFile:
            return await (await self.server()).fetch(message_round, exchange, tensors)

        file = self.node.run_on_loop(fetch)
        assert self.node.federation.server is not None
        self._plausible(self.node.federation.server.name, file)
        return file

    def to_server(self, message: MessageFile) -> None:
        """Brings a message to the server. It is kept here until the next state is saved, lest it get lost."""

        async def submit() -> None:
            await (await self.server()).submit(message)

        with self._losing(message):
            self.node.run_on_loop(submit)

    def _intact(self, own: MessageFile) -> MessageFile:
        """``own``, which is mixed with the others' messages and may have been on disk for long."""
        with self._losing(own):
            self.node.retry_while_full(own.verify)
        return own

    @contextmanager
    def _losing(self, own: MessageFile) -> Iterator[None]:
        """A message of ours that turns out to be damaged has to be computed again."""
        try:
            yield
        except DamagedError as error:
            self.node.outbox.lose(own, error)
            raise

    def to_server_again(self) -> None:
        """What was computed before the last state was saved: the server may not have it."""
        for message in list(self.node.outbox.messages.values()):
            if message.header.round <= self.node.done:
                self.to_server(message)

    async def server(self) -> Connection:
        """The way to the server that all messages go through."""
        assert self.node.federation.server is not None
        return await self.node.link(self.node.federation.server.name)

    def retry_while_full(self, read: Callable[[], T]) -> T:
        """What ``read`` gives; tried again from the start where files run out."""
        return self.node.retry_while_full(read)


def read(file: MessageFile, channel: Channel, wire: Any, like: Any, device: torch.device) -> Any:
    """The message, a tree like ``like``, which travels as one like ``wire``; both may be on "meta"."""
    arrived = file.read(wire, device)
    if channel.transparent:
        return arrived
    return channel.decode(arrived, tree_map(lambda t: torch.empty_like(t, device=device), like))


def add_to(total: Any, file: MessageFile, channel: Channel, wire: Any, weight: float = 1.0) -> None:
    """Adds ``weight`` times the message to ``total``, in place; as it is, it need not be held as a whole."""
    if channel.transparent:
        file.add_to(total, weight)
    else:
        device = next(leaves(total)).device
        tree_map(lambda t, part: t.add_(part, alpha=weight), total, read(file, channel, wire, total, device))


async def gather(coroutines: list[Coroutine[Any, Any, T]]) -> list[T]:
    """All at once; the first failure ends them all."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
