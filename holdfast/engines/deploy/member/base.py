"""What node and server processes have in common: a directory, an outbox, a service, links to others."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack

from torch import Tensor

import holdfast
from holdfast.core.errors import HoldfastError
from holdfast.engines.deploy.federation import Federation
from holdfast.engines.deploy.member.joining import epoch_notes
from holdfast.engines.deploy.member.keeper import EpochChanged
from holdfast.engines.deploy.member.network import Costs, Hosting, NetworkThread
from holdfast.engines.deploy.ops.audit import AuditLog
from holdfast.engines.deploy.relay.switchboard import Switchboard
from holdfast.engines.deploy.storage.incarnations import Dependencies
from holdfast.engines.deploy.storage.messages import (
    BeyondRepairError,
    DamagedError,
    DivergedError,
    Header,
    MessageFile,
    specs,
)
from holdfast.engines.deploy.storage.norms import Norms
from holdfast.engines.deploy.storage.outbox import Outbox
from holdfast.engines.deploy.storage.results import Record
from holdfast.engines.deploy.storage.scarcity import Shortage, insist
from holdfast.engines.deploy.storage.snapshots import keep
from holdfast.engines.deploy.storage.store import Store, data_digest
from holdfast.engines.deploy.storage.tally import Tally
from holdfast.engines.deploy.wire.credentials import Credentials
from holdfast.engines.deploy.wire.dialling import Wait
from holdfast.engines.deploy.wire.links import Connection
from holdfast.engines.deploy.wire.listening import bind_address
from holdfast.engines.deploy.wire.service import Service

T = TypeVar("T")

WATCH = 1.0  # seconds between two looks at the certificates' files
WARN_DAYS, DAY = 30.0, 86400.0  # before a certificate expires; seconds between warnings
GRACE = 15.0  # seconds that a finished member stays for answers that got lost


class Stopped(Exception):  # noqa: N818 - not an error
    """Somebody asked the member to stop; everything is saved."""


class Member:
    """One process of a federation. Used as a context; what it does is up to ``Node`` and ``Hub``."""

    def __init__(
        self,
        federation: Federation,
        name: str,
        folder: Path,
        x0: Tensor,
        *,
        data: str = "",
        facts: dict[str, int] | None = None,
        **hosting: Unpack[Hosting],
    ) -> None:
        self.federation, self.name, self.folder, self.x0 = federation, name, folder, x0
        self.credentials, self.events = hosting["credentials"], hosting["events"]
        self.start = data_digest([x0.detach()])
        model = " ".join(filter(None, (federation.model_identity, self.start)))
        identity = {"federation file": federation.id, "name": name, "model": model, "data": data}
        self.keeper = hosting.get("keeper")
        place = folder if self.keeper is None else self.keeper.voter.place()
        self.store = Store(place, identity, self.events, federation.first_round)
        self.trail = self.events.trail = AuditLog(folder)
        begun = {"federation": federation.id, "member": name, "incarnation": self.store.incarnation}
        begun |= {"epoch": str(federation.epoch)} if federation.epoch else {}
        self.trail.note("begun", **begun, version=holdfast.__version__)
        shared = hosting.get("network")
        self._own_network, self.network = shared is None, shared or NetworkThread()
        self.outbox = Outbox(self.store, self.events, self.network.loop)
        self.dependencies = Dependencies(
            name, self.store.incarnation, [member.name for member in federation.members]
        )
        for message in self.outbox.messages.values():
            self.dependencies.add(message.header.depends_on)
        self.done = 0  # rounds
        self.stage = 0  # as in ``Header.round``: the round under way
        self.tally = Tally(name, self._finished, federation.first_round)
        self.norms = Norms(name, federation.limits.outlier)
        self.service = Service(
            federation,
            name,
            self.start,
            self.store,
            self.outbox,
            self.events,
            self.may_fetch,
            self.status,
            lambda: self.stage,
            self.dependencies,
            self.give_up,
            None if self.keeper is None else self.keeper.serve,
            tally=self.tally,
        )
        self._watching = None
        if self.credentials is not None:
            self._watching = asyncio.run_coroutine_threadsafe(
                self._watch(self.credentials), self.network.loop
            )
        self.waits: dict[str, Wait] = {}
        self.links: dict[str, Connection] = {}
        self.costs = Costs()
        self.phase = "starting"
        self.metrics: dict[str, float] = {}  # the latest
        self.record = Record(folder, federation, name, {"dimension": x0.numel(), **(facts or {})})
        self.began = time.monotonic()
        self.port: int | None = None
        self._server: Any = None
        self._board: Switchboard | None = None
        self._waiting_on: Future[Any] | None = None
        self._stopping = False
        self._clock_start = self.began
        self._failure: Exception | None = None

    # --- beginning and end ----------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def listen(self, address: str) -> None:
        """Lets others ask, on ``address`` (host:port)."""
        self._server, self.port = self._run(self.service.listen(address, self.credentials))

    def attend(self) -> None:
        """From here on, the keeper says when another epoch begins; perhaps it has."""
        if self.keeper is not None:
            self.keeper.member = self
            if self.keeper.voter.federation.id != self.federation.id:
                raise EpochChanged

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
                self._reach_relay()

            self._run(reach())

    def close(self) -> None:
        """Closes all connections. What is published stays on disk."""
        if self.keeper is not None:
            self.keeper.member = None
        self._run(self._close())
        self.store.close()
        self.trail.note("ended", round=self.done)
        self.trail.close()
        if self._own_network:
            self.network.close()

    async def _watch(self, credentials: Credentials) -> None:
        """Looks for new certificates and revocations, and at the calendar."""
        warned = -math.inf
        while True:
            try:
                if credentials.refresh(self.federation.coordinator):
                    self.events.log("certificates reloaded", revoked=len(credentials.revocations.revoked))
                    warned = -math.inf
                    self.service.gate.drop_revoked()
                    for link in list(self.links.values()):
                        link.drop_if_revoked()
            except (HoldfastError, OSError) as error:
                self.events.log("certificates not reloaded", "warning", reason=str(error))
            if credentials.days_left < WARN_DAYS and time.monotonic() - warned > DAY:
                warned, left = time.monotonic(), credentials.days_left
                advice = "renew it with 'holdfast federation csr' and 'sign'"
                self.events.log("certificate expires soon", "warning", days=round(left, 1), reason=advice)
            await asyncio.sleep(WATCH)

    async def _close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        if self._server is not None:
            last_words = self.phase == "finished" or self._failure is not None  # others are to hear them
            await self._server.stop(1.0 if last_words else 0)
        for link in self.links.values():
            await link.close()
        if self._board is not None:
            await self._board.close()
        self.service.close()

    def stop(self) -> None:
        """From another thread: makes the member raise ``Stopped`` at its next exchange, or at once."""
        self._stopping = True
        self._interrupt()

    def give_up(self, error: Exception) -> None:
        """From another thread: makes the member raise ``error`` at its next exchange, or at once."""
        self._failure = self._failure or error
        self._interrupt()

    def _interrupt(self) -> None:
        waiting_on = self._waiting_on
        if waiting_on is not None:
            waiting_on.cancel()

    # --- files ----------------------------------------------------------------------------------------

    def insist(self, action: Callable[[], T]) -> T:
        """What ``action`` gives; while there is no room for its files, it is tried again from the start."""
        shortage = Shortage(self.events, self.federation.limits.wait)
        while True:
            try:
                return action()
            except OSError as error:
                self.ask(partial(shortage.pause, error))

    async def decide(self, stage: int, exchange: int, peer: str, active: bool) -> None:
        """Writes down, for good and as soon as there is room, whether the link to ``peer`` took part."""
        decide = partial(self.store.decide, stage, exchange, peer, active)
        await insist(decide, self.events, self.federation.limits.wait)

    def publish(self, header: Header, tree: Any, recipient: str = "") -> MessageFile:
        """Puts a message into the outbox, as soon as there is room."""
        message = self._finite(lambda: self.outbox.publish(header, tree, recipient))
        self.norms.sent(message)
        return message

    def _finite(self, write: Callable[[], T]) -> T:
        """What ``write`` gives, as soon as there is room; why, if numbers are not finite."""
        try:
            return self.insist(write)
        except DivergedError as error:
            raise DivergedError(f"{error}; {self.norms.suspicion()}") from None

    def _finished(self) -> int:
        """The last stage whose messages have all passed; nothing but farewells comes after the last ones."""
        return self.stage if self.stage == self.federation.last_stage else max(self.done, self.stage - 1)

    @property
    def seconds(self) -> float:
        """Since the very start, without the time that the member was down."""
        return time.monotonic() - self._clock_start

    # --- talking to others ----------------------------------------------------------------------------

    def ask(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs a coroutine on the event loop and waits for it; that time counts as waiting."""
        before = time.monotonic()
        future: Future[T] = asyncio.run_coroutine_threadsafe(begin(), self.network.loop)
        self._waiting_on = future
        try:
            self._go_on()  # looked at last, so that no call of ``stop`` is missed
            return future.result()
        except CancelledError:
            self._go_on()
            raise Stopped from None
        finally:
            self._waiting_on = None
            future.cancel()
            self.costs.waiting += time.monotonic() - before

    def _go_on(self) -> None:
        """Unless somebody asked the member to stop, or it cannot go on."""
        if self._stopping:
            raise Stopped
        if self._failure is not None:
            raise self._failure

    def take_up(self, saved: MessageFile | None) -> None:
        """Goes on from what is saved; None: from the beginning."""
        self.done, self.costs = self.federation.first_round, Costs()
        notes = epoch_notes(self) if saved is None else saved.header.notes
        if notes is not None:
            self.costs = Costs.from_notes(notes["costs"], self.x0.element_size())
        self.tally.restore({} if saved is None else saved.header.notes["tally"])
        self.norms.restore({} if saved is None else saved.header.notes["norms"])
        if saved is not None:
            self.done = saved.header.round
            self.dependencies.add(saved.header.depends_on)
        self._clock_start = time.monotonic() - self.costs.seconds
        self.record.keep(upto=self.done if saved is not None else -1)

    def save(self, done: int, state: Any, **notes: Any) -> None:
        """Writes down the state after ``done`` rounds, as soon as there is room."""
        before = time.monotonic()
        self.costs.seconds = self.seconds
        notes |= {"costs": self.cost_notes(), "tally": self.tally.notes(), "norms": self.norms.notes()}
        known = self.dependencies.known
        notes["audit"] = self.insist(self.trail.sync)
        self._finite(lambda: self.store.save_state(done, state, notes, known))
        limits = self.federation.limits
        self.insist(lambda: keep(self.folder, done, limits.snapshot_every, limits.snapshots))
        self.done = done
        self.costs.saving += time.monotonic() - before

    def recovering(self, run: Callable[[], T], restore: Callable[[], None]) -> T:
        """``run``; if a file turns out to be damaged, once more from what is saved, as after a crash."""
        damage: set[str] = set()
        while True:
            try:
                return run()
            except DamagedError as error:
                if str(error) in damage:
                    raise BeyondRepairError(
                        f"{error} again, after it was written anew: check the disk"
                    ) from None
                damage.add(str(error))
                self.events.log("going back to what is saved", "warning", reason=str(error))
                self._failure = None
                self.service.bytes_served = 0
                for link in self.links.values():
                    link.bytes_sent = link.bytes_received = 0
                self.insist(restore)

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.network.loop).result()

    async def link(self, peer: str) -> Connection:
        """The way to ``peer``."""
        if peer not in self.links:
            self.links[peer] = Connection(
                self.federation,
                self.name,
                peer,
                self.start,
                self.store.inbox,
                self.credentials,
                self.events,
                self.waits,
                self.dependencies,
                self.tally,
                self._relayed(peer),
            )
        return self.links[peer]

    def _relayed(self, peer: str) -> Any:
        """A channel to ``peer`` through the relay; None where it is dialled directly."""
        if not self.federation.relayed(self.name, peer):
            return None
        return self._reach_relay().channel_to(peer)

    def _reach_relay(self) -> Switchboard:
        """On the event loop: this member's connection to the relay, opened when it is first needed."""
        if self._board is None:
            if self.credentials is None:
                raise HoldfastError("a relay needs certificates: leave out --insecure")
            self._board = Switchboard(self.federation, self.name, self.credentials, self.events)
            self._board.open(self.service)
        return self._board

    def header(self, exchange: int, wire: Any) -> Header:
        """Of a message in the round under way, as it is sent."""
        return Header(
            federation=self.federation.id,
            sender=self.name,
            round=self.stage,
            exchange=exchange,
            tensors=specs(wire),
            depends_on=self.dependencies.known,
        )

    def may_fetch(self, who: str, stage: int) -> bool:
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

    def cost_notes(self) -> dict[str, Any]:
        """What is saved with the state."""
        sent, received = self.wire_bytes
        return asdict(self.costs) | {"wire_sent": sent, "wire_received": received}

    def _peers_status(self) -> dict[str, dict[str, Any]]:
        """By peer: for how long it has been waited for, where it is, and what went over the link."""
        links, waits, now = dict(self.links), dict(self.waits), time.monotonic()
        seen = {name: stage for name, (_, stage) in dict(self.service.seen).items()}
        told: dict[str, dict[str, Any]] = {}
        for name in sorted(links.keys() | waits.keys() | seen.keys()):
            link = links.get(name)
            told[name] = {
                "waiting_seconds": round(now - waits[name].since, 1) if name in waits else 0.0,
                "round": max(link.round if link else 0, seen.get(name, 0)),
                "bytes_sent": link.bytes_sent if link else 0,
                "bytes_received": link.bytes_received if link else 0,
                "retries": link.retries if link else 0,
            }
        return told

    def status(self) -> dict[str, Any]:
        """For people and for other members: only metrics that the federation file lists are in it."""
        waits = "; ".join(str(wait) for wait in list(self.waits.values()))
        sent, received = self.wire_bytes
        shared = {k: v for k, v in self.metrics.items() if k in self.federation.shared_metrics}
        return {
            "name": self.name,
            "federation": self.federation.id,
            "epoch": self.federation.epoch,
            "round": self.done,
            "rounds": self.federation.rounds,
            "phase": self.phase if self.phase in ("finished", "starting") else waits or self.phase,
            "payload_bytes": self.payload_bytes,
            "wire_bytes_sent": sent,
            "wire_bytes_received": received,
            "retries": sum(link.retries for link in list(self.links.values())),
            "waiting_seconds": round(self.costs.waiting, 3),
            "uptime_seconds": round(time.monotonic() - self.began, 1),
            "refused": dict(self.events.complaints),
            "messages": self.norms.status(),
            "last_error": self.events.last_error,
            "wait_limit": self.federation.limits.wait,
            "peers": self._peers_status(),
            "certificate_days": None if self.credentials is None else round(self.credentials.days_left, 1),
            "metrics": shared,
        }
