"""The rounds of a method as functions from a state to a state; who runs them, and how, is not known here."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from holdfast.contract import IDENTITY, Algorithm, Channel, Method, ServerAlgorithm
from holdfast.core.errors import HoldfastError
from holdfast.core.randomness import cohort, poisson_cohort
from holdfast.core.tree import Tree, put_rows, tree_map
from holdfast.core.validation import Cohort
from holdfast.engines.common.channel_run import (
    ChannelMemory,
    ChannelRun,
    Listener,
    lost_error,
    new_memories,
    server_memory,
    split_channel_state,
    with_channel_state,
)
from holdfast.engines.common.counters import Counters
from holdfast.engines.common.fit import Cohorts, StepsTaken, check_fit, check_steps
from holdfast.engines.common.oracle import INITIAL_STEP, BatchOracle, MinibatchGradient
from holdfast.engines.common.peers import HERE, Place, StackedPeers
from holdfast.engines.common.profile import Profile, placed
from holdfast.engines.common.robust import aggregated, forged
from holdfast.problem.problem import Problem
from holdfast.topology import Network


class ServerState(NamedTuple):
    """State of a server method."""

    server: Any
    clients: Tree  # rows of all clients here, kept once


class Inputs(NamedTuple):
    """All that differs from round to round. Where a round is replayed, tensors stand in for the numbers."""

    method: Method  # as it is in this round
    round: int
    cohort: Tensor  # [k]: the clients that take part, of those here


class Rounds:
    """The rounds of ``method`` on ``problem`` over ``network``, for the nodes at ``place``."""

    def __init__(
        self,
        method: Method,
        problem: Problem,
        network: Network,
        *,
        seed: int = 0,
        cohort: Cohort | Cohorts = "all",
        place: Place = HERE,
        channel: Channel = IDENTITY,
        steps: StepsTaken | None = None,
        profile: Profile | None = None,
    ) -> None:
        check_steps(method, problem.nodes, steps)
        self.profile = check_fit(method, problem.nodes, network, cohort, channel, profile)
        self.method, self.problem, self.network, self.place = method, problem, network, place
        self.steps = steps
        self.seed, self.recorded = seed, None if isinstance(cohort, int | str) else cohort
        self.cohort_size = cohort if isinstance(cohort, int) else problem.nodes  # recorded ones: at most
        self.capabilities = method.capabilities
        own = place.nodes(network)
        self.nodes = own.to(problem.x0.device)
        # The rows here whose nodes do not attack; None: all. Found once, as a GPU would be waited for.
        attackers = network.attackers(own.cpu().numpy())
        honest = torch.from_numpy(np.flatnonzero(~attackers)) if attackers.any() else None
        self.honest = None if honest is None else honest.to(self.nodes.device)
        # Of a network that varies with a period, the links of every round are made once.
        self._links = lru_cache(maxsize=network.period or 1)(lambda now: place.links(now, problem.x0))
        self.channel = placed(channel, method, network)
        self.listener: Listener | None = None  # receives what travels
        self.lost = torch.zeros((), dtype=torch.bool, device=problem.x0.device)  # a flag for ``ChannelRun``
        # [2]: the sum of the losses of the last round's minibatches here, and their number. Like the flag a
        # tensor that stays where it is: rounds that are recorded write it as well.
        self.losses = torch.zeros(2, dtype=torch.float64, device=problem.x0.device)

    def initial(self, counters: Counters, round: int = 0, start: Tensor | None = None) -> Tree:
        """The state before ``round``, the first one.

        ``start``: the models [m, d] that the nodes here begin with, if not all with the problem's own. A
        server begins with the first of them.
        """
        method, x0 = self.method.at(round), self.problem.x0
        rows = x0.expand(len(self.nodes), -1) if start is None else start
        if isinstance(method, ServerAlgorithm):
            clients = _own_memory(method.init(rows), shared=x0)
            return with_channel_state(
                ServerState(method.init_server(rows[0].clone()), clients), self._server_memory()
            )
        assert isinstance(method, Algorithm)
        oracle = self._oracle(self.nodes, round, counters)
        oracle.step = oracle.read = INITIAL_STEP
        peers = self._peers(round, counters, self._channel_run(round, ()))
        return with_channel_state(method.init(rows.clone(), oracle, peers), self._memories())

    def _memories(self) -> tuple[ChannelMemory, ...]:
        """What the channel remembers before the first round."""
        if self.channel.transparent:
            return ()
        messages = self.profile.sent_in_round(self.problem.x0)
        all_rows = [tree_map(lambda t: t.expand(len(self.nodes), *t.shape[1:]), m) for m in messages]
        memories: tuple[ChannelMemory, ...] = _own_memory(
            new_memories(self.channel, all_rows), shared=self.problem.x0
        )
        return memories

    def _server_memory(self) -> ChannelMemory | tuple[()]:
        """The same where a server leads: it is the only receiver, and holds one row."""
        return server_memory(*self._memories())

    def inputs(self, round: int) -> Inputs:
        """What ``round`` differs in from others."""
        return Inputs(self.method.at(round), round, self.cohort(round))

    def cohort(self, round: int) -> Tensor:
        """[k]: the clients of the round's cohort that are here; perhaps none."""
        if self.recorded is None and self.cohort_size == self.problem.nodes:
            return self.nodes
        chosen = torch.tensor(self.clients_asked(round), dtype=torch.int64, device=self.nodes.device)
        return self.place.held(self.nodes, chosen)

    def clients_asked(self, round: int) -> list[int]:
        """The nodes, here or elsewhere, that take part in the round, ascending."""
        if self.recorded is not None:
            if round >= len(self.recorded):
                raise HoldfastError(f"cohort: recorded for {len(self.recorded)} rounds, and this is one more")
            return sorted(self.recorded[round])
        if self.cohort_size == self.problem.nodes:
            return list(range(self.problem.nodes))
        draw = poisson_cohort if self.capabilities.poisson_cohorts else cohort
        return draw(self.seed, round, self.problem.nodes, self.cohort_size).tolist()

    def _steps_taken(self, round: int, node: int) -> int:
        assert self.steps is not None
        if round >= len(self.steps):
            raise HoldfastError(f"steps: recorded for {len(self.steps)} rounds, and this is one more")
        return self.steps[round][node]

    def advance(
        self, state: Tree, now: Inputs, counters: Counters, gradient: MinibatchGradient | None = None
    ) -> Tree:
        """The state after the round. ``gradient`` computes minibatch gradients, if not the problem itself."""
        if isinstance(now.method, ServerAlgorithm):
            return with_channel_state(
                *self._server_round(now.method, *split_channel_state(state), now, counters, gradient)
            )
        assert isinstance(now.method, Algorithm)
        oracle = self._oracle(self.nodes, now.round, counters, gradient)
        own, memories = split_channel_state(state)
        channel_run = self._channel_run(now.round, memories)
        after = now.method.round(own, oracle, self._peers(now.round, counters, channel_run))
        self._note(oracle.losses)
        return with_channel_state(after, channel_run.memories)

    def models(self, state: Tree) -> Tensor:
        """The model of each node here after the last exchange, [m, d]; a server's is that of all."""
        if isinstance(self.method, ServerAlgorithm):
            return self.method.model(split_channel_state(state)[0].server).expand(len(self.nodes), -1)
        assert isinstance(self.method, Algorithm)
        return self.method.model(split_channel_state(state)[0])

    def duals(self, state: Tree) -> Tensor | None:
        """What the method says of ``dual``, for the nodes here."""
        own = split_channel_state(state)[0]
        return self.method.dual(own.clients if isinstance(own, ServerState) else own)

    def personal(self, state: Tree) -> Tensor | None:
        """What the method says of ``personal``, for the nodes here."""
        own = split_channel_state(state)[0]
        return self.method.personal(own.clients if isinstance(own, ServerState) else own)

    def check_channel(self) -> None:
        """Raises, on all ranks alike, if a finite number did not arrive as one."""

        def check() -> None:
            if bool(self.lost):
                raise lost_error(self.channel)

        self.place.world.raise_on_all(check)

    def _server_round(
        self,
        method: ServerAlgorithm[Any],
        state: ServerState,
        memory: ChannelMemory | tuple[()],
        now: Inputs,
        counters: Counters,
        gradient: MinibatchGradient | None,
    ) -> tuple[ServerState, ChannelMemory | tuple[()]]:
        # If nobody here was drawn, one client whose work counts for nothing shows what a message looks like.
        takes_part = len(now.cohort) > 0
        chosen, counted = (now.cohort, counters) if takes_part else (self.nodes[:1], Counters())
        size = self.cohort_size if self.recorded is None else len(self.recorded[now.round])
        places, share = self.place.rows(self.nodes, chosen), size / self.problem.nodes
        remembered = memory or ChannelMemory((), ())
        before, sender = tree_map(lambda rows: rows[places], (state.clients, remembered.sender))
        channel_run = self._channel_run(
            now.round, (ChannelMemory(sender, ()),) if memory else (), chosen, takes_part
        )
        answer = channel_run.broadcast(method.broadcast(state.server), self.problem.nodes)
        oracle = self._oracle(chosen, now.round, counted, gradient, takes_part)
        oracle.cohort = self._asked(now)
        after, message = method.client(before, answer.arrived, oracle)
        self._note(oracle.losses if takes_part else [])
        sent = channel_run.send(message)
        asked = len(self.clients_asked(now.round)) if self.capabilities.poisson_cohorts else size
        counters.traffic.count(asked, answer.message, answer.wire)
        counters.traffic.count(asked, message, sent.wire)
        arrived, kept = sent.arrived, (state.clients, remembered.sender)
        if not takes_part:
            arrived = tree_map(lambda rows: rows[:0], arrived)
        received = forged(self.network, arrived, chosen)
        if self.network.aggregation.plain:
            mean = tree_map(lambda rows: self.place.world.mean(rows, size), received)
        else:
            mean = aggregated(self.network, received)
        mean, receiver = self.channel.gather(mean, remembered.receiver, share)
        server = method.server(state.server, mean, share)
        if self.capabilities.answers:
            answer = channel_run.broadcast(method.answer(server), self.problem.nodes, exchange=1)
            counters.traffic.count(size, answer.message, answer.wire)
        if takes_part:
            reply = answer.arrived if self.capabilities.answers else ()
            after = method.finish(after, sent.arrived, reply, oracle)
            kept = put_rows(kept, places, (after, channel_run.last.sender))
        return ServerState(server, kept[0]), ChannelMemory(kept[1], receiver) if memory else ()

    def _asked(self, now: Inputs) -> Tensor | None:
        """[c], ascending: all clients in the round's cohort, also elsewhere; None if that is every client."""
        if self.recorded is None and self.cohort_size == self.problem.nodes:
            return None
        if len(self.nodes) == self.problem.nodes:
            return now.cohort
        return torch.tensor(self.clients_asked(now.round), device=self.nodes.device)

    def _note(self, losses: list[Tensor]) -> None:
        """Keeps sum and number of the ``losses`` of a round."""
        if not losses:
            self.losses.zero_()
            return
        total = torch.cat(losses).sum(dtype=torch.float64)
        count = sum(len(some) for some in losses)
        self.losses.copy_(torch.stack([total, torch.full_like(total, count)]))

    def _oracle(
        self,
        nodes: Tensor,
        round: int,
        counters: Counters,
        gradient: MinibatchGradient | None = None,
        counts: bool = True,
    ) -> BatchOracle:
        chances = None
        if self.network.activity is not None:
            chances = torch.as_tensor(self.network.probabilities(round).compute, device=nodes.device)
        guard, work = self.place.guard(counts), counters.work
        oracle = BatchOracle(self.problem, nodes, self.seed, round, work, chances, gradient, guard)
        oracle.accesses = counters.accesses
        if self.steps is not None:
            oracle.limits = partial(self._steps_taken, round)
        return oracle

    def _channel_run(
        self,
        round: int,
        memories: tuple[ChannelMemory, ...],
        nodes: Tensor | None = None,
        counts: bool = True,
    ) -> ChannelRun:
        lost = self.lost if counts else torch.zeros_like(self.lost)
        senders = self.nodes if nodes is None else nodes
        return ChannelRun(self.channel, memories, self.seed, round, senders, lost, self.listener)

    def _peers(self, round: int, counters: Counters, channel_run: ChannelRun) -> StackedPeers:
        links = self._links(self.network.at(round))
        return self.place.peers(self.network, links, self.seed, round, counters, channel_run)


def _own_memory(clients: Tree, shared: Tensor) -> Tree:
    """``clients`` with no memory in common: rows are put back in place. Copies nothing without need."""
    taken = {shared.data_ptr()}

    def own(rows: Tensor) -> Tensor:
        dense = rows.contiguous()
        if dense.data_ptr() in taken:
            dense = dense.clone()
        taken.add(dense.data_ptr())
        return dense

    return tree_map(own, clients)
