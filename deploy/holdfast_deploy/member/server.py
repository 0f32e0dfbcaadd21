"""A server: it takes in the clients' messages, keeps them until the round is saved, and answers.

For a method with a state on the server it runs the server's part. For a method without a leader it only
averages. Either way clients dial out, and only the server has to be reachable.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor

from holdfast.contract import ServerAlgorithm
from holdfast.core.tree import tree_map
from holdfast.engines.common.channel_run import split_channel_state, with_channel_state
from holdfast.engines.common.counters import Work
from holdfast.problem.flat import FlatModel
from holdfast.problem.statistics import from_moments
from holdfast_deploy.federation import Federation
from holdfast_deploy.member import finish
from holdfast_deploy.member.clients import Clients
from holdfast_deploy.member.network import Hosting
from holdfast_deploy.member.privacy import Releaser, server_privacy, with_own_noise
from holdfast_deploy.member.schedule import Schedule
from holdfast_deploy.member.server_rounds import ServerContext, averaging_round, leading_round, take_up_means
from holdfast_deploy.member.session import Finished, Session, run_rounds
from holdfast_deploy.member.state import Handover, MemberState
from holdfast_deploy.member.status import client_figures
from holdfast_deploy.member.template import channel_memories
from holdfast_deploy.storage.links import MixedRunsError
from holdfast_deploy.storage.messages import Incarnations, MessageFile
from holdfast_deploy.storage.results import RoundRecord, write_model


def open_server(
    federation: Federation,
    folder: Path,
    model: FlatModel,
    *,
    counted_noise: bool = False,  # for tests, as in ``Site``
    **hosting: Unpack[Hosting],
) -> Session:
    """The session of the server of a federation; ``run`` serves from wherever it stopped, to the end."""
    assert federation.server is not None
    session = Session(federation, federation.server.name, folder, model.x0, **hosting)
    session.program = Server(session, model, counted_noise)
    session.restore()  # clients may come before ``run``
    return session


class Server:
    """What a server does in its session."""

    def __init__(self, session: Session, model: FlatModel, counted_noise: bool) -> None:
        federation, folder = session.federation, session.folder
        self.session, self.federation, self.model = session, federation, model
        self.method, secret = federation.member_method, None
        run = f"{federation.id} {session.store.incarnation}"
        releaser = Releaser(folder, run, session.store.state.exists(), session.events)
        self.privacy, self.releases = server_privacy(federation, releaser, counted_noise), None
        if self.privacy is not None:
            self.releases = self.privacy.releases
            self.method = with_own_noise(self.method, self.releases)
            secret = self.privacy.cohort if federation.secret_cohorts else None
        self.cohorts = RoundRecord(folder / "cohorts.csv", "clients")
        self.clients = Clients(
            federation,
            Schedule(federation, model, secret),
            session.store,
            session.outbox,
            session.events,
            session.dependencies,
            session.waits,
            session.service.seen,
            session.lost,
            self.cohorts,
        )
        session.exchange.clients = session.service.submissions = self.clients
        self.saved: MessageFile | None = None

    def restore(self) -> None:
        session = self.session
        self.saved = session.store.saved_state()
        session.take_up(None if self.saved is None else MemberState.of_notes(self.saved, session.x0))
        self.clients.restore(session.done)
        session.exchange.message_round = self.clients.due.key[0]
        session.outbox.lost.clear()  # computed again from the state, or from the clients' messages
        if self.keeps_cohorts:
            self.cohorts.keep(session.done)

    def run(self) -> None:
        """Serves until every client has finished."""
        session = self.session
        session.log_beginning()
        if isinstance(self.method, ServerAlgorithm):
            self._lead(self.method)
        else:
            self._average()
        session.exchange.phase = "finishing"
        session.write_report()
        try:
            session.waiting.run_interruptible(self._linger)
        except MixedRunsError as error:  # all clients had finished before one started again
            session.events.log("finished, but a client did not say so", "warning", reason=str(error))
        session.exchange.phase = "finished"
        session.events.log("finished")

    # --- a method that the server leads -----------------------------------------------------------------

    def _lead(self, method: ServerAlgorithm[Any]) -> None:
        """All rounds that are left, and the finished model, which is written down and handed out."""
        session, federation, clients = self.session, self.federation, self.clients
        rounds, context = federation.rounds, self._context()
        state = self._state_of_leader(method)

        def one_round(state: MemberState, r: int) -> Finished:
            clients.expect_next(r)
            session.exchange.message_round, session.exchange.phase = r + 1, f"serving round {r + 1}"
            after, takers = leading_round(method, state, context, session.exchange)
            if self.keeps_cohorts:
                session.exchange.retry_while_full(lambda: self.cohorts.add(r + 1, " ".join(takers)))
            if clients.quorum is not None:
                left_out = len(clients.due.names) - len(takers)
                session.accounts.metrics = {"answers": float(len(takers)), "left_out": float(left_out)}
            self._measure(after)
            session.keep_model(r + 1, lambda: self._model_of(method, after))
            return Finished(after)

        state = run_rounds(session, state, one_round, lambda r: r if r < rounds else None)
        last = method.at(max(rounds - 1, 0))
        self._hand_out(last.model(split_channel_state(state.method.tree)[0]))

    def _state_of_leader(self, method: ServerAlgorithm[Any]) -> MemberState:
        """What is saved, or the state before the first round."""
        session, federation, first = self.session, self.federation, self.federation.first_round
        memories = channel_memories(federation, session.x0)
        memory = tree_map(lambda t: t[0], memories[0].receiver) if memories else ()
        tree = method.at(first).init_server(session.x0.clone())
        if self.saved is not None:
            state = MemberState.read(self.saved, with_channel_state(tree, memory), session.x0)
            session.exchange.retry_while_full(lambda: session.prune(session.done))
            return state
        session.exchange.message_round = first
        if federation.roster_number:
            tree = method.at(first).init_server(session.starting_model())
        state = MemberState(round=first, method=Handover(with_channel_state(tree, memory)))
        self._measure(state)
        session.keep_model(first, lambda: self._model_of(method, state))
        session.save(state)
        session.forget_roster_before()
        return state

    @staticmethod
    def _model_of(method: ServerAlgorithm[Any], state: MemberState) -> Tensor:
        return method.model(split_channel_state(state.method.tree)[0])

    def _hand_out(self, model: Tensor) -> None:
        """The finished model [d]: written down, and sent to all nodes."""
        session, federation = self.session, self.federation
        session.exchange.message_round = federation.rounds + 1
        self.clients.expect((session.exchange.message_round, 0))
        published = session.exchange.publish((session.exchange.message_round, 0), model)
        for name in federation.names:
            session.exchange.exchanged(name, session.exchange.message_round, [published.header.content], [])
        session.accounts.costs.delivery_bytes = len(federation.node) * published.header.size
        notes = {"federation": federation.name, "rounds": federation.rounds}
        session.exchange.phase = "handing out the model"
        statistics = self._average_statistics(session.accounts.costs.delivery_bytes)
        complete = model if statistics is None else torch.cat([model, from_moments(statistics[0]).flatten()])
        session.exchange.retry_while_full(lambda: write_model(session.folder, self.model, complete, notes))
        session.exchange.collect((self.clients.schedule.last, 0))

    # --- a method without a leader ------------------------------------------------------------------------

    def _average(self) -> None:
        """Exchange by exchange, what all nodes have sent is averaged, until all have finished."""
        session, rounds, context = self.session, self.federation.rounds, self._context()
        state = MemberState(round=session.done, method=Handover(()))
        if self.saved is None:
            self._measure(state)
            session.save(state)
        session.exchange.phase = "averaging"
        before = [message for _, message in sorted(session.outbox.messages.items())]
        take_up_means(context, session.done, before, session.exchange.link_digests)

        def one_round(state: MemberState, r: int) -> Finished:
            after = averaging_round(state, context, session.exchange, session.exchange.link_digests)
            self._measure(after)
            return Finished(after)

        run_rounds(session, state, one_round, lambda r: r if r < rounds else None)
        self._average_statistics()
        session.exchange.collect((self.clients.schedule.last, 0))

    def _average_statistics(self, delivered: int = 0) -> Tensor | None:
        """The mean of all nodes' statistics, which all are sent; from then on, they finish.

        ``delivered``: bytes that they were sent before, beside the rounds' messages.
        """
        session, clients, mean = self.session, self.clients, None
        session.exchange.message_round = self.federation.rounds + 1
        clients.expect((session.exchange.message_round, 0))
        if clients.schedule.statistics is not None:
            files = session.exchange.collect((session.exchange.message_round, 0))
            mean = session.exchange.retry_while_full(
                lambda: self._context().plain_mean(session.exchange.checked(files))
            )
            size = session.exchange.publish((session.exchange.message_round, 1), mean).header.size
            session.accounts.costs.delivery_bytes = delivered + len(self.federation.names) * size
        session.exchange.message_round = clients.schedule.last
        clients.expect((session.exchange.message_round, 0))
        return mean

    def _context(self) -> ServerContext:
        session = self.session
        return ServerContext(
            self.federation, self.clients, session.x0.device, session.accounts.costs.traffic, self.privacy
        )

    # --- figures --------------------------------------------------------------------------------------------

    def _measure(self, state: MemberState) -> None:
        done = state.round
        if done % self.federation.evaluate_every == 0 or done == self.federation.rounds:
            self.session.accounts.record_round(done, Work(), len(self.federation.names))

    @property
    def keeps_cohorts(self) -> bool:
        """Whether who took part in a round cannot be told from the file alone."""
        federation = self.federation
        masked = federation.secure_aggregation is not None
        return self.clients.quorum is not None or masked or federation.secret_cohorts

    async def _linger(self) -> None:
        """Clients whose answer got lost may ask once more; those who heard it say so."""
        session, last = self.session, self.clients.schedule.last
        until = time.monotonic() + finish.GRACE
        while time.monotonic() < until:
            if all(session.service.released.get(name, 0) >= last for name in self.federation.names):
                return
            await session.outbox.changed(until - time.monotonic())

    # --- what the session asks ------------------------------------------------------------------------------

    def charge(self) -> None:
        """Paid for in the round, before the state: see ``leading_round``."""

    def figures(self) -> dict[str, Any]:
        """Where the clients are, who cannot be asked themselves, and what was spent of a privacy budget."""
        session = self.session
        now, seen = session.network.loop.time(), session.service.seen
        spent = {} if self.releases is None else {"epsilon": round(self.releases.epsilon, 4)}
        return {"clients": client_figures(seen, now, self.federation.rounds), **spent}

    def hidden(self) -> dict[str, Any]:
        """All that depends on private messages, or on who is in a secret cohort."""
        if self.privacy is None:
            return {}
        hidden: dict[str, Any] = {"messages": {}, "last_error": ""}
        if self.federation.secret_cohorts:
            counts = ("payload_bytes", "wire_bytes_sent", "wire_bytes_received", "retries", "waiting_seconds")
            hidden |= {"phase": self.session.exchange.phase, "refused": {}, "peers": {}, "clients": {}}
            hidden |= dict.fromkeys(counts, 0)
        return hidden

    def depends_on(self, known: Incarnations) -> Incarnations:
        """It tells whose messages came, so with secret cohorts it names the server alone."""
        if not self.federation.secret_cohorts:
            return known
        return {self.session.name: self.session.store.incarnation}

    def may_fetch(self, who: str, message_round: int) -> bool:
        return who in self.federation.names

    def readers(self, message_round: int) -> list[str]:
        return []  # clients hear that a round is over

    def awaits(self, name: str, message_round: int) -> bool:
        return message_round <= self.federation.rounds
