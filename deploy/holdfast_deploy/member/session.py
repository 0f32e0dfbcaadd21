"""One member in one roster: its folder, its connections, its log, and the thread that answers others.

A session knows no method. What is computed is up to its ``program``, a node's or a server's. A round sends
and receives through an ``Exchange``, which is the session's ``MemberExchange``. ``run_rounds`` is the only
loop over rounds.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar, Unpack

from torch import Tensor

import holdfast
from holdfast.core.errors import HoldfastError
from holdfast.core.files import write_json
from holdfast_deploy.federation import Federation
from holdfast_deploy.member.accounts import Accounts
from holdfast_deploy.member.connections import Connections
from holdfast_deploy.member.exchange import MemberExchange
from holdfast_deploy.member.network import Hosting, NetworkThread
from holdfast_deploy.member.program import Program
from holdfast_deploy.member.state import Costs, MemberState
from holdfast_deploy.member.status import blank_status, days_left, peer_figures
from holdfast_deploy.member.waiting import Stopped, Waiting
from holdfast_deploy.membership.roster import RosterChanged, roster_folder
from holdfast_deploy.membership.start import (
    forget_roster_before,
    keep_model,
    starting_model,
    state_before,
)
from holdfast_deploy.ops.audit import AuditLog
from holdfast_deploy.reading import Reading, Readings
from holdfast_deploy.storage.disk_full import explained
from holdfast_deploy.storage.links import (
    Dependencies,
)
from holdfast_deploy.storage.messages import (
    BeyondRepairError,
    DamagedError,
    MessageFile,
)
from holdfast_deploy.storage.outbox import Outbox
from holdfast_deploy.storage.results import Record, Status, digests
from holdfast_deploy.storage.snapshots import keep
from holdfast_deploy.storage.store import FolderGoneError, Store, data_digest, message_key, remove
from holdfast_deploy.wire.certificate_watch import watch_certificates
from holdfast_deploy.wire.listener import bind_address
from holdfast_deploy.wire.protocol import LeftOut
from holdfast_deploy.wire.server import Server
from holdfast_deploy.wire.service import Service

T = TypeVar("T")

WATCH = 1.0  # seconds between two looks at the folder


class Session:
    """One member in one roster. Used as a context; ``program`` is set right after it was made."""

    program: Program

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
        self.rosters = hosting.get("rosters")
        self.membership = None if self.rosters is None else self.rosters.view
        place = roster_folder(folder, federation.roster_number)
        self.store = Store(place, identity, self.events, federation.first_round)
        self.trail = self.events.trail = AuditLog(folder)
        begun = {"federation": federation.id, "member": name, "incarnation": self.store.incarnation}
        begun |= {"roster": str(federation.roster_number)} if federation.roster_number else {}
        self.trail.note("begun", **begun, version=holdfast.__version__)
        shared = hosting.get("network")
        self._own_network, self.network = shared is None, shared or NetworkThread()
        self.waiting = Waiting(self.network.loop, self.events, federation.limits.wait)
        self.outbox = Outbox(self.store, self.events, self.network.loop)
        members = [member.name for member in federation.members]
        self.dependencies = Dependencies(name, self.store.incarnation, members)
        for message in self.outbox.messages.values():
            self.dependencies.add(message.header.depends_on)
        self.exchange = MemberExchange(
            federation,
            name,
            folder,
            self.store,
            self.outbox,
            self.dependencies,
            self.waiting,
            self.events,
            lambda: self.program.charge(),
            lambda known: self.program.depends_on(known),
        )
        self.readings = Readings(name, reading or Reading())
        self.service = Service(
            federation,
            name,
            self.start,
            self.store,
            self.outbox,
            self.events,
            lambda who, message_round: self.program.may_fetch(who, message_round),
            self.status_for_others,
            lambda: self.exchange.message_round,
            self.dependencies,
            self.give_up,
            link_digests=self.exchange.link_digests,
            readings=self.readings,
        )
        self.service.callers.credentials = self.credentials
        self.server = (
            self.waiting.run_uninterrupted(self._open_server())
            if self.rosters is None
            else self.rosters.server
        )
        self.connections = Connections(
            federation,
            name,
            self.start,
            self.store.inbox,
            self.credentials,
            self.events,
            self.dependencies,
            self.exchange.link_digests,
            self.readings,
        )
        self.exchange.connections = self.connections
        self.links, self.waits = self.connections.links, self.connections.waits
        record = Record(folder, federation, name, {"dimension": x0.numel(), **(facts or {})})
        self.accounts = Accounts(record, self.waiting, self.connections, self.service)
        self.port: int | None = None
        self._restored = False
        self._releasing: set[asyncio.Future[None]] = set()  # under way, and nobody waits for them
        tasks: list[Coroutine[Any, Any, None]] = [self._watch_folder()]
        if self.credentials is not None:
            coordinator = federation.coordinator
            tasks.append(watch_certificates(self.credentials, coordinator, self.events, self._drop_revoked))
            tasks += [self.connections.share_revocations()] if coordinator else []
        self._watching = [asyncio.run_coroutine_threadsafe(task, self.network.loop) for task in tasks]
        for watching in self._watching:
            watching.add_done_callback(self._watched)

    @property
    def done(self) -> int:
        """Rounds that are finished."""
        return self.exchange.done

    # --- beginning and end ----------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, listen: str | None = None) -> None:
        """Lets others ask, as the file says: on the own address or on ``listen``, or through the relay.

        Nobody asks a client of a server, so it opens nothing.
        """
        federation = self.federation
        if not federation.listens(self.name):
            return
        address = listen or bind_address(federation.member(self.name).address)
        if address:
            self.listen(address)
        if any(federation.relayed(other.name, self.name) for other in federation.members):

            async def reach() -> None:
                assert federation.relay is not None
                self.server.open_at(federation.relay.name, federation.relay.address)

            self.waiting.run_uninterrupted(reach())

    def listen(self, address: str) -> None:
        """Lets others ask, on ``address`` (host:port)."""
        self.port = self.waiting.run_uninterrupted(self.server.listener.open(address))

    async def _open_server(self) -> Server:
        return Server(lambda: self.service, self.credentials, self.events)

    def close(self) -> None:
        """Closes all connections. What is published stays on disk."""
        self.waiting.run_uninterrupted(self._close())
        self.store.close()
        self.trail.note("ended", round=self.done)
        self.trail.close()
        if self._own_network:
            self.network.close()

    async def _close(self) -> None:
        for watching in self._watching:
            watching.cancel()
        failed = self.waiting.failure is not None
        grace = 1.0 if failed or self.exchange.phase == "finished" else 0.0  # others hear why
        if self.rosters is None:
            await self.server.close(grace)
        else:
            await self.server.end_requests(grace)
            self.rosters.member = None
        await self.connections.close()
        self.service.close()

    def _drop_revoked(self) -> None:
        self.server.listener.drop_revoked()
        self.connections.drop_revoked()

    def _watched(self, watching: Future[None]) -> None:
        """What goes wrong in a task that nobody waits for ends the member."""
        if not watching.cancelled() and isinstance(error := watching.exception(), Exception):
            self.give_up(error)

    async def _watch_folder(self) -> None:
        """Ends the member where its folder is taken away: nothing that it computed would be saved.

        Likewise where one of the files is gone that are missed by nothing else until it is started again.
        """
        needed = [self.trail.path]
        if self.membership is not None:
            needed.append(self.membership.log.path)
        while True:
            await asyncio.sleep(WATCH)
            try:
                self.store.require_folder()
                for path in needed:
                    path.stat()
            except FolderGoneError as error:
                self.give_up(error)
                return
            except FileNotFoundError as error:
                self.give_up(explained(error))
                return

    def stop(self) -> None:
        """From another thread: makes the member raise ``Stopped`` at its next exchange, or at once."""
        self.waiting.stop()

    def give_up(self, error: Exception) -> None:
        """From another thread: makes the member raise ``error`` at its next exchange, or at once."""
        self.waiting.give_up(error)

    def lost(self, name: str) -> bool:
        """Whether ``name`` was not heard of for so long that the members continue without it."""
        return self.rosters is not None and self.rosters.lost(name)

    def awaits(self, name: str) -> bool:
        """Whether this member cannot finish its rounds without ``name``."""
        return self.program.awaits(name, self.exchange.message_round)

    # --- to the end, also where files are damaged ------------------------------------------------------

    def run(self) -> Any:
        """Takes part to the end; the model [d] of a node. What becomes of it goes into the record."""
        if self.rosters is not None:  # from here on, it says when another roster begins; perhaps it has
            self.rosters.member = self
            if self.rosters.view.log.federation.id != self.federation.id:
                raise RosterChanged
        if not self._restored:
            self.restore()
        try:
            result = self._run_program()
        except (Stopped, HoldfastError) as error:
            status: Status = "interrupted" if isinstance(error, Stopped) else "failed"
            with suppress(OSError):  # that may be what it failed for
                self.accounts.record.conclude(status, self.done, self.accounts.seconds, str(error))
            raise
        accounts = self.accounts
        self.waiting.retry_while_full(lambda: accounts.record.conclude("done", self.done, accounts.seconds))
        return result

    def restore(self) -> None:
        """What is saved becomes what is known."""
        self._restored = True
        self.program.restore()

    def _run_program(self) -> Any:
        """If a file turns out to be damaged, once more from what is saved, as after a crash."""
        damage: set[str] = set()
        while True:
            try:
                return self.program.run()
            except OSError as error:
                self.store.require_folder()
                raise explained(error) from None
            except DamagedError as error:
                if str(error) in damage:
                    reason = f"{error} again, after it was written anew: check the disk"
                    raise BeyondRepairError(reason) from None
                damage.add(str(error))
                self.events.log("going back to what is saved", "warning", reason=str(error))
                self.waiting.failure = None
                self.accounts.forget_process()
                self.waiting.retry_while_full(self.restore)

    def log_beginning(self) -> None:
        """Says from where on it takes part."""
        begun = "resuming" if self.done > self.federation.first_round else "starting"
        self.events.log(begun, round=self.done)

    def saved(self) -> MessageFile | None:
        """The file of the state to continue from; None: at the very beginning."""
        return self.store.saved_state(self.outbox.lost)

    def take_up(self, state: MemberState | None) -> MemberState | None:
        """Continues from ``state``, None: from the beginning; the last state, perhaps of a roster before."""
        self.exchange.link_digests.slack = math.inf
        self.exchange.done = self.federation.first_round
        before = state or self._before_this_roster()
        if before is not None and not self.trail.holds(before.audit):
            reason = "lines are missing, or others than when the state was saved: put back the file"
            self.events.complain("the audit log is damaged", reason=reason)
        self.exchange.link_digests.restore({} if state is None else state.links)
        self.exchange.norms.restore(0.0 if state is None else state.largest_norm)
        if state is not None:
            self.exchange.done, self.accounts.metrics = state.round, dict(state.metrics)
            self.dependencies.add(state.depends_on)
            if self.program.releases is not None:
                self.program.releases.require(state.releases or 0)
        self.exchange.link_digests.slack = self.store.again
        self.accounts.restore(Costs() if before is None else before.costs)
        try:
            self.accounts.record.keep(
                upto=self.done if state is not None else self.federation.first_round - 1
            )
        except DamagedError as error:  # only figures are lost
            self.events.complain("a file is damaged", reason=str(error))
        return before

    def _before_this_roster(self) -> MemberState | None:
        """The last state of the roster before, without tensors."""
        file = state_before(self.membership, self.federation)
        return None if file is None else MemberState.of_notes(file, self.x0)

    # --- where members may change ------------------------------------------------------------------------

    def starting_model(self) -> Tensor:
        """The model [d] that the method begins with; where members have changed, from a member's model."""
        self.exchange.message_round = self.federation.first_round
        if self.membership is None:
            return self.x0
        return starting_model(self.membership, self.federation, self.exchange, self.x0)

    def keep_model(self, done: int, row: Callable[[], Tensor]) -> None:
        """Keeps the model ``row`` [d] after ``done`` rounds, in case another roster begins there."""
        if self.membership is not None:
            self.waiting.retry_while_full(self.program.charge)
            keep_model(self.membership, self.federation, self.exchange, done, row())

    def forget_roster_before(self) -> None:
        """What the roster before has left is needed no longer."""
        forget_roster_before(self.membership, self.federation)

    # --- after a round ----------------------------------------------------------------------------------

    def save(self, state: MemberState, **said: Any) -> None:
        """Writes ``state`` down, with this session's accounts, and forgets what the rounds before it took.

        ``said``: what the log line says.
        """
        self.write(state)
        done = state.round
        self.waiting.retry_while_full(lambda: self.prune(done))
        if self.federation.member_network.activity is not None:
            self._release(done)
        self.events.log("round done", round=done, **said)

    def write(self, state: MemberState) -> None:
        """Writes ``state`` down, as soon as there is room."""
        before, done = time.monotonic(), state.round
        self.waiting.retry_while_full(self.program.charge)
        releases = self.program.releases
        whole = replace(
            state,
            costs=self.accounts.state(),
            links=self.exchange.link_digests.state(),
            largest_norm=self.exchange.norms.largest,
            depends_on=self.dependencies.known,
            audit=self.waiting.retry_while_full(self.trail.sync),
            releases=None if releases is None else releases.count,
        )
        self.exchange.finite(lambda: whole.write(self.store))
        limits = self.federation.limits
        if self.rosters is None:  # else models are kept, to which all go back together
            self.waiting.retry_while_full(
                lambda: keep(self.folder, done, limits.snapshot_every, limits.snapshots)
            )
        self.exchange.done = done
        self.accounts.costs.saving += time.monotonic() - before

    def prune(self, done: int) -> None:
        """Forgets what came in for the rounds before, and what went out and nobody will ask for again."""
        if self.exchange.clients is not None:
            self.exchange.clients.forget(done)
        for path in self.store.received():
            if message_key(path.name)[0] < done:  # those of this round may be needed to compute it again
                remove(path)
        self.outbox.prune(done, self.program.readers)

    def _release(self, done: int) -> None:
        """Over sporadic links others may not hear of us for long; they need not keep messages for us."""

        async def tell() -> None:
            for name in self.program.readers(done):
                releasing = asyncio.ensure_future(self.connections.to(name).release(done + 1))
                self._releasing.add(releasing)
                releasing.add_done_callback(self._releasing.discard)

        self.waiting.run_interruptible(tell)

    # --- figures ------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """For the member's own people; only metrics that the federation file lists are in it."""
        links, waits = list(self.links.values()), "; ".join(map(str, list(self.waits.values())))
        phase, accounts = self.exchange.phase, self.accounts
        sent, received = accounts.wire_bytes
        return {
            **blank_status(self.federation, self.name),
            "round": self.done,
            "phase": phase if phase in ("finished", "starting") else waits or phase,
            "payload_bytes": accounts.payload_bytes,
            "wire_bytes_sent": sent,
            "wire_bytes_received": received,
            "retries": sum(link.retries for link in links),
            "waiting_seconds": round(self.waiting.seconds, 3),
            "uptime_seconds": round(time.monotonic() - accounts.began, 1),
            "refused": dict(self.events.complaints),
            "messages": self.exchange.norms.status(),
            "last_error": self.events.last_error,
            "peers": peer_figures(self.links, self.waits, self.service.seen),
            "certificate_days": days_left(self.credentials),
            "metrics": {k: v for k, v in accounts.metrics.items() if k in self.federation.shared_metrics},
            **self.program.figures(),
        }

    def status_for_others(self) -> dict[str, Any]:
        """The status as other members get it."""
        return self.status() | self.program.hidden()

    def write_report(self, models: Iterable[str] = ()) -> None:
        """``report.json``: what taking part has cost, for the member's own people, and its own figures.

        ``models``: under which names its models are written; what they are like goes in as well.
        """
        own = {"metrics": self.accounts.metrics, "models": digests(self.folder, models)}
        report = self.status() | self.accounts.report() | own
        self.waiting.retry_while_full(lambda: write_json(self.folder / "report.json", report))


class Finished(NamedTuple):
    """A round that was computed, and what is left to do."""

    state: MemberState
    submit: MessageFile | None = None  # brought to the server only once the state is saved
    said: Mapping[str, Any] = {}  # in the log


def run_rounds(
    session: Session,
    start: MemberState,
    one_round: Callable[[MemberState, int], Finished],
    next_round: Callable[[int], int | None],
    left_out: Callable[[MemberState, LeftOut, int], MemberState] | None = None,
) -> MemberState:
    """The only loop of a member: computes a round, saves the state after it, and only then submits.

    What a round publishes for neighbours, they may fetch while it is computed: a round that is computed again
    publishes the same. What the round of a client returns to ``submit`` waits until the state is saved: it
    tells the server that the client has received the model, which the server may then forget.

    ``next_round(r)``: the first round from r on in which the member takes part; None: there is none.
    ``left_out``: the state to continue from where the server continues without this member's message.
    """
    state = start
    while (r := next_round(state.round)) is not None:
        try:
            state, last, said = one_round(state, r)
            session.save(state, **said)
            if last is not None:
                session.exchange.submit(last)
        except LeftOut as late:
            if left_out is None:
                raise
            state = left_out(state, late, r + 1)
    return state
