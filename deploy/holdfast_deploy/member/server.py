"""A server: it takes in the clients' messages, keeps them until the round is saved, and answers.

For a method with a state on the server it runs the server's part. For a method without a leader it only
averages. Either way clients dial out, and only the server has to be reachable.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from holdfast.contract import IDENTITY, Channel, ServerAlgorithm
from holdfast.core.errors import HoldfastError
from holdfast.engines.common.channel_run import ChannelRun, split_channel_state
from holdfast.engines.common.counters import Work
from holdfast.problem.flat import FlatModel
from holdfast_deploy.federation import Federation
from holdfast_deploy.member.adding import add_up
from holdfast_deploy.member.averaging import average
from holdfast_deploy.member.base import GRACE, Member
from holdfast_deploy.member.network import Hosting
from holdfast_deploy.member.privacy import server_privacy, with_own_noise
from holdfast_deploy.member.quorum import Quorum
from holdfast_deploy.member.recording import record_round, recorded, write_report
from holdfast_deploy.member.recovery import recovering
from holdfast_deploy.member.schedule import Due, Key, Schedule
from holdfast_deploy.member.server_rounds import lead
from holdfast_deploy.member.state import MemberState
from holdfast_deploy.member.status import hidden_from_others, status_of_server
from holdfast_deploy.member.template import new_channel_run
from holdfast_deploy.storage.links import ForgedError, MixedRunsError
from holdfast_deploy.storage.messages import DamagedError, Header, MessageFile
from holdfast_deploy.storage.results import RoundRecord
from holdfast_deploy.storage.store import message_key, message_name, remove
from holdfast_deploy.wire.dialling import Wait, WaitLimitError


class Arrival(NamedTuple):
    """A client's message in the inbox."""

    content: str  # its digest
    norm: float | None = None  # None: not known since the last start


class Server(Member):
    """The server of a federation. ``run`` serves from wherever it stopped, to the end."""

    def __init__(
        self,
        federation: Federation,
        folder: Path,
        model: FlatModel,
        *,
        counted_noise: bool = False,  # for tests, as in ``Site``
        **hosting: Unpack[Hosting],
    ) -> None:
        assert federation.server is not None
        super().__init__(federation, federation.server.name, folder, model.x0, **hosting)
        self.model = model
        self.service.submissions = self
        self.arrivals: dict[Key, dict[str, Arrival]] = {}
        self.quorum: Quorum | None = None
        self.cohorts = RoundRecord(folder / "cohorts.csv", "clients")
        self.privacy, self.method = server_privacy(self, counted_noise), federation.member_method
        secret = None
        if self.privacy is not None:
            self.releases = self.privacy.releases
            self.method = with_own_noise(self.method, self.releases)
            secret = self.privacy.cohort if federation.secret_cohorts else None
        self.schedule = Schedule(federation, model, secret)
        self.last = self.schedule.last
        self._restore()

    def _restore(self) -> None:
        """What is saved, and what clients have sent since."""
        self.saved = self.store.saved_state()
        self.take_up(None if self.saved is None else MemberState.of_notes(self.saved, self.x0))
        # Clients may come before ``run`` gets there.
        self.due = self.schedule.after(self.done, [key[:2] for key in self.outbox.messages])
        self.message_round = self.due.key[0]
        self.outbox.lost.clear()  # computed again from the state, or from the clients' messages
        rule = self.federation.round
        if rule is not None and rule.quorum is not None and rule.deadline is not None:
            self.quorum = Quorum(self, rule.quorum, rule.deadline)
        if self.keeps_cohorts:
            self.cohorts.keep(self.done)
        for path in self.store.received():
            self._take_in(path)

    def _take_in(self, path: Path) -> None:
        """A client's message that came before; if it is damaged, the client has to send it again."""
        message_round, exchange, name = message_key(path.name)
        if self.left_out(name, message_round):  # it came while that was decided
            remove(path)
            return
        senders = self.arrivals.setdefault((message_round, exchange), {})
        try:
            header = self.store.own(path, name, (message_round, exchange)).header
            self.dependencies.add(header.depends_on)
            senders[name] = Arrival(header.content)
        except DamagedError as error:
            remove(path)
            senders.pop(name, None)
            again = f"; start {name} again: it sends the message once more"
            advice = again if message_round > self.done else ""
            self.events.complain("a file is damaged", reason=f"{error}{advice}", peer=name)

    def run(self) -> None:
        """Serves until every client has finished."""
        self.attend()
        recorded(self, lambda: recovering(self, self._run_on, self._restore))

    def _run_on(self) -> None:
        """From what is saved to the end."""
        begun = "resuming" if self.done > self.federation.first_round else "starting"
        self.events.log(begun, round=self.done)
        method = self.method
        if isinstance(method, ServerAlgorithm):
            lead(self, method)
        else:
            average(self)
        self.phase = "finishing"
        write_report(self)
        try:
            self.run_on_loop(self._linger)
        except MixedRunsError as error:  # everybody had finished before somebody started anew
            self.events.log("finished, but a client did not say so", "warning", reason=str(error))
        self.phase = "finished"
        self.events.log("finished")

    # --- what is kept ----------------------------------------------------------------------------------

    def save_round(self, done: int, state: Any) -> None:
        """Writes down the state after ``done`` rounds."""
        method = self.method
        if self.keeper is not None and isinstance(method, ServerAlgorithm):
            self.keep_model(done, method.model(split_channel_state(state)[0]))
        self.save(done, state)
        if done % self.federation.evaluate_every == 0 or done == self.federation.rounds:
            record_round(self, done, Work(), len(self.federation.names))
        self.events.log("round done", round=done)

    def forget(self, done: int) -> None:
        """All messages of the rounds before the last finished one, which may have to be computed again."""
        self.outbox.prune(done, lambda message_round: [])
        for key in list(self.arrivals):  # a copy: the event loop adds to it
            if key[0] < done:
                self.drop(key)

    def average_statistics(self, delivered: int = 0) -> Tensor | None:
        """The mean of everybody's statistics, which all are sent; from then on, they take leave.

        ``delivered``: bytes that they were sent before, beside the rounds' messages.
        """
        mean, self.message_round = None, self.federation.rounds + 1
        self.due = self.schedule.due((self.message_round, 0))
        if self.schedule.statistics is not None:
            mean = self.mean(IDENTITY)
            size = self.publish(self.header(1, mean), mean).header.size
            self.costs.delivery_bytes = delivered + len(self.federation.names) * size
        self.due, self.message_round = self.schedule.due((self.last, 0)), self.last
        return mean

    def channel_run(self, r: int) -> ChannelRun:
        """What answers of a round go through."""
        return new_channel_run(
            self.federation, r, (), torch.tensor([], dtype=torch.int64, device=self.x0.device)
        )

    # --- clients' messages ----------------------------------------------------------------------------

    def admit(self, header: Header) -> bool:
        due, key = self.due, (header.round, header.exchange)
        if header.sender not in self.federation.names:
            raise HoldfastError("only nodes send messages")
        there = self.arrivals.get(key, {}).get(header.sender)
        if there is not None and there.content != header.content:
            raise ForgedError(
                f"two messages of {header.sender} for round {key[0]} differ: somebody else has its key. "
                f"Give {header.sender} a new key (csr, sign --replace), and roll everybody back to before "
                "(holdfast federation rollback)"
            )
        waiting = header.sender in self.arrivals.get(due.key, ())
        if key < due.key or (key == due.key and waiting):
            return False  # it is in the model or in a mean already, or will be
        if key > due.key:
            if waiting:
                raise HoldfastError(f"round: your message of round {due.key[0]} still waits for others")
            raise HoldfastError(f"round: {key[0]}, exchange {key[1]}, has not begun")
        if header.sender not in due.names:
            raise HoldfastError(f"cohort: you are not in that of round {key[0]}")
        if header.tensors != due.tensors:
            raise HoldfastError("tensors: not those that are expected from everybody")
        return True

    def arrived(self, header: Header, norm: float | None = None) -> None:
        if self.left_out(header.sender, header.round):  # while it came in
            remove(self.store.inbox / message_name(header.round, header.exchange, header.sender))
            return
        senders = self.arrivals.setdefault((header.round, header.exchange), {})
        senders[header.sender] = Arrival(header.content, norm)

    def left_out(self, sender: str, round: int) -> bool:
        if self.federation.secret_cohorts:  # said of a round that has begun: nobody need know ahead
            return round <= self.message_round and not self.schedule.asked(sender, round)
        return self.quorum is not None and (round, sender) in self.quorum.left_out

    @property
    def keeps_cohorts(self) -> bool:
        """Whether who took part in a round cannot be told from the file alone."""
        federation = self.federation
        masked = federation.secure_aggregation is not None
        return self.quorum is not None or masked or federation.secret_cohorts

    def counted(self, sender: str, round: int, exchange: int) -> bool:
        if self.federation.secure_aggregation is None or exchange <= self.schedule.message:
            return False
        return sender in self.cohorts.lines().get(round, [""])[0].split()

    def takers(self) -> list[str]:
        """Whose messages count in the exchange that is due."""
        return [name for name in self.due.names if not self.left_out(name, self.due.key[0])]

    async def everybody(self) -> None:
        """Waits for all messages that are due; the limit counts from the last one that came."""
        due, since, before = self.due, time.monotonic(), None
        begun, in_round = since, due.key[0] <= self.federation.rounds
        size = sum(tensor.size for tensor in due.tensors)
        try:
            while missing := self._missing(due):
                if missing != before:
                    since, before = time.monotonic(), missing
                    self.waits.clear()
                    for name in sorted(missing):
                        self.waits[name] = Wait(name, since)
                if self.quorum is not None and in_round and self.quorum.met(due, missing, begun):
                    if due.key[1] > self.schedule.message:
                        return  # enough has been revealed, and everybody's message is here
                    await self.quorum.go_on_without(due, missing)
                    continue
                if time.monotonic() - since > self.federation.limits.patience(size):
                    if self.quorum is not None and due.key[0] == self.last:
                        names = ", ".join(sorted(missing))
                        self.events.log("finished without a final message", "warning", reason=f"of {names}")
                        return
                    raise WaitLimitError(
                        f"waited for {', '.join(sorted(missing))} as long as limits.wait allows. Everything "
                        "is saved: start the same command again to go on"
                    )
                left = begun + self.quorum.deadline - time.monotonic() if self.quorum else 1.0
                await self.outbox.changed(left if 0 < left < 1.0 else 1.0)
        finally:
            self.waits.clear()

    def _missing(self, due: Due) -> set[str]:
        """Who is still waited for; not for the final message of one that is lost."""
        missing = set(self.takers()) - set(self.arrivals.get(due.key, {}))
        if self.keeper is None or due.key[0] < self.last:
            return missing
        return {name for name in missing if not self.keeper.lost(name)}

    def mean(self, channel: Channel, size: int | None = None) -> Any:
        """The mean of all messages that are due, added up in the order of ``Due.names``.

        ``size``: what their sum is divided by, if not by their number.
        """
        self.run_on_loop(self.everybody)
        return self.retry_while_full(lambda: add_up(self, channel, size))

    def file(self, key: Key, name: str) -> MessageFile:
        """What ``name`` sent."""
        return MessageFile(self.store.inbox / message_name(*key, name))

    def drop(self, key: Key) -> None:
        """What everybody sent for that exchange is needed no longer."""
        for name in self.arrivals.pop(key, ()):
            remove(self.store.inbox / message_name(*key, name))

    # --- others ---------------------------------------------------------------------------------------

    def may_fetch(self, who: str, message_round: int) -> bool:
        return who in self.federation.names

    def awaits(self, name: str) -> bool:
        return self.due.key[0] <= self.federation.rounds

    async def _linger(self) -> None:
        """Clients whose answer got lost may ask once more; those who heard it say so."""
        until = time.monotonic() + GRACE
        while time.monotonic() < until:
            if all(self.service.released.get(name, 0) >= self.last for name in self.federation.names):
                return
            await self.outbox.changed(until - time.monotonic())

    def status(self) -> dict[str, Any]:
        """Also where the clients are: they cannot be asked themselves."""
        return super().status() | status_of_server(self)

    def status_for_others(self) -> dict[str, Any]:
        return self.status() | hidden_from_others(self)

    def header(self, exchange: int, wire: Any) -> Header:
        """What it depends on tells whose messages came, so with secret cohorts it names the server alone."""
        header = super().header(exchange, wire)
        if not self.federation.secret_cohorts:
            return header
        return header.model_copy(update={"depends_on": {self.name: self.store.incarnation}})
