"""What node and server processes have in common: a directory, an outbox, a service, links to others."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

import torch
from torch import Tensor

import holdfast
from holdfast.engines.common.counters import Work
from holdfast_deploy.federation import Federation
from holdfast_deploy.member.connections import Connections
from holdfast_deploy.member.network import Hosting, NetworkThread
from holdfast_deploy.member.recovery import watch_folder
from holdfast_deploy.member.state import Costs, Handover, MemberState
from holdfast_deploy.member.status import status_of
from holdfast_deploy.member.waiting import Waiting
from holdfast_deploy.membership.roster import RosterChanged, roster_folder
from holdfast_deploy.membership.start import keep_model, starting_model, state_before
from holdfast_deploy.ops.audit import AuditLog
from holdfast_deploy.reading import Reading, Readings
from holdfast_deploy.storage.disk_full import DiskFull, retry_while_full
from holdfast_deploy.storage.links import Dependencies, LinkDigests, MessageNorms
from holdfast_deploy.storage.messages import DamagedError, DivergedError, Header, MessageFile, specs
from holdfast_deploy.storage.outbox import Outbox
from holdfast_deploy.storage.results import Record
from holdfast_deploy.storage.snapshots import keep
from holdfast_deploy.storage.store import Store, data_digest
from holdfast_deploy.wire.links import Connection
from holdfast_deploy.wire.listening import bind_address
from holdfast_deploy.wire.service import Service
from holdfast_deploy.wire.vigil import watch_certificates

if TYPE_CHECKING:
    from holdfast_deploy.member.privacy import Releases

T = TypeVar("T")

GRACE = 15.0  # seconds that a finished member stays for answers that got lost


class Member:
    """One process of a federation. Used as a context; what it does is up to ``Node`` and ``Server``."""

    def __init__(
        self,
        federation: Federation,
        name: str,
        folder: Path,
        x0: Tensor,
        *,
        data: str = "",
        reading: Reading | None = None,
        facts: dict[str, int] | None = None,
        **hosting: Unpack[Hosting],
    ) -> None:
        self.federation, self.name, self.folder, self.x0 = federation, name, folder, x0
        self.credentials, self.events = hosting["credentials"], hosting["events"]
        self.start = data_digest([x0.detach()])
        model = " ".join(filter(None, (federation.model_identity, self.start)))
        identity = {"federation file": federation.id, "name": name, "model": model, "data": data}
        self.keeper = hosting.get("keeper")
        self.membership = None if self.keeper is None else self.keeper.view
        place = roster_folder(folder, federation.roster_number)
        self.store = Store(place, identity, self.events, federation.first_round)
        self.trail = self.events.trail = AuditLog(folder)
        begun = {"federation": federation.id, "member": name, "incarnation": self.store.incarnation}
        begun |= {"roster": str(federation.roster_number)} if federation.roster_number else {}
        self.trail.note("begun", **begun, version=holdfast.__version__)
        shared = hosting.get("network")
        self._own_network, self.network = shared is None, shared or NetworkThread()
        self.waiting = Waiting(self.network.loop)
        self.outbox = Outbox(self.store, self.events, self.network.loop)
        self.dependencies = Dependencies(
            name, self.store.incarnation, [member.name for member in federation.members]
        )
        for message in self.outbox.messages.values():
            self.dependencies.add(message.header.depends_on)
        self.done = 0  # rounds
        self.message_round = 0  # as in ``Header.round``: the round under way
        self.link_digests = LinkDigests(name, self._finished, federation.first_round)
        self.readings = Readings(name, reading or Reading())
        self.norms = MessageNorms(name, federation.limits.outlier)
        self.service = Service(
            federation,
            name,
            self.start,
            self.store,
            self.outbox,
            self.events,
            self.may_fetch,
            self.status_for_others,
            lambda: self.message_round,
            self.dependencies,
            self.give_up,
            None if self.keeper is None else self.keeper.serve,
            link_digests=self.link_digests,
            readings=self.readings,
        )
        self.service.gate.credentials = self.credentials
        self.connections = Connections(
            federation,
            name,
            self.start,
            self.store.inbox,
            self.credentials,
            self.events,
            self.dependencies,
            self.link_digests,
            self.readings,
            self.service,
        )
        self.links, self.waits = self.connections.links, self.connections.waits
        tasks = [watch_folder(self)]
        if self.credentials is not None:
            coordinator = federation.coordinator
            tasks.append(watch_certificates(self.credentials, coordinator, self.events, self._drop_revoked))
            tasks += [self.connections.share_revocations()] if coordinator else []
        loop = self.network.loop
        self._watching = [asyncio.run_coroutine_threadsafe(task, loop) for task in tasks]
        for watching in self._watching:
            watching.add_done_callback(self._watched)
        self.costs = Costs()
        self.releases: Releases | None = None  # of private data, and what they cost
        self.phase = "starting"
        self.metrics: dict[str, float] = {}  # the latest
        self.record = Record(folder, federation, name, {"dimension": x0.numel(), **(facts or {})})
        self.began = time.monotonic()
        self.port: int | None = None
        self._server: Any = None
        self._clock_start = self.began

    # --- beginning and end ----------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def listen(self, address: str) -> None:
        """Lets others ask, on ``address`` (host:port)."""
        self._server, self.port = self.waiting.run(self.service.listen(address, self.credentials))

    def attend(self) -> None:
        """From here on, the keeper says when another roster begins; perhaps it has."""
        if self.keeper is not None:
            self.keeper.member = self
            if self.keeper.view.log.federation.id != self.federation.id:
                raise RosterChanged

    def awaits(self, name: str) -> bool:
        """Whether this member cannot finish its rounds without ``name``."""
        raise NotImplementedError

    def open(self, listen: str | None = None) -> None:
        """Lets others ask, as the file says: on the own address or on ``listen``, or through the relay."""
        federation = self.federation
        address = listen or bind_address(federation.member(self.name).address)
        if address:
            self.listen(address)
        if any(federation.relayed(other.name, self.name) for other in federation.members):

            async def reach() -> None:
                self.connections.relay()

            self.waiting.run(reach())

    def close(self) -> None:
        """Closes all connections. What is published stays on disk."""
        if self.keeper is not None:
            self.keeper.member = None
        self.waiting.run(self._close())
        self.store.close()
        self.trail.note("ended", round=self.done)
        self.trail.close()
        if self._own_network:
            self.network.close()

    def _watched(self, watching: Future[None]) -> None:
        """Nothing is left unwatched in silence: what went wrong there ends the member."""
        if not watching.cancelled() and isinstance(error := watching.exception(), Exception):
            self.give_up(error)

    def _drop_revoked(self) -> None:
        self.service.gate.drop_revoked()
        self.connections.drop_revoked()

    async def _close(self) -> None:
        for watching in self._watching:
            watching.cancel()
        if self._server is not None:
            failed = self.waiting.failure is not None
            await self._server.stop(1.0 if failed or self.phase == "finished" else 0)  # others hear why
        await self.connections.close()
        self.service.close()

    def stop(self) -> None:
        """From another thread: makes the member raise ``Stopped`` at its next exchange, or at once."""
        self.waiting.stop()

    def give_up(self, error: Exception) -> None:
        """From another thread: makes the member raise ``error`` at its next exchange, or at once."""
        self.waiting.give_up(error)

    # --- files ----------------------------------------------------------------------------------------

    def retry_while_full(self, action: Callable[[], T]) -> T:
        """What ``action`` gives; while there is no room for its files, it is tried again from the start."""
        shortage = DiskFull(self.events, self.federation.limits.wait)
        while True:
            try:
                return action()
            except OSError as error:
                self.run_on_loop(partial(shortage.pause, error))

    async def decide(self, message_round: int, exchange: int, peer: str, active: bool) -> None:
        """Writes down, for good and as soon as there is room, whether the link to ``peer`` took part."""
        decide = partial(self.store.decide, message_round, exchange, peer, active)
        await retry_while_full(decide, self.events, self.federation.limits.wait)

    def publish(self, header: Header, tree: Any, recipient: str = "") -> MessageFile:
        """Puts a message into the outbox, as soon as there is room."""
        message = self._finite(lambda: self.outbox.publish(header, tree, recipient))
        self.norms.sent(message)
        return message

    def _finite(self, write: Callable[[], T]) -> T:
        """What ``write`` gives, as soon as there is room; why, if numbers are not finite."""
        try:
            return self.retry_while_full(write)
        except DivergedError as error:
            raise DivergedError(f"{error}; {self.norms.suspicion()}") from None

    def _finished(self) -> int:
        """The last message round whose messages have all passed; in the very last, only final messages."""
        if self.message_round == self.federation.last_message_round:
            return self.message_round
        return max(self.done, self.message_round - 1)

    @property
    def seconds(self) -> float:
        """Since the very start, without the time that the member was down."""
        return time.monotonic() - self._clock_start

    # --- talking to others ----------------------------------------------------------------------------

    def run_on_loop(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs a coroutine on the event loop and waits for it; that time counts as waiting."""
        before = time.monotonic()
        try:
            return self.waiting.run_on_loop(begin)
        finally:
            self.costs.waiting += time.monotonic() - before

    def take_up(self, saved: MemberState | None) -> None:
        """Goes on from what is saved; None: from the beginning."""
        self.link_digests.slack = math.inf
        self.done, self.costs = self.federation.first_round, Costs()
        before = saved or self.before_this_roster()
        if before is not None:
            self.costs = before.costs.copy()
            if not self.trail.holds(before.audit):
                reason = "lines are missing, or others than when the state was saved: put back the file"
                self.events.complain("the audit log is damaged", reason=reason)
        self.link_digests.restore({} if saved is None else saved.links)
        self.norms.restore(0.0 if saved is None else saved.largest_norm)
        if saved is not None:
            self.done = saved.round
            self.dependencies.add(saved.depends_on)
            if self.releases is not None:
                self.releases.require(saved.releases or 0)
        self.link_digests.slack = self.store.again
        self._clock_start = time.monotonic() - self.costs.seconds
        try:
            self.record.keep(upto=self.done if saved is not None else self.federation.first_round - 1)
        except DamagedError as error:  # only figures are lost
            self.events.complain("a file is damaged", reason=str(error))

    def before_this_roster(self) -> MemberState | None:
        """The last state of the roster before, without tensors."""
        file = state_before(self.membership, self.federation)
        return None if file is None else MemberState.of_notes(file, self.x0)

    def starting_model(self) -> Tensor:
        """The model [d] that the method begins with; where members have changed, from a member's model."""
        if self.membership is None:
            return self.x0
        self.message_round = self.federation.first_round
        return starting_model(self.membership, self.federation, self, self.x0)

    def keep_model(self, done: int, row: Tensor) -> None:
        """Keeps the model ``row`` [d] after ``done`` rounds, where members may change."""
        if self.membership is not None:
            keep_model(self.membership, self.federation, self, done, row)

    def fetch(self, peer: str, exchange: int, like: Any, device: torch.device) -> Any:
        """A message of ``peer`` in the message round under way; ``like``: a tree on the device "meta"."""

        async def fetch() -> Any:
            file = await (await self.link(peer)).fetch(self.message_round, exchange, specs(like))
            return file.read(like, device)

        return self.run_on_loop(fetch)

    def save(self, done: int, tree: Any, work: Work | None = None, **figures: float) -> None:
        """Writes down the state after ``done`` rounds, as soon as there is room."""
        before = time.monotonic()
        self.costs.seconds = self.seconds
        costs = self.costs.copy()
        costs.wire_sent, costs.wire_received = self.wire_bytes
        state = MemberState(
            round=done,
            method=Handover(tree),
            work=work,
            metrics=figures,
            costs=costs,
            links=self.link_digests.state(),
            largest_norm=self.norms.largest,
            depends_on=self.dependencies.known,
            audit=self.retry_while_full(self.trail.sync),
            releases=None if self.releases is None else self.releases.count,
        )
        self._finite(lambda: state.write(self.store))
        limits = self.federation.limits
        if self.keeper is None:  # else models are kept, to which all go back together
            self.retry_while_full(lambda: keep(self.folder, done, limits.snapshot_every, limits.snapshots))
        self.done = done
        self.costs.saving += time.monotonic() - before

    async def link(self, peer: str) -> Connection:
        """The connection to ``peer``."""
        return self.connections.to(peer)

    def header(self, exchange: int, wire: Any) -> Header:
        """Of a message in the round under way, as it is sent."""
        return Header(
            federation=self.federation.id,
            sender=self.name,
            round=self.message_round,
            exchange=exchange,
            tensors=specs(wire),
            depends_on=self.dependencies.known,
        )

    def may_fetch(self, who: str, message_round: int) -> bool:
        """Whether ``who`` may have this member's messages of a round."""
        raise NotImplementedError

    # --- where it stands ------------------------------------------------------------------------------

    @property
    def payload_bytes(self) -> int:
        """Bytes of all messages sent so far, each counted once, as the simulator counts them."""
        return self.costs.traffic.bits // 8

    @property
    def wire_bytes(self) -> tuple[int, int]:
        """Bytes of messages (sent, received) so far, repetitions and compression included."""
        links = list(self.links.values())
        sent = self.costs.wire_sent + self.service.bytes_served + sum(link.bytes_sent for link in links)
        return sent, self.costs.wire_received + sum(link.bytes_received for link in links)

    def status(self) -> dict[str, Any]:
        """For the member's own people; only metrics that the federation file lists are in it."""
        return status_of(self)

    def status_for_others(self) -> dict[str, Any]:
        """The status as other members hear it."""
        return self.status()
