"""A node: the method's rounds next to its own data, saved after each, so that any of them can be repeated."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor

from holdfast.contract import Algorithm, ServerAlgorithm
from holdfast.core.errors import HoldfastError
from holdfast.core.tree import leaves
from holdfast.engines.common.channel_run import (
    ChannelMemory,
    ChannelRun,
    split_channel_state,
    with_channel_state,
)
from holdfast.engines.common.counters import Accesses, Work
from holdfast.engines.common.oracle import INITIAL_STEP, BatchOracle
from holdfast.problem.statistics import from_moments
from holdfast_deploy.federation import Federation
from holdfast_deploy.member.base import Member
from holdfast_deploy.member.client import train_with_server
from holdfast_deploy.member.finish import finish
from holdfast_deploy.member.network import Hosting
from holdfast_deploy.member.pace import Pace
from holdfast_deploy.member.peers import NodePeers
from holdfast_deploy.member.privacy import SamplePrivacy, node_privacy, with_own_noise
from holdfast_deploy.member.recording import record_round, recorded, write_report
from holdfast_deploy.member.recovery import recovering
from holdfast_deploy.member.state import MemberState
from holdfast_deploy.member.statistics import averaged, statistics_like
from holdfast_deploy.member.template import channel_memories, new_channel_run, state_template
from holdfast_deploy.member.transport import Transport
from holdfast_deploy.membership.start import (
    forget_roster_before,
)
from holdfast_deploy.site import Site
from holdfast_deploy.storage.messages import DamagedError, Header, MessageFile
from holdfast_deploy.storage.results import read_results, write_model
from holdfast_deploy.storage.store import message_key, remove


class Node(Member):
    """One node of a federation. ``run`` takes part from wherever it stopped, to the end."""

    def __init__(
        self, federation: Federation, name: str, folder: Path, site: Site, **hosting: Unpack[Hosting]
    ) -> None:
        facts = {} if site.test is None else {"test_samples": len(next(leaves(site.test)))}
        own: dict[str, Any] = {"data": site.digest, "reading": site.reading}
        super().__init__(federation, name, folder, site.problem.x0, facts=facts, **own, **hosting)
        self.site, self.node, self.transport = site, site.node, Transport(self)
        self.privacy, self.method = node_privacy(self), federation.member_method
        self.releases = None if self.privacy is None else self.privacy.releases
        if isinstance(self.privacy, SamplePrivacy):
            self.site = replace(site, problem=site.problem.protected(self.privacy.release))
        elif self.privacy is not None:
            self.method = with_own_noise(self.method, self.privacy.releases)
        self.pace = None
        if federation.round is not None and federation.round.budget is not None:
            steps = vars(federation.method)["local_steps"]
            most = steps[site.node] if isinstance(steps, tuple) else steps
            self.pace = Pace(folder, self.site.problem, federation.round.budget, most)
        self.work = Work()
        self.state: Any = None
        self._without_start = False
        self._telling: set[asyncio.Future[None]] = set()  # under way, and nobody waits for them

    def run(self) -> Tensor:
        """Takes part to the end; the model, [d]."""
        self.attend()
        self._restore()
        return recorded(self, lambda: recovering(self, self._run_on, self._restore))

    def _run_on(self) -> Tensor:
        """From what is saved to the end."""
        if (model := self._read_results()) is None:
            begun = "resuming" if self.done > self.federation.first_round else "starting"
            self.events.log(begun, round=self.done)
            model = self._train()
            self._write_results(model)
        if (self.folder / "parted").exists():
            self.phase = "finished"
            self.events.log("finished already", round=self.done)
            return model
        self.phase = "finishing"
        finish(self)
        self.phase = "finished"
        self.events.log("finished", metrics=self.metrics)
        return model

    def _train(self) -> Tensor:
        """All rounds that are left; the model, [d]."""
        method = self.method
        if isinstance(method, ServerAlgorithm):
            return train_with_server(self, method)
        assert isinstance(method, Algorithm)
        return self._rounds(method)

    # --- between neighbours, or everybody through a server --------------------------------------------

    def _rounds(self, method: Algorithm) -> Tensor:
        if self.state is None:
            self._begin(method)
        self.forget_start()
        if self.federation.member_network.is_server:
            self.transport.to_server_again()
        for r in range(self.done, self.federation.rounds):
            self.phase = f"computing round {r + 1}"
            channel_run = self.channel_run(r, split_channel_state(self.state)[1])
            oracle, peers = self.oracle(r), self._peers(r, r + 1, channel_run)
            self.state = with_channel_state(
                method.at(r).round(self._hand_over(), oracle, peers), channel_run.memories
            )
            del oracle, peers
            self.measure(method.model(split_channel_state(self.state)[0]))
            self.save_round(r + 1)
        return method.model(split_channel_state(self.state)[0])[0]

    def _begin(self, method: Algorithm) -> None:
        """The state before the first round."""
        first = self.federation.first_round
        self.phase = "preparing"
        start = self.starting_model()
        oracle = self.oracle(first)
        oracle.step = oracle.read = INITIAL_STEP
        channel_run = self.channel_run(first, ())
        state = method.at(first).init(start[None], oracle, self._peers(first, first, channel_run))
        self.state = with_channel_state(state, channel_memories(self.federation, self.x0))
        self.measure(method.model(state))
        self.save_round(first)
        forget_roster_before(self.membership, self.federation)

    def _hand_over(self) -> Any:
        """The method's state, held by nobody here: what the round lets go of is freed. It is on disk."""
        state, self.state = split_channel_state(self.state)[0], None
        return state

    def _peers(self, r: int, message_round: int, channel_run: ChannelRun) -> NodePeers:
        self.message_round = message_round
        network, seed, traffic = self.federation.member_network, self.federation.seed, self.costs.traffic
        return NodePeers(self.node, network, seed, r, self.transport, self.x0, traffic, channel_run)

    def channel_run(self, r: int, memories: tuple[ChannelMemory, ...]) -> ChannelRun:
        """What messages of a round go through."""
        return new_channel_run(self.federation, r, memories, torch.tensor([self.node], device=self.x0.device))

    def oracle(self, r: int) -> BatchOracle:
        """The node's own objective in a round."""
        network, here = self.federation.member_network, torch.tensor([self.node], device=self.x0.device)
        chances = None
        if network.activity is not None:
            chances = torch.as_tensor(network.probabilities(r).compute, device=self.x0.device)
        round = "start" if self.state is None else str(r)
        accesses = Accesses() if self.privacy is None else self.privacy.begin(round)
        options: Any = {"chances": chances, "accesses": accesses}
        if (pace := self.pace) is not None:
            own = partial(self.retry_while_full, partial(pace.steps, r + 1))
            options |= {"gradient": pace.gradient, "limits": lambda _: own()}
        return BatchOracle(self.site.problem, here, self.federation.seed, r, self.work, **options)

    def publish(self, header: Header, tree: Any, recipient: str = "") -> MessageFile:
        if self.privacy is not None:
            self.retry_while_full(self.privacy.charge)
        return super().publish(header, tree, recipient)

    def forget_start(self) -> None:
        """The first model is as large as any; from here on, only what it is like is asked for."""
        self.site.problem.forget_start()
        self.x0 = self.site.problem.x0
        self._without_start = True

    # --- what is kept ---------------------------------------------------------------------------------

    def _restore(self) -> None:
        """What is saved, so that all that is not, or is damaged, is computed again."""
        saved = self.store.saved_state(self.outbox.lost)
        if saved is None and self._without_start:
            raise HoldfastError("the start has to be computed again: start the same command once more")
        like = state_template(self.federation, self.node, self.x0)
        state = None if saved is None else MemberState.read(saved, like, self.x0)
        self.take_up(state)
        before = state or self.before_this_roster()
        self.message_round, self.state, self.work = self.done, None, Work()
        if before is not None and before.work is not None:
            self.work = replace(before.work)
        if state is not None:
            self.state, self.metrics = state.method.take(), dict(state.metrics)
        else:  # what is there is of another roster
            for name in ("report.json", "parted"):
                remove(self.folder / name)
        if any(self.done < round <= self.federation.rounds for round in self.outbox.lost):
            remove(self.folder / "report.json")  # the last round may have to be computed again
        for path in self.store.received():
            if message_key(path.name)[0] > self.federation.rounds:  # asked for again: others wait for that
                remove(path)
        self.outbox.lost.clear()

    def save_round(self, done: int) -> None:
        """The round is finished: writes it down, then forgets what it took."""
        method = self.method
        if self.privacy is not None:
            self.retry_while_full(self.privacy.charge)
        if self.keeper is not None and isinstance(method, Algorithm):
            self.keep_model(done, method.model(split_channel_state(self.state)[0])[0])
        self.save(done, self.state, replace(self.work), **self.metrics)
        self.retry_while_full(lambda: self._forget(done))
        if self.federation.member_network.activity is not None:
            self._release(done)
        own: dict[str, Any] = {} if self.pace is None else {"local_steps": self.pace.taken.get(done, 0)}
        self.events.log("round done", round=done, metrics=self.metrics, **own)

    def _forget(self, done: int) -> None:
        """What came in for the rounds before, and what went out and nobody will ask for again."""
        for path in self.store.received():
            if message_key(path.name)[0] < done:  # those of this round may be needed to compute it again
                remove(path)
        names = self.federation.names
        self.outbox.prune(done, lambda past: [names[j] for j in self._neighbours(past)])

    def measure(self, row: Tensor) -> None:
        """Figures of the node's own model, on its own data, into metrics.csv."""
        r, every = self.message_round, self.federation.evaluate_every
        if r % every and r < self.federation.rounds:
            return
        self.metrics = self.site.measure(row.detach())
        links = 1 if self.federation.member_network.is_server else len(self.all_neighbours)
        record_round(self, min(r, self.federation.rounds), self.work, links)
        if self.record.is_best():
            self._keep_best(row.detach())

    def _keep_best(self, row: Tensor) -> None:
        """Writes down the model [1, d], or with statistics, that did best on the node's own test split."""
        problem = self.site.problem
        if row.shape[-1] == problem.model.dim:
            row = problem.tester.complete(row, problem.here)
        notes = {"federation": self.federation.name, "node": self.name, "round": self.message_round}
        notes |= self.metrics
        self.retry_while_full(partial(write_model, self.folder, problem.model, row[0], notes, "best"))

    def _write_results(self, model: Tensor) -> None:
        """The model and the personal one, if any, as their modules' states, and the report of this node."""
        notes = {"federation": self.federation.name, "node": self.name, "rounds": self.federation.rounds}
        problem, rows = self.site.problem, {"model": model}
        personal = self.method.personal(split_channel_state(self.state)[0])
        if personal is not None:
            rows["personal"] = personal[0]
        complete = self._complete([row.to(problem.x0) for row in rows.values()])
        for name, row in zip(rows, complete, strict=True):
            self.retry_while_full(partial(write_model, self.folder, problem.model, row, notes, name))
        write_report(self, rows)

    def _complete(self, rows: list[Tensor]) -> list[Tensor]:
        """Finished models [d] with BatchNorm's statistics, if any: the node's own, or everybody's average.

        Figures by round are of models with the node's own; those of the last round are measured again.
        """
        problem = self.site.problem
        if statistics_like(self.federation, problem.model) is None:
            return [problem.tester.complete(row[None], problem.here)[0] for row in rows]
        mean = averaged(self, torch.cat([problem.tester.moments(row[None], problem.here) for row in rows]))
        complete = torch.cat([torch.stack(rows), from_moments(mean).flatten(1)], 1)
        self.measure(complete[:1])
        return list(complete)

    def _read_results(self) -> Tensor | None:
        """The model, [d], of a node that has finished: the server may be gone since.

        None if it has not, or if a file is damaged: then the model comes from the state, or from the server.
        """
        if not (self.folder / "report.json").exists():
            return None
        try:
            model, self.metrics = read_results(self.folder, self.site.problem.model)
        except DamagedError as error:
            self.events.complain("a file is damaged", reason=f"{error}: it is written again")
            return None
        self.done = self.federation.rounds
        return model.to(self.x0)

    def status(self) -> dict[str, Any]:
        """Also what was spent of a privacy budget, which does not depend on the data."""
        spent = {} if self.privacy is None else {"epsilon": round(self.privacy.releases.epsilon, 4)}
        return super().status() | spent

    # --- who is next to us ----------------------------------------------------------------------------

    def _neighbours(self, message_round: int) -> list[int]:
        """The neighbours in a round; after the last, everybody who ever was one."""
        network, rounds = self.federation.member_network, self.federation.rounds
        if message_round <= rounds:
            return [int(j) for j in network.at(max(message_round - 1, 0)).neighbours(self.node)]
        return self.companions if message_round == self.federation.last_message_round else self.all_neighbours

    @property
    def companions(self) -> list[int]:
        """With which nodes this one finishes: with all where members may change, as they finish together."""
        if self.keeper is None:
            return self.all_neighbours
        return [j for j in range(len(self.federation.node)) if j != self.node]

    def awaits(self, name: str) -> bool:
        names, last = self.federation.names, self.federation.last_message_round
        return self.message_round < last and name in names and names.index(name) in self.all_neighbours

    @cached_property
    def all_neighbours(self) -> list[int]:
        """Everybody who is a neighbour in any round."""
        network = self.federation.member_network
        rounds = range(self.federation.rounds) if network.sequence is not None else range(1)
        return sorted({int(j) for r in rounds for j in network.at(r).neighbours(self.node)})

    def may_fetch(self, who: str, message_round: int) -> bool:
        names = self.federation.names
        if self.keeper is not None and message_round == self.federation.first_round:
            # A member that joins may ask for a model.
            return who in names
        return who in names and names.index(who) in self._neighbours(message_round)

    def _release(self, done: int) -> None:
        """Over sporadic links others may not hear of us for long; they need not keep messages for us."""

        async def tell() -> None:
            for j in self._neighbours(done):
                link = await self.link(self.federation.names[j])
                telling = asyncio.ensure_future(link.release(done + 1))
                self._telling.add(telling)
                telling.add_done_callback(self._telling.discard)

        self.run_on_loop(tell)
