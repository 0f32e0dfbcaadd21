"""A node: the method's rounds next to its own data, saved after each, so that any of them can be repeated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor

from holdfast.contract import Algorithm, ServerAlgorithm
from holdfast.core.errors import HoldfastError
from holdfast.core.randomness import cohort
from holdfast.core.tree import leaves
from holdfast.engines.common.channel_run import split_channel_state, with_channel_state
from holdfast.engines.common.counters import Accesses, Work
from holdfast.engines.common.oracle import INITIAL_STEP, BatchOracle
from holdfast_deploy.federation import Federation
from holdfast_deploy.member.finish import finish
from holdfast_deploy.member.masked_client import MaskedClient
from holdfast_deploy.member.network import Hosting
from holdfast_deploy.member.node_models import NodeModels
from holdfast_deploy.member.node_rounds import Broadcast, client_round, graph_round, graph_start
from holdfast_deploy.member.pace import Pace
from holdfast_deploy.member.privacy import Releaser, SamplePrivacy, node_privacy, with_own_noise
from holdfast_deploy.member.session import Finished, Session, run_rounds
from holdfast_deploy.member.state import Handover, MemberState, RoundContext
from holdfast_deploy.member.template import channel_memories, new_channel_run, state_template
from holdfast_deploy.site import Site
from holdfast_deploy.storage.messages import Incarnations, specs
from holdfast_deploy.storage.store import message_key, remove
from holdfast_deploy.wire.protocol import LeftOut


def open_node(
    federation: Federation, name: str, folder: Path, site: Site, **hosting: Unpack[Hosting]
) -> Session:
    """The session of one node of a federation; ``run`` takes part from wherever it stopped, to the end."""
    facts = {} if site.test is None else {"test_samples": len(next(leaves(site.test)))}
    own: dict[str, Any] = {"data": site.digest, "reading": site.reading}
    session = Session(federation, name, folder, site.problem.x0, facts=facts, **own, **hosting)
    session.program = Node(session, site)
    return session


class Node:
    """What a node does in its session: it computes next to its own data, measures, and writes its models."""

    def __init__(self, session: Session, site: Site) -> None:
        federation = session.federation
        self.session, self.federation, self.site, self.node = session, federation, site, site.node
        store = session.store
        run = f"{federation.id} {store.incarnation}"
        releaser = Releaser(session.folder, run, store.state.exists(), session.events)
        self.privacy, self.method = node_privacy(federation, releaser, site), federation.member_method
        self.releases = None if self.privacy is None else self.privacy.releases
        if isinstance(self.privacy, SamplePrivacy):
            self.site = replace(site, problem=site.problem.protected(self.privacy.release))
        elif self.privacy is not None:
            self.method = with_own_noise(self.method, self.privacy.releases)
        self.pace = None
        if federation.round is not None and federation.round.budget is not None:
            steps = vars(federation.method)["local_steps"]
            most = steps[site.node] if isinstance(steps, tuple) else steps
            self.pace = Pace(session.folder, self.site.problem, federation.round.budget, most)
        names = [federation.names[j] for j in self.all_neighbours]
        self.models = NodeModels(session, self.site, names)
        self.work = Work()
        self.state: MemberState | None = None  # what was saved, until the rounds begin
        self._without_start = False

    # --- from what is saved to the end ------------------------------------------------------------------

    def restore(self) -> None:
        session = self.session
        saved = session.saved()
        if saved is None and self._without_start:
            raise HoldfastError("the start has to be computed again: start the same command once more")
        self.state = None if saved is None else MemberState.read(saved, self._like(), session.x0)
        before = session.take_up(self.state)
        self.work = Work() if before is None or before.work is None else replace(before.work)
        session.exchange.message_round = session.done
        if saved is None:  # what is there is of another roster
            for name in ("report.json", "parted"):
                remove(session.folder / name)
        if any(session.done < round <= self.federation.rounds for round in session.outbox.lost):
            remove(session.folder / "report.json")  # the last round may have to be computed again
        for path in session.store.received():
            if message_key(path.name)[0] > self.federation.rounds:  # asked for again: others wait for that
                remove(path)
        session.outbox.lost.clear()

    def _like(self) -> Any:
        """A tree like what is saved, on the device "meta"."""
        return state_template(self.federation, self.node, self.session.x0)

    def run(self) -> Tensor:
        """The model, [d]."""
        session = self.session
        if (model := self.models.read()) is None:
            session.log_beginning()
            start, self.state = self.state, None
            model, personal = self._train(start)
            self.models.write(model, personal, self.work)
        if (session.folder / "parted").exists():
            session.exchange.phase = "finished"
            session.events.log("finished already", round=session.done)
            return model
        session.exchange.phase = "finishing"
        finish(session, self.companions)
        session.exchange.phase = "finished"
        session.events.log("finished", metrics=session.accounts.metrics)
        return model

    def _train(self, saved: MemberState | None) -> tuple[Tensor, Tensor | None]:
        """All rounds that are left; the model and the personal one, if any, [d]."""
        method = self.method
        if isinstance(method, ServerAlgorithm):
            state = self._follow(method, saved)
            model = self._finished_model()
        else:
            assert isinstance(method, Algorithm)
            state = self._rounds(method, saved)
            model = method.model(split_channel_state(state.method.tree)[0])[0]
        personal = method.personal(split_channel_state(state.method.tree)[0])
        return model, None if personal is None else personal[0]

    # --- among neighbours, or all nodes through a server ------------------------------------------------

    def _rounds(self, method: Algorithm, saved: MemberState | None) -> MemberState:
        session, rounds = self.session, self.federation.rounds
        state = saved or self._begin(method)
        self._forget_start()
        if self.federation.member_network.is_server:
            self._submit_again()

        def one_round(state: MemberState, r: int) -> Finished:
            session.exchange.phase, session.exchange.message_round = f"computing round {r + 1}", r + 1
            after = graph_round(method, state, self._context(r, state), session.exchange)
            return self._measured(after, partial(_model_of, method, after))

        return run_rounds(session, state, one_round, lambda r: r if r < rounds else None)

    def _begin(self, method: Algorithm) -> MemberState:
        """The state before the first round."""
        session, first = self.session, self.federation.first_round
        session.exchange.phase = "preparing"
        start = session.starting_model()
        session.exchange.message_round = first
        context = self._context(first, None)
        context.oracle.step = context.oracle.read = INITIAL_STEP
        tree = graph_start(method, start, context, session.exchange)
        whole = with_channel_state(tree, channel_memories(self.federation, session.x0))
        state = MemberState(round=first, method=Handover(whole))
        finished = self._measured(state, partial(_model_of, method, state))
        session.save(finished.state, **finished.said)
        session.forget_roster_before()
        return finished.state

    def _context(self, r: int, state: MemberState | None) -> RoundContext:
        """Of the round after ``state``; None: of the beginning."""
        session, federation = self.session, self.federation
        memories = () if state is None else split_channel_state(state.method.tree)[1]
        here = torch.tensor([self.node], device=session.x0.device)
        return RoundContext(
            round=r,
            message_round=session.exchange.message_round,
            node=self.node,
            names=federation.names,
            server="" if federation.server is None else federation.server.name,
            network=federation.member_network,
            seed=federation.seed,
            like=session.x0,
            channel_run=new_channel_run(federation, r, memories, here),
            oracle=self._oracle(r, here, "start" if state is None else str(r)),
            traffic=session.accounts.costs.traffic,
        )

    def _oracle(self, r: int, here: Tensor, round: str) -> BatchOracle:
        """The node's own objective in a round; what is paid for of private data is of that ``round``."""
        network, chances = self.federation.member_network, None
        if network.activity is not None:
            chances = torch.as_tensor(network.probabilities(r).compute, device=here.device)
        accesses = Accesses() if self.privacy is None else self.privacy.begin(round)
        options: Any = {"chances": chances, "accesses": accesses}
        if (pace := self.pace) is not None:
            own = partial(self.session.exchange.retry_while_full, partial(pace.steps, r + 1))
            options |= {"gradient": pace.gradient, "limits": lambda _: own()}
        return BatchOracle(self.site.problem, here, self.federation.seed, r, self.work, **options)

    def _measured(self, state: MemberState, model: Callable[[], Tensor]) -> Finished:
        """The state after a round, of which the ``model`` [1, d] is measured, and kept for a roster."""
        session = self.session
        self.models.measure(model(), self.work)
        session.keep_model(state.round, lambda: model()[0])
        return self._with_figures(state)

    def _with_figures(self, state: MemberState) -> Finished:
        metrics = self.session.accounts.metrics
        steps = {} if self.pace is None else {"local_steps": self.pace.taken.get(state.round, 0)}
        whole = replace(state, work=replace(self.work), metrics=metrics)
        return Finished(whole, said={"metrics": metrics, **steps})

    def _forget_start(self) -> None:
        """The first model is as large as any; from here on, only what it is like is asked for."""
        self.site.problem.forget_start()
        self.session.x0 = self.site.problem.x0
        self._without_start = True

    # --- a client of a server that leads ------------------------------------------------------------------

    def _follow(self, method: ServerAlgorithm[Any], saved: MemberState | None) -> MemberState:
        session, federation = self.session, self.federation
        state = saved or self._begin_client(method)
        self._forget_start()
        row = torch.empty_like(session.x0, device="meta")
        broadcast = Broadcast.of(method, federation.wire_channel.down, row)
        assert federation.server is not None
        masked = None
        if federation.secure_aggregation is not None:
            own: Any = (session.folder, session.credentials, session.store.incarnation)
            masked = MaskedClient(federation, federation.server.name, session.name, *own)

        def one_round(state: MemberState, r: int) -> Finished:
            session.exchange.message_round = r + 1
            traffic = replace(session.accounts.costs.traffic)
            try:
                context = self._context(r, state)
                after, last = client_round(method, state, context, session.exchange, broadcast, masked)
            except LeftOut:
                session.accounts.costs.traffic = traffic
                raise
            return self._with_figures(after)._replace(submit=last)

        try:
            self._submit_again()
        except LeftOut as late:
            state = self._left_out(state, late, session.done)
        return run_rounds(session, state, one_round, self._asked, self._left_out)

    def _begin_client(self, method: ServerAlgorithm[Any]) -> MemberState:
        """The state before the first round."""
        session, first = self.session, self.federation.first_round
        session.exchange.phase = "preparing"
        start = session.starting_model()
        whole = with_channel_state(method.init(start[None]), channel_memories(self.federation, session.x0))
        finished = self._with_figures(MemberState(round=first, method=Handover(whole)))
        session.save(finished.state, **finished.said)
        session.forget_roster_before()
        return finished.state

    def _asked(self, r: int) -> int | None:
        """The first round from ``r`` on that the node is in the cohort of.

        Whether it is in a secret one, the server tells it when it asks for the model.
        """
        federation, nodes = self.federation, len(self.federation.node)
        for later in range(r, federation.rounds):
            if federation.secret_cohorts:
                return later
            if self.node in cohort(federation.seed, later, nodes, federation.cohort):
                return later
        return None

    def _left_out(self, state: MemberState, late: LeftOut, then: int) -> MemberState:
        """The state to continue from, after round ``then`` or later, where the server left this client out.

        The state before the round is put back, also if that of the round was saved already: all is as if the
        client had not been in the cohort. It is the one that the last save has left behind. The new save is
        of the same round and leaves it there, so that after a crash in between, all of this is done once
        more. What is saved then tells which rounds are over for this client, should it have to go back.
        """
        session, federation = self.session, self.federation
        if session.done == late.message_round:
            before = MemberState.read(session.store.state_before(), self._like(), session.x0)
            session.exchange.link_digests.restore(before.links)
            session.accounts.costs.traffic = replace(before.costs.traffic)
            state = self._with_figures(replace(before, round=session.done)).state
            session.write(state)
        elif state.method.taken:  # by the round, which was not saved
            newest = session.saved()
            assert newest is not None
            state = MemberState.read(newest, self._like(), session.x0)
        if federation.secret_cohorts:
            session.events.log("not asked in a round", round=late.message_round)
        else:
            reason = "the answer was late"
            session.events.log("left out of a round", "warning", round=late.message_round, reason=reason)
            session.events.audit("left out", round=late.message_round)
        then = min(max(late.now - 1, late.message_round, then), federation.rounds)
        state = self._with_figures(replace(state, round=then)).state
        if then > session.done:
            session.write(state)
        # Last of all: without it, after a crash, the round would be gone through with other messages.
        session.outbox.withdraw(late.message_round)
        return state

    def _finished_model(self) -> Tensor:
        """The model, [d], as the server hands it out."""
        session, federation = self.session, self.federation
        assert federation.server is not None
        server, row = federation.server.name, torch.empty_like(session.x0, device="meta")
        session.exchange.message_round = federation.rounds + 1
        key = (session.exchange.message_round, 0)
        file = session.exchange.fetch(key, [server], specs(row))[server]
        session.exchange.exchanged(server, key[0], [], [file.header.content])
        model: Tensor = session.exchange.retry_while_full(lambda: file.read(row, session.x0.device))
        session.exchange.done = federation.rounds
        self.models.measure(model[None], self.work)
        return model

    def _submit_again(self) -> None:
        """What was computed before the last state was saved: the server may not have it."""
        for message in list(self.session.outbox.messages.values()):
            if message.header.round <= self.session.done:
                self.session.exchange.submit(message)

    # --- what the session asks ------------------------------------------------------------------------------

    def charge(self) -> None:
        if self.privacy is not None:
            self.privacy.charge()

    def figures(self) -> dict[str, Any]:
        """Also what was spent of a privacy budget, which does not depend on the data."""
        return {} if self.releases is None else {"epsilon": round(self.releases.epsilon, 4)}

    def hidden(self) -> dict[str, Any]:
        return {}

    def depends_on(self, known: Incarnations) -> Incarnations:
        return known

    def may_fetch(self, who: str, message_round: int) -> bool:
        names = self.federation.names
        if self.session.rosters is not None and message_round == self.federation.first_round:
            return who in names  # one that joins may ask for a model
        return who in names and names.index(who) in self._neighbours(message_round)

    def readers(self, message_round: int) -> list[str]:
        return [self.federation.names[j] for j in self._neighbours(message_round)]

    def awaits(self, name: str, message_round: int) -> bool:
        names, last = self.federation.names, self.federation.last_message_round
        return message_round < last and name in names and names.index(name) in self.all_neighbours

    def _neighbours(self, message_round: int) -> list[int]:
        """The neighbours in a round; after the last, all that ever were neighbours."""
        network, rounds = self.federation.member_network, self.federation.rounds
        if message_round <= rounds:
            return [int(j) for j in network.at(max(message_round - 1, 0)).neighbours(self.node)]
        last = message_round == self.federation.last_message_round
        return self._companions if last else self.all_neighbours

    @property
    def companions(self) -> list[str]:
        """With which nodes this one finishes: with all where members may change, as they finish together."""
        return [self.federation.names[j] for j in self._companions]

    @property
    def _companions(self) -> list[int]:
        if self.session.rosters is None:
            return self.all_neighbours
        return [j for j in range(len(self.federation.node)) if j != self.node]

    @cached_property
    def all_neighbours(self) -> list[int]:
        """All that are neighbours in any round."""
        network = self.federation.member_network
        rounds = range(self.federation.rounds) if network.sequence is not None else range(1)
        return sorted({int(j) for r in rounds for j in network.at(r).neighbours(self.node)})


def _model_of(method: Algorithm, state: MemberState) -> Tensor:
    """The node's model after a round, [1, d]."""
    return method.model(split_channel_state(state.method.tree)[0])
