"""How a member's messages travel: published here, fetched there, or brought to a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from holdfast_deploy.federation import Federation
from holdfast_deploy.member.clients import Clients
from holdfast_deploy.member.connections import Connections
from holdfast_deploy.member.waiting import Waiting
from holdfast_deploy.ops.events import Events
from holdfast_deploy.storage.disk_full import retry_while_full
from holdfast_deploy.storage.links import (
    Dependencies,
    ImplausibleMessageError,
    LinkDigests,
    MessageNorms,
)
from holdfast_deploy.storage.messages import (
    DamagedError,
    DivergedError,
    ExchangeKey,
    Header,
    Incarnations,
    MessageFile,
    TensorSpec,
    specs,
    write_message,
)
from holdfast_deploy.storage.outbox import Outbox
from holdfast_deploy.storage.store import Store, remove

T = TypeVar("T")


class MemberExchange:
    """The ``Exchange`` of one session. All calls come from the computing thread.

    ``charge`` pays for private data: it is called before a message leaves. ``depends_on`` says which of the
    incarnations that a message depends on are named in it.
    """

    def __init__(
        self,
        federation: Federation,
        name: str,
        folder: Path,
        store: Store,
        outbox: Outbox,
        dependencies: Dependencies,
        waiting: Waiting,
        events: Events,
        charge: Callable[[], None],
        depends_on: Callable[[Incarnations], Incarnations],
    ) -> None:
        self.federation, self.name, self.folder = federation, name, folder
        self.store, self.outbox, self.dependencies = store, outbox, dependencies
        self.waiting, self.events, self.charge, self.depends_on = waiting, events, charge, depends_on
        self.connections: Connections  # set right after this was made, since they report what has passed
        self.link_digests = LinkDigests(name, self.finished, federation.first_round)
        self.norms = MessageNorms(name, federation.limits.outlier)
        self.clients: Clients | None = None  # of a server
        self.phase = "starting"
        self.message_round = 0  # as in ``Header.round``: the one under way
        self.done = federation.first_round  # rounds

    def header(self, key: ExchangeKey, wire: Any) -> Header:
        """Of a message, as it is sent."""
        return Header(
            federation=self.federation.id,
            sender=self.name,
            round=key[0],
            exchange=key[1],
            tensors=specs(wire),
            depends_on=self.depends_on(self.dependencies.known),
        )

    def publish(self, key: ExchangeKey, tree: Any, to: str = "") -> MessageFile:
        self.retry_while_full(self.charge)
        header = self.header(key, tree)
        message = self.finite(lambda: self.outbox.publish(header, tree, to))
        self.norms.sent(message)
        return message

    def published(self, key: ExchangeKey) -> MessageFile | None:
        return self.outbox.messages.get((*key, ""))

    def keep(self, name: str, key: ExchangeKey, tree: Any) -> MessageFile:
        return self.retry_while_full(lambda: write_message(self.folder / name, self.header(key, tree), tree))

    def receive(
        self, key: ExchangeKey, peers: Sequence[str], tensors: list[TensorSpec]
    ) -> dict[str, MessageFile]:
        """``fetch``, whatever the norms of the messages."""

        async def fetch(peer: str) -> MessageFile:
            return await self.connections.to(peer).fetch(*key, tensors)

        files = self.waiting.run_interruptible(lambda: gather([fetch(peer) for peer in peers]))
        return dict(zip(peers, files, strict=True))

    def fetch(
        self, key: ExchangeKey, peers: Sequence[str], tensors: list[TensorSpec]
    ) -> dict[str, MessageFile]:
        return self._plausible(self.receive(key, peers, tensors))

    def fetch_available(
        self, key: ExchangeKey, peers: Sequence[str], tensors: list[TensorSpec]
    ) -> dict[str, MessageFile]:
        names, limit = self.federation.names, self.federation.limits.exchange

        async def fetch(peer: str) -> MessageFile | None:
            """The end with the lower number decides, once and for all, whether the link took part."""
            link = self.connections.to(peer)
            if names.index(self.name) > names.index(peer):
                return await link.fetch(*key, tensors) if await link.agreed(*key) else None
            decision = self.store.decision(*key, peer)
            if decision is not None:
                return await link.fetch(*key, tensors) if decision else None
            received = None
            try:
                received = await asyncio.wait_for(link.fetch(*key, tensors), limit)
            except TimeoutError:
                self.events.log("inactive link", "warning", peer=peer, round=key[0])
            await self.decide(key, peer, received is not None)
            self.outbox.wake()
            return received

        files = self.waiting.run_interruptible(lambda: gather([fetch(peer) for peer in peers]))
        came = {peer: file for peer, file in zip(peers, files, strict=True) if file is not None}
        return self._plausible(came)

    def _plausible(self, files: dict[str, MessageFile]) -> dict[str, MessageFile]:
        """Refuses a message that is absurdly large; it is fetched again when the member is started again."""
        for peer, file in files.items():
            try:
                self.norms.received(peer, file)
            except ImplausibleMessageError:
                remove(file.path)
                raise
        return files

    def submit(self, message: MessageFile) -> None:
        assert self.federation.server is not None
        server = self.federation.server.name

        async def bring() -> None:
            await self.connections.to(server).submit(message)

        with self._losing(message):
            self.waiting.run_interruptible(bring)

    def collect(self, key: ExchangeKey) -> dict[str, MessageFile]:
        clients = self.clients
        assert clients is not None
        clients.expect(key)
        self.message_round = key[0]
        self.waiting.run_interruptible(clients.all_due)
        return self.retry_while_full(lambda: clients.files(key))

    def checked(self, files: dict[str, MessageFile]) -> dict[str, MessageFile]:
        assert self.clients is not None
        for name, file in files.items():
            file.verify()  # it may have been on disk for long
            file.norm = self.clients.norm(name, file)
            self.norms.received(name, file)
        return files

    def exchanged(self, peer: str, round: int, sent: Sequence[str], received: Sequence[str]) -> None:
        self.link_digests.add(peer, round, sent=sent, received=received)

    def intact(self, own: MessageFile) -> MessageFile:
        with self._losing(own):
            self.retry_while_full(own.verify)
        return own

    @contextmanager
    def _losing(self, own: MessageFile) -> Iterator[None]:
        """A message of ours that turns out to be damaged has to be computed again."""
        try:
            yield
        except DamagedError as error:
            self.outbox.lose(own, error)
            raise

    def retry_while_full(self, action: Callable[[], T]) -> T:
        return self.waiting.retry_while_full(action)

    async def decide(self, key: ExchangeKey, peer: str, active: bool) -> None:
        """Writes down, for good and as soon as there is room, whether the link to ``peer`` took part."""
        decide = partial(self.store.decide, *key, peer, active)
        await retry_while_full(decide, self.events, self.federation.limits.wait)

    def finite(self, write: Callable[[], T]) -> T:
        """The result of ``write``, as soon as there is room; why, if numbers are not finite."""
        try:
            return self.retry_while_full(write)
        except DivergedError as error:
            raise DivergedError(f"{error}; {self.norms.suspicion()}") from None

    def finished(self) -> int:
        """The last message round whose messages have all passed; the very last has final messages only."""
        last = self.federation.last_message_round
        return last if self.message_round == last else max(self.done, self.message_round - 1)


async def gather(coroutines: list[Coroutine[Any, Any, T]]) -> list[T]:
    """All at once; the first failure ends them all."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
